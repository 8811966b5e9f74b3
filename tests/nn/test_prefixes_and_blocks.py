"""Attention over the rows in use, or by blocks, is that over the whole cache or source at once."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels.native import without_native_kernels
from jaxllm.kv.cache import Past, TokenPositions, TreePositions
from jaxllm.nn.documents import source_self_attention
from jaxllm.nn.layers import (
    MASKED,
    AttentionOptions,
    Heads,
    attention,
    cached_attention,
    over_used_prefix,
    prefix_lengths,
)

B, K, G, H, S = 1, 2, 3, 8, 512


def test_lengths_are_parts_of_the_whole():
    assert prefix_lengths(512, 1) == (64, 128, 192, 256, 320, 384, 448, 512)
    assert prefix_lengths(512, 16) == (128, 256, 384, 512)
    assert prefix_lengths(2048, 1)[0] == 256
    assert prefix_lengths(200, 1) == (75, 100, 125, 150, 175, 200)
    assert prefix_lengths(64, 1) == (64,)


def drawn(tokens, seed=0):
    draw = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(draw.normal(size=shape), jnp.float32)

    new = Heads(normal(B, tokens, K, G, H), normal(B, tokens, K, H), normal(B, tokens, K, H))
    return new, Past(normal(B, K, S, H), normal(B, K, S, H))


def tree_at(base):
    mask = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
    rows = base + jnp.arange(3, dtype=jnp.int32)
    at = TreePositions(jnp.int32(base), rows, jnp.asarray(mask))
    return TokenPositions(base + jnp.asarray([0, 1, 1], jnp.int32), jnp.int32(3), at, consecutive=True)


CASES = {
    "a token behind none": TokenPositions.after(jnp.int32(0), 1, jnp.int32(1)),
    "one that fills a prefix": TokenPositions.after(jnp.int32(63), 1, jnp.int32(1)),
    "one behind a prefix": TokenPositions.after(jnp.int32(64), 1, jnp.int32(1)),
    "the last one": TokenPositions.after(jnp.int32(S - 1), 1, jnp.int32(1)),
    "a chunk across prefixes": TokenPositions.after(jnp.int32(120), 16, jnp.int32(16)),
    "a chunk whose end is padding": TokenPositions.after(jnp.int32(120), 16, jnp.int32(8)),
    "a tree across prefixes": tree_at(127),
}


@pytest.mark.parametrize(("case", "window"), list(zip(CASES, itertools.cycle([0, 40]), strict=False)))
def test_it_is_that_of_the_whole(case, window):
    at = CASES[case]
    new, past = drawn(len(at.positions))
    real = int(at.valid)
    bias = jnp.asarray(np.random.default_rng(1).normal(size=(K, G, 33)), jnp.float32)
    for more in ({}, {"sink_logits": jnp.ones((K, G))}, {"bias": bias}):
        options, found = AttentionOptions(scale=0.3, window=window, **more), []
        for branches in (False, True):
            with without_native_kernels(branches=branches):
                attend = functools.partial(cached_attention, options=options)
                mask = at.visible(S, window)
                found.append(jax.jit(attend)(new, None, past, mask, at))
        (wanted, kept, _), (out, same, _) = found
        np.testing.assert_allclose(out[:, :real], wanted[:, :real], atol=1e-5)
        np.testing.assert_array_equal(same.keys, kept.keys)
        np.testing.assert_array_equal(same.values, kept.values)


@pytest.mark.parametrize(("used", "length"), [(1, 64), (64, 64), (65, 128), (300, 320), (512, 512)])
def test_the_shortest_prefix_is_taken(used, length):
    rows = jnp.zeros((B, K, S, H))

    def told(q, keys, values, visible):
        assert keys.shape[2] == values.shape[2] == visible.shape[-1]
        return jnp.full_like(q, keys.shape[2])

    q = jnp.zeros((B, 1, K, G, H))
    assert over_used_prefix(told, q, rows, rows, jnp.ones((1, S), bool), jnp.int32(used)).max() == length


def inputs(count, biased):
    draw = np.random.default_rng(count)
    q = draw.normal(size=(2, count, K, G, H)).astype(np.float32)
    k, v = (draw.normal(size=(2, K, count, H)).astype(np.float32) for _ in "kv")
    return q, k, v, draw.normal(size=(K, G, 2 * count - 1)).astype(np.float32) if biased else None


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("count", "valid", "block"), [(12, 12, 4), (13, 9, 4), (13, 13, 5), (7, 3, 0), (7, 7, 64)]
)
def test_blocks_are_the_whole(biased, count, valid, block):
    q, k, v, bias = inputs(count, biased)
    at = np.arange(count)
    real = at < valid
    if bias is None:
        mask = np.broadcast_to(real, (count, count))
    else:
        by_pair = bias[:, :, at[None, :] - at[:, None] + count - 1].transpose(0, 2, 1, 3)
        mask = by_pair + np.where(real, np.float32(0), np.float32(MASKED))
    wanted = attention(q, k, v, jnp.asarray(mask), scale=0.5)[:, :valid]
    found = source_self_attention(q, k, v, bias, jnp.int32(valid), scale=0.5, block_tokens=block)
    np.testing.assert_allclose(found[:, :valid], wanted, atol=1e-6)


def test_memory_is_that_of_a_block():
    """Copies of scores of 512 tokens would be 6 MB each; one block's are under 1 MB each."""
    q, k, v, bias = inputs(512, True)
    step = jax.jit(functools.partial(source_self_attention, scale=0.5))
    compiled = step.lower(q[:1], k[:1], v[:1], bias, jnp.int32(512)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 6 << 20
