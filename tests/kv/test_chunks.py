"""Chunks come out of a cache and go back to their places, and missing ones can be computed anew."""

import dataclasses

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kv.cache import KVCache, TokenPositions, new_cache
from jaxllm.kv.chunks import chunk_shapes, place_chunks
from jaxllm.models.decoder import embed_tokens, forward, forward_layer
from jaxllm.models.layer_stack import layer_of
from tests.models.configs import CONFIGS, params_of
from tests.variants import every_variant

C = 4
DAILY = ("plain", "sinks", "everything")


@every_variant
def test_chunks_come_back_to_their_places(variant):
    dims = chex.Dimensions(B=1, K=2, S=22, H=3, n=4, C=C)
    rows = np.random.default_rng(0).normal(size=dims["BKSH"]).astype(np.float32)
    chunks = rows[0, :, C : C + dims.n * C].reshape(dims.K, dims.n, C, dims.H).swapaxes(0, 1)
    empty = jnp.zeros_like(rows)
    # In any order; what has no place is dropped, and a chunk that reaches past the end is cut there.
    back = variant(place_chunks)(empty, chunks, np.array([4, 22, 5, 0], np.int32))
    wanted = np.zeros_like(rows)
    wanted[:, :, 16:20], wanted[:, :, 20:22], wanted[:, :, 0:4] = (
        rows[:, :, 4:8], rows[:, :, 12:14], rows[:, :, 16:20],
    )  # fmt: skip
    np.testing.assert_array_equal(back, wanted)


def test_shapes_are_those_of_each_layer():
    cfg = dataclasses.replace(CONFIGS["plain"], head_dim=8)
    assert chunk_shapes(cfg, tokens=C, dtype="float16")[0].values == cfg.kv_heads * C * cfg.head_dim


@pytest.mark.slow
# Which rows a layer reads and writes, no feed-forward part decides: others than some are campaigns.
@pytest.mark.parametrize(
    "name",
    [each if each in DAILY else pytest.param(each, marks=pytest.mark.campaign) for each in CONFIGS],
)
def test_missing_chunks_are_computed_as_if_never_lost(name):
    """Layer by layer, each token at its place among those that are there: exactly what a prefill gives."""
    length = 24
    cfg = dataclasses.replace(CONFIGS[name], window_tokens=length)
    params, draw = params_of(cfg), np.random.default_rng(0)
    tokens = draw.integers(0, cfg.vocab_size, (1, length)).astype(np.int32)
    cache = new_cache(cfg, batch=1, tokens=length, dtype=jnp.float32)
    _, whole = forward(params, jnp.asarray(tokens), cache, cfg=cfg)

    lost = np.array([0, 2, 3, 5])
    at = (lost[:, None] * C + np.arange(C)).reshape(-1).astype(np.int32)
    holes = dataclasses.replace(
        whole,
        keys=tuple(rows.at[..., at, :].set(0) for rows in whole.keys),
        values=tuple(rows.at[..., at, :].set(0) for rows in whole.values),
    )
    # Behind the real ones, padding.
    padded = np.concatenate([at, [at[-1]] * 3]).astype(np.int32)
    places = TokenPositions(jnp.asarray(padded), jnp.int32(len(at)))
    x = embed_tokens(params, jnp.asarray(tokens[:, padded]), places.positions, cfg=cfg)
    for layer in range(cfg.layers):
        x, past, _ = forward_layer(
            layer_of(params, layer), x, places, holes.past(layer), cfg=cfg, layer=layer
        )
        chex.assert_trees_all_close(past.own, whole.past(layer).own, atol=2e-5, rtol=1e-4, strict=True)


@pytest.mark.slow
def test_mass_is_the_same_in_chunks():
    """What each position was attended to, prefilled whole or token by token; every row's sum is 1."""
    cfg = dataclasses.replace(CONFIGS["plain"], window_tokens=16)
    params = params_of(cfg)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, cfg.vocab_size, (1, 12)), jnp.int32)

    def fed(sizes: list[int]) -> KVCache:
        cache, at = new_cache(cfg, batch=1, tokens=16, dtype=jnp.float32, mass=True), 0
        for size in sizes:
            _, cache = forward(params, tokens[:, at : at + size], cache, cfg=cfg)
            at += size
        return cache

    whole, parts = fed([12]), fed([5, 1, 1, 5])
    assert whole.mass is not None
    assert parts.mass is not None
    np.testing.assert_allclose(whole.mass, parts.mass, atol=1e-4)
    assert float(whole.mass.sum()) == pytest.approx(12 * cfg.heads * cfg.layers, rel=1e-5)
    assert not np.asarray(whole.mass)[0, 12:].any()
