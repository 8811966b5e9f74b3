"""Tests the kernels that choose tokens: the largest, random bits and the k-th largest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.kernels import native_attention
from jaxllm.sampling import gumbel_noise, keep_top_k, largest, ordered_bits
from tests.kernels.drawing import answers, compiled
from tests.kernels.switching import fall_back, needs_native
from tests.quick_jit import jit

# Without subnormals: XLA takes them for zeros.
SPECIAL = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 1e-37, 3e38]


@pytest.mark.slow
@settings(max_examples=50)
@given(st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=700), st.integers(1, 3))
def test_the_largest_is_that_of_argmax(values, rows):
    """Of equal ones the first, of NaN the first, whatever else there is."""
    x = np.stack([np.roll(np.array(values, np.float32), row) for row in range(rows)])
    got = np.asarray(largest(jnp.asarray(x)))
    np.testing.assert_array_equal(got, np.argmax(x, axis=-1))
    with pytest.MonkeyPatch.context() as patch:
        fall_back(patch)
        np.testing.assert_array_equal(largest(jnp.asarray(x)), got)


@needs_native
@pytest.mark.parametrize("width", [1, 15, 16, 255, 256, 257, 512, 32000])
def test_the_largest_is_found_wherever_it_is(width):
    draw = np.random.default_rng(width)
    x = draw.normal(size=(30, width)).astype(np.float32)
    x[np.arange(30), draw.integers(0, width, 30)] = 50
    for kernels, got in answers(native_attention.largest, x).items():
        np.testing.assert_array_equal(got, np.argmax(x, axis=-1), err_msg=kernels)


def key_of(seed, drawn):
    return jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), drawn)


SEEDS = [[0, 0], [1, 2], [0xFFFFFFFF, 0xFFFFFFFF], [0x80000000, 77]]


@needs_native
@pytest.mark.parametrize("shape", [(1,), (1, 37), (3, 1000), (1, 40_000)], ids=str)
def test_random_bits_are_those_of_jax(shape):
    given = [(np.array(seed, np.uint32), np.int32(drawn)) for seed in SEEDS for drawn in (0, 1, 2**31 - 1)]
    run = compiled(lambda s, n: native_attention.random_bits(s, n, shape), *given[0])
    wanted = jit(lambda s, n: jax.random.bits(key_of(s, n), shape, jnp.uint32))
    for each in given:
        expected = wanted(*each)
        for kernels, got in run(*each).items():
            np.testing.assert_array_equal(got, expected, err_msg=kernels)


@pytest.mark.parametrize("seed", SEEDS, ids=str)
def test_noise_is_that_of_jax(seed, monkeypatch):
    """To the bit, with kernels and without."""
    seed, drawn, shape = np.array(seed, np.uint32), np.int32(3), (2, 5000)

    def noise(seed, drawn):
        return gumbel_noise(seed, drawn, shape)

    expected = np.asarray(jax.jit(lambda s, n: jax.random.gumbel(key_of(s, n), shape))(seed, drawn))
    np.testing.assert_array_equal(jax.jit(noise)(seed, drawn), expected)
    fall_back(monkeypatch)
    np.testing.assert_array_equal(jax.jit(lambda s, n: noise(s, n))(seed, drawn), expected)


@needs_native
@settings(max_examples=60)
@given(st.data())
def test_the_kth_largest_is_that_of_a_sort(data):
    """Of any bits: subnormals, both zeros, infinities and NaN of either sign among them."""
    rows, width = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 400))
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    bits = draw.integers(0, 2**32, (rows, width), dtype=np.uint32)
    x = bits.view(np.float32)
    special = draw.random((rows, width)) < 0.2
    x[special] = draw.choice(np.array(SPECIAL, np.float32), int(special.sum()))
    k = data.draw(st.integers(0, width + 2))
    keys = np.where(x.view(np.uint32) >> 31 == 1, ~x.view(np.uint32), x.view(np.uint32) | 0x80000000)
    keys = np.sort(keys, axis=-1)[:, ::-1]
    expected = keys[:, k - 1] if 0 < k <= width else np.full(rows, 0xFFFFFFFF if k == 0 else 0)
    for kernels, got in answers(native_attention.kth_largest, x, np.int32(k)).items():
        np.testing.assert_array_equal(got, expected, err_msg=kernels)


@needs_native
def test_the_kth_largest_of_a_vocabulary():
    """More numbers than are counted at once, and equal ones."""
    draw = np.random.default_rng(0)
    x = np.round(draw.normal(size=(2, 200_000)), 3).astype(np.float32)
    for k in (1, 40, 65_537, 200_000):
        expected = ordered_bits(jnp.asarray(-np.sort(-x, axis=-1)[:, k - 1]))
        for got in answers(native_attention.kth_largest, x, np.int32(k)).values():
            np.testing.assert_array_equal((got ^ np.uint32(1 << 31)).view(np.int32), expected)


def test_top_k_keeps_the_same_without_kernels(monkeypatch):
    x = np.round(np.random.default_rng(0).normal(size=(3, 999)), 1).astype(np.float32)
    for k in (1, 7, 500, 999):
        with monkeypatch.context() as patch:
            got = jax.jit(lambda x, k: keep_top_k(x, k))(x, np.int32(k))
            fall_back(patch)
            np.testing.assert_array_equal(jax.jit(lambda x, k: keep_top_k(x, k))(x, np.int32(k)), got)
        assert np.isfinite(got).sum(axis=-1).min() >= k
