"""The cache's one writer changes only the rows that it is given; stacks are the caches of their layers;
chunks come out of a cache and go back to their places."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.config import LayerUnits, ModelConfig
from jaxllm.kv.cache import (
    Past,
    TokenPositions,
    TreePositions,
    fork,
    grow,
    new_cache,
    stack_places,
    write_rows,
)
from jaxllm.kv.chunks import place_chunks
from tests.variants import every_variant, jitted, plain

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


DEEP = ModelConfig(
    model_type="llama", vocab_size=7, hidden_size=8, layers=5, heads=4, kv_heads=4, head_dim=4,
    ffn_size=12, window_tokens=32,
)  # fmt: skip
# The second and the last layer are anchors.
HEADS = (2, 4, 2, 2, 4)
LEVEL = dataclasses.replace(DEEP, layer_units=tuple(LayerUnits(kv_heads=each, neurons=3) for each in HEADS))
PLACES = ((0, 0), (1, 0), (0, 1), (0, 2), (1, 1))


def filled(batch=2, tokens=5, mass=False):
    """Every number of it is another."""
    cache, start = new_cache(LEVEL, batch=batch, tokens=tokens, dtype=jnp.float32, mass=mass), [0]

    def numbered(rows):
        start[0] += rows.size
        return jnp.arange(start[0] - rows.size, start[0], dtype=rows.dtype).reshape(rows.shape)

    return dataclasses.replace(
        cache, keys=tuple(map(numbered, cache.keys)), values=tuple(map(numbered, cache.values))
    )


def layers_of(cache):
    return [tuple(map(np.asarray, cache.past(layer).own)) for layer in range(cache.layers)]


def test_stacks_are_of_layers_with_as_many_heads():
    assert stack_places(LEVEL) == PLACES
    assert stack_places(DEEP) == tuple((0, layer) for layer in range(5))
    cache = new_cache(LEVEL, batch=3, tokens=7, dtype=jnp.float16)
    assert cache.places == PLACES
    assert cache.layers == 5
    assert cache.capacity_tokens == 7
    shapes = [(3, 3, 2, 7, 4), (2, 3, 4, 7, 4)]
    chex.assert_shape([*cache.keys, *cache.values], shapes * 2)
    chex.assert_type([*cache.keys, *cache.values], jnp.float16)


@every_variant
@pytest.mark.parametrize("layer", range(5))
def test_a_layer_is_found_by_its_number(layer, variant):
    """Also by one known at run time, beside a layer of the same stack."""
    cache = filled()
    stack, slot = PLACES[layer]
    expected = cache.keys[stack][slot], cache.values[stack][slot]
    assert expected[0].shape == (2, HEADS[layer], 5, 4)
    like = next(each for each in range(5) if PLACES[each][0] == stack)
    by_index = variant(lambda cache: cache.past(layer).own)(cache)
    by_number = variant(lambda cache, number: cache.past(like, number).own)(cache, np.int32(layer))
    by_static = variant(lambda cache: cache.past(like, layer).own)(cache)
    for found in (by_index, by_number, by_static):
        chex.assert_trees_all_equal(found, expected, strict=True)


def positions_of(kind, T, start, valid):
    """Tokens after one another, anywhere, and nodes of a tree."""
    if kind == "run":
        return TokenPositions.after(jnp.int32(start), T, jnp.int32(valid))
    rows = jnp.asarray(np.arange(start, start + 2 * T, 2), jnp.int32)
    if kind == "tree":
        mask = jnp.eye(T, dtype=bool)
        return TokenPositions(
            jnp.full((T,), start, jnp.int32), jnp.int32(valid),
            TreePositions(jnp.int32(start), rows, mask),
        )  # fmt: skip
    return TokenPositions(rows, jnp.int32(valid))


@settings(max_examples=40)
@given(
    kind=st.sampled_from(["run", "gaps", "tree"]), T=st.sampled_from([1, 3, 9]), start=st.integers(0, 9),
    real=st.floats(0, 1), layer=st.integers(0, 4), compiled=st.booleans(), numbered=st.booleans(),
)  # fmt: skip
def test_writing_into_a_stack_is_writing_into_its_layer(kind, T, start, real, layer, compiled, numbered):
    """Bit for bit, within, across and beyond the end; other layers stay. By a layer's index, too."""
    variant, cache = (jitted if compiled else plain), filled(tokens=7)
    at = positions_of(kind, T, start, round(real * T))
    draw = np.random.default_rng(start)
    keys, values = draw.normal(size=(2, 2, HEADS[layer], T, 4)).astype(np.float32)
    alone = Past(*cache.past(layer).own)
    expected = variant(lambda past, *new: past.written(at, *new))(alone, keys, values)

    def door(cache, number, *new):
        return cache.with_past(layer, cache.past(layer, number if numbered else None).written(at, *new))

    found = variant(door)(cache, np.int32(layer), keys, values)
    chex.assert_trees_all_equal(found.past(layer).own, expected.own, strict=True)
    for other, (got, was) in enumerate(zip(layers_of(found), layers_of(cache), strict=True)):
        if other != layer:
            chex.assert_trees_all_equal(got, was, strict=True)


@every_variant
def test_growing_grows_every_stack(variant):
    cache = dataclasses.replace(filled(mass=True), mass=jnp.ones((2, 5)), length=jnp.int32(3))
    grown = variant(grow, static_argnums=1)(cache, 9)
    assert int(grown.length) == 3
    assert grown.places == PLACES
    chex.assert_shape([*grown.keys, *grown.values], [(3, 2, 2, 9, 4), (2, 2, 4, 9, 4)] * 2)
    np.testing.assert_array_equal(grown.mass, np.arange(9) < np.full((2, 1), 5))
    for got, was in zip(layers_of(grown), layers_of(cache), strict=True):
        for rows, old in zip(got, was, strict=True):
            np.testing.assert_array_equal(rows[:, :, :5], old)
            assert not rows[:, :, 5:].any()


C = 4


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
