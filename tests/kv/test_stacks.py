"""Caches of several stacks, as levels with anchor layers have them, are the caches of their layers."""

import dataclasses

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.config import LayerUnits, ModelConfig
from jaxllm.contexts.codecs import RAW, ChunkFormat
from jaxllm.kv.cache import Past, TokenPositions, TreePositions, grow, new_cache, stack_places
from jaxllm.kv.chunks import encode_chunks, place_chunks
from tests.variants import every_variant, jitted, plain

CFG = ModelConfig(
    model_type="llama", vocab_size=7, hidden_size=8, layers=5, heads=4, kv_heads=4, head_dim=4,
    ffn_size=12, window_tokens=32,
)  # fmt: skip
# The second and the last layer are anchors.
HEADS = (2, 4, 2, 2, 4)
LEVEL = dataclasses.replace(CFG, layer_units=tuple(LayerUnits(kv_heads=each, neurons=3) for each in HEADS))
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
    assert stack_places(CFG) == tuple((0, layer) for layer in range(5))
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


@every_variant
@pytest.mark.parametrize("layer", range(5))
def test_chunks_of_a_layer_in_a_stack(layer, variant):
    """Come from it and go to it alone."""
    cache, form = filled(batch=1, tokens=12), ChunkFormat.named("raw", 4)
    numbers = np.array([2, 0], np.int32)

    def encoded(past, numbers):
        return encode_chunks(past, numbers, form=form, bits=RAW)

    blobs = variant(encoded)(cache.past(layer), numbers)
    alone = variant(encoded)(Past(*cache.past(layer).own), numbers)
    np.testing.assert_array_equal(blobs, alone)
    chunks = np.random.default_rng(0).normal(size=(2, HEADS[layer], 4, 4)).astype(np.float32)
    stack, slot = PLACES[layer]
    got = variant(place_chunks)(cache.keys[stack], chunks, np.array([1, 50], np.int32), np.int32(slot))
    expected = np.array(cache.keys[stack])
    expected[slot, 0, :, 4:8] = chunks[0]
    np.testing.assert_array_equal(got, expected)
