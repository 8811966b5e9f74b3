"""The cache's one writer changes exactly the rows it is told to; growing keeps what is there."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.kv.cache import TokenPositions, fork, grow, new_cache, write_rows
from tests.variants import every_variant, jitted

CFG = ModelConfig(
    model_type="llama", vocab_size=7, hidden_size=8, layers=3, heads=4, kv_heads=2, head_dim=5,
    ffn_size=12, window_tokens=32,
)  # fmt: skip
SIZES = (1, 2, 3, 5, 8)
DIMS = chex.Dimensions(B=2, K=2, H=3)
compiled_write = jitted(write_rows)


def bits(rows):
    rows = np.asarray(rows)
    return rows.view(np.uint16 if rows.itemsize == 2 else np.uint32)


def random_bits(rng, tokens, dtype):
    """Any pattern, so that whatever computes with them on the way is seen.

    In float32 also NaNs; XLA:CPU selects bfloat16 by way of float32, which changes a NaN's payload and
    flushes subnormals: there the exponent's highest bit is off and its lowest on.
    """
    shape = (*DIMS["BK"], tokens, DIMS.H)
    if dtype == np.float32:
        return rng.integers(0, 1 << 32, shape, dtype=np.uint32).view(dtype)
    patterns = rng.integers(0, 1 << 16, shape, dtype=np.uint16)
    return ((patterns & 0xBFFF) | 0x0080).view(dtype)


def check_write(capacity, length, start, valid, dtype=np.float32, write=compiled_write):
    rng = np.random.default_rng([capacity, length, start, valid])
    rows, new = random_bits(rng, capacity, dtype), random_bits(rng, length, dtype)
    got = write(rows, new, np.int32(start), np.int32(valid))
    chex.assert_trees_all_equal_shapes_and_dtypes(got, rows)
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


@every_variant
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_exactly_the_valid_rows_change_in_each_variant(dtype, variant):
    """Within, across and beyond the end; one row alone; in the cache's dtype."""
    write = variant(write_rows)
    for start, valid in ((0, 3), (1, 2), (3, 3), (5, 3), (6, 1), (2, 0)):
        check_write(5, 3, start, valid, dtype, write=write)
    for capacity in (1, 2, 5) if dtype == np.float32 else ():
        for start in range(capacity):
            check_write(capacity, 1, start, 1, write=write)
    for length in (1, 3):
        rows = np.zeros((*DIMS["BK"], 5, DIMS.H), dtype)
        new = np.random.default_rng(0).standard_normal((*DIMS["BK"], length, DIMS.H)).astype(np.float32)
        got = write(rows, new, np.int32(1), np.int32(length))
        chex.assert_type(got, dtype)
        np.testing.assert_array_equal(got[:, :, 1 : 1 + length], new.astype(dtype))
        assert not np.any(got[:, :, 0])


def test_shrinking_is_refused():
    with pytest.raises(ConfigError, match="5 positions cannot shrink to 4"):
        grow(new_cache(CFG, batch=1, tokens=5, dtype=jnp.float32), 4)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize(("capacity", "tokens"), [(100, 1), (100, 64), (100, 65), (100, 100), (8, 5)])
def test_a_fork_has_the_first_tokens_and_leaves_the_cache_as_it_is(capacity, tokens, stacked):
    empty = new_cache(CFG, batch=1, tokens=capacity, dtype=np.float32, mass=True, stacked=stacked)
    rng = np.random.default_rng(tokens)
    cache = jax.tree.map(lambda rows: jnp.asarray(rng.normal(size=rows.shape), rows.dtype), empty)
    before = jax.tree.map(np.array, cache)
    found = jax.jit(fork)(cache, empty, np.int32(tokens))
    chex.assert_trees_all_equal(cache, before)
    chex.assert_trees_all_equal_shapes_and_dtypes(found, cache)
    for own, rows in zip((*found.keys, *found.values), (*before.keys, *before.values), strict=True):
        np.testing.assert_array_equal(own[..., :tokens, :], rows[..., :tokens, :])
    assert int(found.length) == tokens
    assert not np.asarray(found.mass).any()


def test_a_token_sees_itself_and_what_is_before_it():
    at = TokenPositions.after(jnp.int32(2), 3, jnp.int32(3))
    whole = np.array([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]], bool)
    np.testing.assert_array_equal(at.visible(6, 0), whole)
    windowed = np.array([[0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0]], bool)
    np.testing.assert_array_equal(at.visible(6, 2), windowed)
