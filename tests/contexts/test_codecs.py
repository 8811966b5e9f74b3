"""Codecs: exact sizes, exact small cases, bounds of the error, and what their names promise."""

import dataclasses

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.contexts.codecs import CODECS, RAW, WIDTHS, ChunkShape, hadamard
from jaxllm.contexts.coding import hadamard_transform
from tests.variants import every_variant, jitted

SHAPE = ChunkShape(heads=2, tokens=16, width=8)
DIMS = chex.Dimensions(N=8, K=SHAPE.heads, C=SHAPE.tokens, H=SHAPE.width)
names = pytest.mark.parametrize("name", CODECS)
widths = pytest.mark.parametrize("bits", WIDTHS)


def drawn(seed: int, shape: ChunkShape = SHAPE, chunks: int = 3, spread: float = 3.0):
    """Keys and values with channels of very different size and offset, as models have them."""
    rng = np.random.default_rng(seed)
    dims = (chunks, shape.heads, shape.tokens, shape.width)
    size = np.exp(rng.normal(size=(1, shape.heads, 1, shape.width)) * spread / 3)
    return [
        (rng.normal(size=dims) * size + rng.normal(size=size.shape) * spread).astype(np.float32) for _ in "kv"
    ]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "bfloat16") for name in CODECS), ("channel", "float32"), ("channel", "float16")],
)
@every_variant
def test_raw_keeps_every_bit(name, dtype, variant):
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    past = tuple(jnp.asarray(part, dtype) for part in drawn(1))
    blobs = variant(CODECS[name].encode, static_argnums=(2, 3))(*past, shape, RAW)
    chex.assert_shape(blobs, (3, shape.raw_bytes))
    chex.assert_type(blobs, jnp.uint8)
    back = variant(CODECS[name].decode, static_argnums=(1, 2))(blobs, shape, RAW)
    chex.assert_trees_all_equal_shapes_and_dtypes(back, past)
    chex.assert_trees_all_equal(back, past, strict=True)


@pytest.mark.parametrize(
    ("name", "bits", "size"),
    [
        # 2·2·16·8 levels; a low and a scale of two bytes for each of 2·8 channels, or of 2·16 tokens, twice.
        ("channel", 8, 512 + 2 * 64),
        ("channel", 4, 256 + 2 * 64),
        ("channel", 2, 128 + 2 * 64),
        ("kivi", 4, 256 + 64 + 128),
        ("rotated", 2, 128 + 2 * 128),
    ],
)
def test_sizes_are_exact(name, bits, size):
    assert CODECS[name].blob_bytes(SHAPE, bits) == size
    chex.assert_shape(CODECS[name].encode(*drawn(2), SHAPE, bits), (3, size))


def bound(rows: np.ndarray, axis: int, bits: int) -> np.ndarray:
    """What `encode` promises."""
    low, high = rows.min(axis, keepdims=True), rows.max(axis, keepdims=True)
    scale = 1.002 * (high - low + abs(low) / 500) / (2**bits - 1) + 1 / 8192
    return np.broadcast_to(scale / 2, rows.shape)


@widths
@settings(max_examples=30)
@given(seed=st.integers(0, 1 << 30), spread=st.sampled_from([0.0, 1e-4, 1.0, 9.0]))
def test_error_is_within_half_a_scale(bits, seed, spread):
    codec = CODECS["kivi"]
    # Beyond float16's range values saturate, and few seeds draw such.
    keys, values = (np.float32(spread > 0) * np.clip(part, -6e4, 6e4) for part in drawn(seed, spread=spread))
    got = codec.decode(codec.encode(keys, values, SHAPE, bits), SHAPE, bits)
    # Rounding of float32 comes on top.
    for back, rows, axis in zip(got, (keys, values), (-2, -1), strict=True):
        assert np.all(np.abs(back - rows) <= bound(rows, axis, bits) * 1.0001 + 1e-6 * np.abs(rows))


@names
@widths
def test_levels_are_spent_on_the_range_that_is_there(name, bits):
    """Each codec errs about as much as levels over a normal distribution must. Bytes are the same in a graph
    or out of it, and what comes back has the shape and dtype of the cache."""
    rng, codec = np.random.default_rng(3), CODECS[name]
    keys = rng.normal(size=(8, 2, 16, 8)).astype(np.float32)
    blobs = codec.encode(keys, keys, SHAPE, bits)
    compiled = jitted(codec.encode, static_argnums=(2, 3))(keys, keys, SHAPE, bits)
    chex.assert_trees_all_equal_shapes_and_dtypes(compiled, blobs)
    # A value between two levels may fall to either side.
    assert (np.asarray(blobs) != np.asarray(compiled)).mean() < 0.01
    back, _ = codec.decode(blobs, SHAPE, bits)
    error = np.sqrt(np.mean(np.square(back - keys)))
    # A range of three and a half deviations in 2^bits - 1 steps, each uniformly off.
    wanted = 3.5 / (2**bits - 1) / np.sqrt(12)
    assert 0.6 * wanted < error < 1.4 * wanted
    short = dataclasses.replace(SHAPE, dtype="bfloat16")
    back = jitted(codec.decode, static_argnums=(1, 2))(blobs, short, bits)
    chex.assert_shape(back, DIMS["NKCH"])
    chex.assert_type(back, jnp.bfloat16)
    chex.assert_tree_all_finite(back)


def test_a_level_is_found_in_its_place():
    """Two bits by hand: levels 0 to 3, the first quarter of the channels in the lowest bits of a byte."""
    shape = ChunkShape(heads=1, tokens=4, width=4)
    levels = np.array([[3, 0, 1, 2], [0, 3, 2, 1], [1, 1, 0, 0], [2, 2, 3, 3]], np.float32)
    blob = CODECS["channel"].encode(levels[None, None], levels[None, None], shape, 2)
    packed = np.asarray(blob)[0, :4]
    np.testing.assert_array_equal(packed, [0b10010011, 0b01101100, 0b00000101, 0b11111010])


@pytest.mark.parametrize("width", [4, 12, 64, 128])
def test_the_transform_is_the_same_in_every_shape(width):
    """To the bit: rows alone, all rows, and rows of another tree; and what the product with its matrix is."""
    rows = np.random.default_rng(width).normal(size=(3, 2, 16, width)).astype(np.float32)
    whole = np.asarray(jitted(hadamard_transform)(rows))
    np.testing.assert_allclose(whole, rows @ hadamard(width), rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_equal(np.asarray(jitted(hadamard_transform)(rows[1, 0, 5])), whole[1, 0, 5])
    chex.assert_trees_all_equal(np.asarray(hadamard_transform(jnp.asarray(rows[:1]))), whole[:1])


def test_what_is_too_large_for_a_scale_saturates():
    keys = np.full((1, 2, 16, 8), 1e30, np.float32)
    keys[:, :, 0] = -1e30
    back, _ = CODECS["channel"].decode(CODECS["channel"].encode(keys, keys, SHAPE, 8), SHAPE, 8)
    chex.assert_tree_all_finite(back)
    assert np.all(np.sign(back) == np.sign(keys))
