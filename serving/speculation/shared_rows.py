"""Shares the target's keys and values with a drafter of the target's weights, which then reads no prompt."""

import dataclasses

import jax
import numpy as np

from jaxllm.kv.cache import KVCache


def has_own_rows(cache: KVCache) -> bool:
    """Whether a cache has rows of all its tokens, and nothing else of them: no coded chunks and no states."""
    return cache.coded is None and cache.states is None


def with_rows(cache: KVCache, other: KVCache, tokens: int) -> KVCache:
    """A cache with the keys and values of the first tokens of another one, of the same model.

    Args:
      cache: cache to overwrite.
      other: source cache, with its layers in stacks or separate like those of `cache`, of any capacity.
      tokens: number of tokens; both caches have room for them.
    """

    def filled(empty: tuple[jax.Array, ...], layers: list[np.ndarray]) -> tuple[jax.Array, ...]:
        stacks = [np.zeros(each.shape, each.dtype) for each in empty]
        for layer, rows in enumerate(layers):
            if cache.places is None:
                own = stacks[layer]
            else:
                stack, slot = cache.places[layer]
                own = stacks[stack][slot]
            own[..., :tokens, :] = rows[..., :tokens, :]
        return tuple(map(jax.device_put, stacks))

    return dataclasses.replace(
        cache,
        keys=filled(cache.keys, _by_layer(other, other.keys)),
        values=filled(cache.values, _by_layer(other, other.values)),
        length=np.int32(tokens),  # pyright: ignore[reportArgumentType]
    )


def _by_layer(cache: KVCache, rows: tuple[jax.Array, ...]) -> list[np.ndarray]:
    """The keys or the values `[B, K, S, H]` of each layer, without a copy on a CPU."""
    stacks = [np.asarray(each) for each in rows]
    if cache.places is None:
        return stacks
    return [stacks[stack][slot] for stack, slot in cache.places]
