"""Norms, rotary embedding, masks and attention against numpy, transformers and their own laws."""

import functools
import math

import chex
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scipy.special

from jaxllm.config import RopeConfig
from jaxllm.nn.layers import (
    activate,
    attention,
    causal_mask,
    layer_norm,
    rms_norm,
    rotary_cos_sin,
    rotate,
)
from tests.quick_jit import jit
from tests.variants import every_variant


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


EPS = 0.1  # large enough to tell whether it is inside the root


@every_variant
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_norms(dtype, variant):
    x, scale, bias = (3 * normal(2, 3, 8) + 1).astype(dtype), normal(8, seed=1), normal(8, seed=2)
    wide, narrow = x.astype(np.float64), dtype != np.float32
    by_root = wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + EPS) * scale
    centred = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + EPS)
    got = variant(rms_norm)(x, scale, EPS), variant(layer_norm)(x, scale, bias, EPS)
    chex.assert_type(got, dtype)
    rms, layer = (np.asarray(each, np.float64) for each in got)
    np.testing.assert_allclose(rms, by_root, rtol=2**-7 if narrow else 1e-5)
    room = 2**-6 if narrow else 1e-5
    np.testing.assert_allclose(layer, centred * scale + bias, atol=room, rtol=room)


@every_variant
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("silu", lambda x: x / (1 + np.exp(-x))),
        ("relu", lambda x: np.maximum(x, 0)),
        ("gelu", lambda x: x * scipy.special.ndtr(x)),
        ("gelu_tanh", lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
    ],
)
def test_activations(name, function, variant):
    x = np.linspace(-4, 4, 33, dtype=np.float32)
    got = variant(activate, static_argnums=1)(x, name)
    np.testing.assert_allclose(got, function(x.astype(np.float64)), atol=1e-6)


@every_variant
def test_norms_take_their_statistics_in_float32(variant):
    """4096 squares of 16 in bfloat16 would stop adding up at 4096."""
    x = np.full((1, 4096), 16, ml_dtypes.bfloat16)
    got = variant(rms_norm)(x, np.ones(4096, np.float32), 1e-6)
    np.testing.assert_array_equal(np.asarray(got, np.float32), 1.0)


@every_variant
def test_rotate_pairs_the_halves(variant):
    """Dimension i turns with i + R by the position's angle; the dimensions after 2·R stay."""
    rope = RopeConfig(dim=4, theta=100.0, attention_factor=0.5)
    x = normal(1, 3, 2, 6)
    turn = variant(lambda positions: rotary_cos_sin(positions, rope))
    cos, sin = turn(np.array([0, 1, 7], np.int32))
    chex.assert_shape([cos, sin], (3, 2))
    got = np.asarray(variant(rotate)(x, cos, sin))
    for t, position in enumerate((0, 1, 7)):
        for i, frequency in enumerate((1.0, 0.1)):
            turned = (x[0, t, :, i] + 1j * x[0, t, :, i + 2]) * np.exp(1j * frequency * position) * 0.5
            np.testing.assert_allclose(got[0, t, :, i], turned.real, atol=1e-6)
            np.testing.assert_allclose(got[0, t, :, i + 2], turned.imag, atol=1e-6)
    np.testing.assert_array_equal(got[..., 4:], x[..., 4:])


def picture(mask):
    return ["".join("x" if seen else "." for seen in row) for row in np.asarray(mask)]


@every_variant
def test_causal_mask_by_hand(variant):
    mask, positions = variant(causal_mask, static_argnums=(1, 2)), np.arange(1, 4, dtype=np.int32)
    chex.assert_type(mask(positions, 5, 0), bool)
    assert picture(mask(positions, 5, 0)) == ["xx...", "xxx..", "xxxx."]
    assert picture(mask(positions, 5, 1)) == [".x...", "..x..", "...x."]
    assert picture(mask(positions, 5, 2)) == ["xx...", ".xx..", "..xx."]
    assert picture(mask(positions, 5, 3)) == ["xx...", "xxx..", ".xxx."]
    assert picture(mask(positions, 5, 9)) == picture(mask(positions, 5, 0))


@every_variant
def test_queries_past_the_keys_see_what_is_left(variant):
    mask = variant(causal_mask, static_argnums=(1, 2))
    assert picture(mask(np.array([4, 6], np.int32), 5, 3)) == ["..xxx", "....x"]


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


def test_attention_in_bfloat16_over_a_float32_cache():
    q = normal(1, 2, 2, 2, 4).astype(ml_dtypes.bfloat16)
    k, v = normal(1, 2, 5, 4, seed=1), normal(1, 2, 5, 4, seed=2)
    mask = np.ones((2, 5), bool)
    got = attend(q, k, v, mask, scale=0.5)
    chex.assert_type(got, jnp.bfloat16)
    expected = naive_attention(q, k, v, mask, 0.5, 0.0)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=0.03)


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
