"""Attention, norms and masks against numpy; over the rows in use, or by blocks, as over all at once."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
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
    causal_mask,
    over_used_prefix,
    rms_norm,
)
from tests.quick_jit import jit
from tests.variants import every_variant


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@every_variant
def test_norms_take_their_statistics_in_float32(variant):
    """4096 squares of 16 in bfloat16 would stop adding up at 4096."""
    x = np.full((1, 4096), 16, ml_dtypes.bfloat16)
    got = variant(rms_norm)(x, np.ones(4096, np.float32), 1e-6)
    np.testing.assert_array_equal(np.asarray(got, np.float32), 1.0)


OPTIONS = ("scale", "softcap")
attend = jit(attention, static_argnames=OPTIONS)


def naive_attention(q, k, v, mask, scale, softcap):
    """Head by head, query by query, in float64."""
    q, k, v = (np.asarray(each, np.float64) for each in (q, k, v))
    B, T, K, G, H = q.shape
    mask = np.broadcast_to(mask, (B, *mask.shape[-2:]))
    out = np.zeros((B, T, K, G, H))
    for b, t, head, g in np.ndindex(B, T, K, G):
        scores = k[b, head] @ q[b, t, head, g] * scale
        if softcap:
            scores = np.tanh(scores / softcap) * softcap
        seen = mask[b, t]
        weights = np.exp(scores[seen] - scores[seen].max())
        out[b, t, head, g] = weights @ v[b, head][seen] / weights.sum()
    return out


@every_variant
@pytest.mark.parametrize(("kv_heads", "group"), [(3, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_attention(kv_heads, group, softcap, variant):
    dims = chex.Dimensions(B=2, T=3, S=5, K=kv_heads, G=group, H=4)
    q = 2 * normal(*dims["BTKGH"])
    k, v = 2 * normal(*dims["BKSH"], seed=1), normal(*dims["BKSH"], seed=2)
    mask = np.asarray(causal_mask(np.arange(2, 5, dtype=np.int32), dims.S, 3))
    run = functools.partial(variant(attention, static_argnames=OPTIONS), scale=0.7, softcap=softcap)
    got = run(q, k, v, mask)
    chex.assert_shape(got, dims["BTKGH"])
    chex.assert_type(got, jnp.float32)
    np.testing.assert_allclose(got, naive_attention(q, k, v, mask, 0.7, softcap), atol=1e-5)
    if group == 1:
        return
    # One mask per row of the batch.
    masks = np.stack([mask, np.random.default_rng(3).random(dims["TS"]) < 0.5])
    masks[1, :, 2] = True
    got = run(q, k, v, masks)
    np.testing.assert_allclose(got, naive_attention(q, k, v, masks, 0.7, softcap), atol=1e-5)


def test_fully_masked_row_is_the_mean_and_finite():
    """It happens to padding; NaN there would spread into the cache and then everywhere."""
    q, k, v = 50 * normal(1, 2, 1, 2, 4), 50 * normal(1, 1, 3, 4, seed=1), normal(1, 1, 3, 4, seed=2)
    mask = np.array([[False] * 3, [True, False, False]])
    got = np.asarray(attend(q, k, v, mask, scale=1.0))
    chex.assert_tree_all_finite(got)
    for g in range(2):
        np.testing.assert_allclose(got[0, 0, 0, g], v[0, 0].mean(0), atol=1e-6)
        np.testing.assert_allclose(got[0, 1, 0, g], v[0, 0, 0], atol=1e-6)


def test_masked_values_weigh_exactly_nothing():
    q, k, v = normal(1, 1, 1, 1, 4), normal(1, 1, 3, 4, seed=1), normal(1, 1, 3, 4, seed=2)
    mask = np.array([[True, True, False]])
    loud_k, loud_v = k.copy(), v.copy()
    loud_k[0, 0, 2], loud_v[0, 0, 2] = 1e4 * q[0, 0, 0, 0], 1e4
    np.testing.assert_array_equal(
        attend(q, loud_k, loud_v, mask, scale=1.0), attend(q, k, v, mask, scale=1.0)
    )
    # However small the scores are that may be seen.
    k[0, 0, :2] = -1e6 * q[0, 0, 0, 0]
    np.testing.assert_allclose(attend(q, k, v, mask, scale=1.0)[0, 0, 0, 0], v[0, 0, :2].mean(0), atol=1e-5)


B, K, G, H, S = 1, 2, 3, 8, 512


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
        by_pair = bias[:, :, at[None, :] - at[:, None] + count - 1]
        mask = (by_pair + np.where(real, np.float32(0), np.float32(MASKED))).reshape(1, -1, count, count)
    wanted = attention(q, k, v, jnp.asarray(mask), scale=0.5)[:, :valid]
    found = source_self_attention(q, k, v, bias, jnp.int32(valid), scale=0.5, block_tokens=block)
    np.testing.assert_allclose(found[:, :valid], wanted, atol=1e-6)


def test_memory_is_that_of_a_block():
    """Copies of scores of 512 tokens would be 6 MB each; one block's are under 1 MB each."""
    q, k, v, bias = inputs(512, True)
    step = jax.jit(functools.partial(source_self_attention, scale=0.5))
    compiled = step.lower(q[:1], k[:1], v[:1], bias, jnp.int32(512)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 6 << 20
