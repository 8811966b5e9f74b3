"""The cache's one writer changes exactly the rows it is told to; growing keeps what is there."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.kv.cache import grow, new_cache, write_rows

CFG = ModelConfig(
    model_type="llama", vocab_size=7, hidden_size=8, layers=3, heads=4, kv_heads=2, head_dim=5,
    ffn_size=12, window_tokens=32,
)  # fmt: skip
SIZES = (1, 2, 3, 5, 8)
B, K, H = 2, 2, 3


@functools.cache
def writer():
    return jax.jit(write_rows, compiler_options={"xla_backend_optimization_level": 0})


def bits(rows):
    rows = np.asarray(rows)
    return rows.view(np.uint16 if rows.itemsize == 2 else np.uint32)


def random_bits(rng, tokens, dtype):
    """Any pattern, so that whatever computes with them on the way is seen.

    In float32 also NaNs; XLA:CPU selects bfloat16 by way of float32, which changes a NaN's payload and
    flushes subnormals: there the exponent's highest bit is off and its lowest on.
    """
    if dtype == np.float32:
        return rng.integers(0, 1 << 32, (B, K, tokens, H), dtype=np.uint32).view(dtype)
    patterns = rng.integers(0, 1 << 16, (B, K, tokens, H), dtype=np.uint16)
    return ((patterns & 0xBFFF) | 0x0080).view(dtype)


def check_write(capacity, length, start, valid, dtype=np.float32):
    rng = np.random.default_rng([capacity, length, start, valid])
    rows, new = random_bits(rng, capacity, dtype), random_bits(rng, length, dtype)
    got = writer()(rows, new, np.int32(start), np.int32(valid))
    assert got.shape == rows.shape
    assert got.dtype == rows.dtype
    expected = rows.copy()
    end = min(start + valid, capacity)
    if start < end:
        expected[:, :, start:end] = new[:, :, : end - start]
    np.testing.assert_array_equal(bits(got), bits(expected), err_msg=f"{start=} {valid=}")


@pytest.mark.parametrize("length", [n for n in SIZES if n > 1])
@pytest.mark.parametrize("capacity", SIZES)
def test_exactly_the_valid_rows_change(capacity, length):
    """All places and counts: within, across and beyond the end, chunks longer than the cache."""
    for start in range(capacity + 3):
        for valid in range(length + 1):
            check_write(capacity, length, start, valid)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_exactly_the_valid_rows_change_anywhere(data):
    capacity = data.draw(st.sampled_from((16, 33)))
    length = data.draw(st.sampled_from((4, 16, 40)))
    start = data.draw(st.integers(0, capacity + 2))
    valid = data.draw(st.integers(0, length))
    dtype = data.draw(st.sampled_from((np.float32, ml_dtypes.bfloat16)))
    check_write(capacity, length, start, valid, dtype)


@pytest.mark.parametrize("capacity", [1, 2, 5])
def test_one_row(capacity):
    for start in range(capacity):
        check_write(capacity, 1, start, 1)


@pytest.mark.parametrize("length", [1, 3])
def test_rows_take_the_cache_s_dtype(length):
    rows = np.zeros((B, K, 5, H), ml_dtypes.bfloat16)
    new = np.random.default_rng(0).standard_normal((B, K, length, H)).astype(np.float32)
    got = writer()(rows, new, np.int32(1), np.int32(length))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got[:, :, 1 : 1 + length], new.astype(ml_dtypes.bfloat16))
    assert not np.any(got[:, :, 0])


# Caches


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_new_cache(dtype):
    cache = new_cache(CFG, batch=2, tokens=6, dtype=dtype)
    assert len(cache.keys) == len(cache.values) == 3
    for rows in (*cache.keys, *cache.values):
        assert rows.shape == (2, 2, 6, 5)
        assert rows.dtype == dtype
        assert not np.any(rows)
    assert cache.capacity_tokens == 6
    assert cache.length.shape == ()
    assert cache.length.dtype == jnp.int32
    assert int(cache.length) == 0


def full_cache(tokens):
    rng = np.random.default_rng(0)
    cache = new_cache(CFG, batch=2, tokens=tokens, dtype=jnp.float32)
    filled = jax.tree.map(lambda rows: jnp.asarray(rng.standard_normal(rows.shape), rows.dtype), cache)
    return dataclasses.replace(filled, length=jnp.int32(tokens - 1))


@pytest.mark.parametrize("tokens", [4, 5, 9])
def test_growing_keeps_the_rows_and_the_length(tokens):
    cache = full_cache(4)
    grown = grow(cache, tokens)
    assert grown.capacity_tokens == tokens
    assert int(grown.length) == 3
    for before, after in zip(cache.keys + cache.values, grown.keys + grown.values, strict=True):
        assert after.shape == (2, 2, tokens, 5)
        np.testing.assert_array_equal(after[:, :, :4], before)
        # Finite, because a masked NaN would still be one.
        assert not np.any(after[:, :, 4:])


def test_keys_and_values_stay_apart():
    """Growing through a jitted graph, layers and both kinds keep their places."""
    cache = full_cache(3)
    grown = jax.jit(grow, static_argnums=1)(cache, 5)
    kinds = [np.asarray(rows) for rows in (*grown.keys, *grown.values)]
    assert all(not np.array_equal(a, b) for i, a in enumerate(kinds) for b in kinds[:i])
    np.testing.assert_array_equal(grown.values[2][:, :, :3], cache.values[2])


def test_shrinking_is_refused():
    with pytest.raises(ConfigError, match="5 positions cannot shrink to 4"):
        grow(full_cache(5), 4)
