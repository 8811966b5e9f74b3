"""Stored weights read back, whatever their form: whole, row by row, their first units; and blocks' bytes."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.quant import (
    Bfloat16Bits,
    QArray,
    blocked_shapes,
    contracted_rows,
    dequantize,
    embedding_rows,
    from_blocks,
    quantize,
    take_units,
    to_blocks,
)
from jaxllm.quant.blocks import blocked_levels, blocked_scales
from jaxllm.quant.formats import pack, packed_columns, unpack
from tests.kernels.drawing import WIDTHS as KERNEL_WIDTHS
from tests.kernels.drawing import weight_of as drawn_weight
from tests.quant.plain import levels_of, step_of, wide
from tests.quick_jit import jit
from tests.variants import every_variant

# bits, group
WIDTHS = [(8, 0), (8, 32), (4, 32), (4, 64), (2, 32)]
# Rows beyond a panel and a group, columns beyond a block; neither comes whole.
SHAPES = [(70, 65), (2, 40, 9)]
dequantize_jit = jit(dequantize, static_argnums=1)
every_form = pytest.mark.parametrize("form", [lambda weight: weight, to_blocks], ids=["columns", "blocks"])
every_width = pytest.mark.parametrize(("bits", "group"), WIDTHS, ids=str)
F32 = jnp.dtype(jnp.float32)


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bits_of(weight):
    return Bfloat16Bits(bits=weight.astype(ml_dtypes.bfloat16).view(np.uint16))


def placed(weight):
    return jax.tree.map(jnp.asarray, weight)


# Unpacking

# Every width is a compilation, so few of them.
COLUMNS = (1, 2, 31, 32, 33, 63, 64, 65, 97, 127, 128, 129)
unpack_jit = jit(unpack, static_argnums=(1, 2, 3))


@settings(max_examples=60)
@given(st.data())
def test_unpacking_undoes_packing(data):
    columns = data.draw(st.sampled_from(COLUMNS))
    values = data.draw(st.lists(st.integers(-8, 7), min_size=columns, max_size=columns))
    values = np.array([[values, values[::-1]]], np.int8)
    packed = pack(values, 4)
    chex.assert_shape(packed, (1, 2, packed_columns(columns)))
    chex.assert_type(packed, np.uint8)
    np.testing.assert_array_equal(unpack_jit(packed, columns, 4, jnp.dtype(jnp.int32)), values)


# Whole


@every_form
@every_width
@every_variant
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantize_is_levels_times_scale(shape, axis, bits, group, form, variant):
    weight = form(quantize(normal(shape), bits=bits, axis=axis, group=group))
    got = variant(dequantize, static_argnums=1)(weight, F32)
    chex.assert_type(got, jnp.float32)
    chex.assert_shape([got, weight], shape)
    assert weight.ndim == len(shape)
    np.testing.assert_allclose(got, wide(weight), rtol=1e-6)


def test_bfloat16_bits_widen_exactly():
    """All 65,536 patterns, NaNs with their payloads included."""
    patterns = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    weight = Bfloat16Bits(bits=jnp.asarray(patterns))
    chex.assert_shape(weight, (256, 256))
    assert weight.ndim == 2
    got = dequantize_jit(weight, F32)
    bits = np.asarray(jax.lax.bitcast_convert_type(got, jnp.uint32))
    np.testing.assert_array_equal(bits, patterns.astype(np.uint32) << 16)
    same = np.asarray(dequantize_jit(weight, jnp.dtype(jnp.bfloat16)))
    numbers = (patterns & 0x7FFF) <= 0x7F80
    np.testing.assert_array_equal(same.view(np.uint16)[numbers], patterns[numbers])


# Rows


def table_of(kind, weight):
    if kind == "dense":
        return jnp.asarray(weight)
    if kind == "bits":
        return bits_of(weight)
    bits, group = kind
    return to_blocks(quantize(weight, bits=bits, axis=-1, group=group))


@every_variant
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", ["dense", "bits", *WIDTHS], ids=str)
def test_rows_are_those_of_the_whole(kind, dtype, variant):
    """From either side of a panel's end, in any order, more than once, in any shape."""
    table = table_of(kind, normal((37, 70)))
    rows = np.array([[36, 0, 15], [16, 16, 1]], np.int32)
    take = variant(embedding_rows, static_argnums=2)
    got = take(table, rows, jnp.dtype(dtype))
    chex.assert_shape(got, (*rows.shape, 70))
    chex.assert_type(got, dtype)
    room = 1e-6 if dtype == jnp.float32 else 2**-6
    np.testing.assert_allclose(np.asarray(got, np.float64), wide(table)[rows], rtol=room)
    one = take(table, np.int32(15), jnp.dtype(dtype))
    np.testing.assert_array_equal(one, got[0, 2])


@pytest.mark.parametrize("kind", [(8, 0), (4, 32)], ids=str)
def test_rows_of_blocks_are_read_alone(kind):
    """A token must not cost the table."""
    table = placed(table_of(kind, normal((4096, 64))))
    lowered = jax.jit(embedding_rows, static_argnums=2).lower(table, np.zeros(3, np.int32), F32)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 64 << 10


# Prefixes


@every_form
@pytest.mark.parametrize("units", [1, 15, 16, 33, 64, 70])
@pytest.mark.parametrize("axis", [-1, -2])
@every_width
def test_prefix_of_units_is_prefix_of_the_whole(bits, group, axis, units, form):
    weight = form(quantize(normal((70, 33)), bits=bits, axis=axis, group=group))
    part = take_units(weight, units)
    assert type(part) is type(weight)
    chex.assert_shape(part, (units, 33))
    np.testing.assert_array_equal(wide(part), wide(weight)[:units])
    if units == 33:  # Each is a compilation.
        np.testing.assert_allclose(dequantize_jit(part, F32), wide(weight)[:units], rtol=1e-6)
        # Of a stack, whose units are matrices.
        stack = form(quantize(normal((3, 40, 9)), bits=bits, axis=axis, group=group))
        for count in (1, 2, 3):
            part = take_units(stack, count)
            chex.assert_shape(part, (count, 40, 9))
            np.testing.assert_array_equal(wide(part), wide(stack)[:count])
        np.testing.assert_allclose(dequantize_jit(take_units(stack, 2), F32), wide(stack)[:2], rtol=1e-6)


@every_width
def test_prefixes_of_prefixes(bits, group):
    """And back to columns, for a device without native kernels: only the units it has."""
    weight = to_blocks(quantize(normal((70, 40)), bits=bits, axis=-2, group=group))
    part = take_units(take_units(weight, 50), 33)
    np.testing.assert_array_equal(wide(part), wide(weight)[:33])
    columns = from_blocks(part)
    assert columns.data.shape[0] == 33
    np.testing.assert_array_equal(wide(columns), wide(part))


# Rows by the inputs that they are multiplied with

INDEX = np.array([0, 31, 32, 63, 64, 99, 5, 5], np.int32)


def contracted(weight, *, last: bool) -> np.ndarray:
    dense = np.asarray(dequantize(weight, jnp.float32)).reshape(-1, weight.shape[-1])
    return (dense.T if last else dense)[INDEX]


@pytest.mark.slow
@every_variant
@pytest.mark.parametrize("width", KERNEL_WIDTHS, ids=str)
def test_contracted_rows_of_blocks(width, variant):
    draw, rows = np.random.default_rng(0), variant(contracted_rows, static_argnames="last")
    for shape, axis in (((37, 100), -1), ((3, 11, 100), -1), ((100, 37), -2), ((4, 25, 37), -2)):
        weight, last = drawn_weight(draw, shape, width, axis), axis == -1
        got = rows(weight, INDEX, last=last)
        chex.assert_type(got, jnp.float32)
        np.testing.assert_array_equal(got, contracted(weight, last=last))


BLOCK_WIDTHS = [(8, 0), (8, 32), (8, 64), (4, 32), (4, 64), (2, 32), (2, 64)]
every_block_width = pytest.mark.parametrize(("bits", "group"), BLOCK_WIDTHS, ids=str)
every_axis = pytest.mark.parametrize("axis", [-1, -2])
BLOCK_SHAPES = [(1, 1), (16, 32), (17, 33), (70, 65), (3, 20, 40), (2, 40, 20)]


def quantized(shape, bits, group, axis, seed=0) -> QArray:
    weight = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return quantize(weight, bits=bits, axis=axis, group=group)


def counted(shape, bits, axis) -> QArray:
    """Levels that tell places apart: 8 bits `16·r + c` (mod 256), 4 bits `r + 3·c` (mod 16)."""
    row, column = np.indices(shape)
    if bits == 8:
        data = (16 * row + column).astype(np.uint8).view(np.int8)
        scale = np.ones((shape[0], 1) if axis == -1 else (1, shape[1]), np.float32)
        return QArray(data=data, scale=scale, bits=8, group=0, axis=axis, columns=shape[1])
    data = pack((row + 3 * column) % 16 - 8, 4)
    groups = (shape[0], -(-shape[1] // 32)) if axis == -1 else (-(-shape[0] // 32), shape[1])
    scale = np.ones(groups, np.float16)
    return QArray(data=data, scale=scale, bits=4, group=32, axis=axis, columns=shape[1])


# Bytes


def test_bytes_of_a_block():
    """16 outputs × 32 inputs: four inputs of output 0, of output 1, ...; then the next four inputs."""
    got = to_blocks(counted((16, 32), 8, -1)).data
    assert got.shape == (1, 1, 512)
    block = got.view(np.uint8)[0, 0]
    assert block[:8].tolist() == [0, 1, 2, 3, 16, 17, 18, 19]
    assert block[60:68].tolist() == [240, 241, 242, 243, 4, 5, 6, 7]
    assert block[-4:].tolist() == [12, 13, 14, 15]  # 16·15 + 28... mod 256
    # The same matrix as inputs × outputs is the same block.
    turned = counted((16, 32), 8, -1)
    turned = dataclasses.replace(turned, data=turned.data.T, scale=turned.scale.T, axis=-2, columns=16)
    np.testing.assert_array_equal(to_blocks(turned).data.reshape(-1), got.reshape(-1))


# Both ways


@every_block_width
@every_axis
@pytest.mark.parametrize("shape", BLOCK_SHAPES, ids=str)
def test_blocks_stand_for_the_same_weight(shape, axis, bits, group):
    weight = quantized(shape, bits, group, axis)
    blocked = to_blocks(weight)
    shapes = blocked_shapes(shape, bits=bits, group=group, axis=axis)
    chex.assert_shape([blocked.data, blocked.scale], shapes)
    types = [np.int8 if bits == 8 else np.uint8, np.float16 if group else np.float32]
    chex.assert_type([blocked.data, blocked.scale], types)
    assert blocked.data.flags.c_contiguous
    assert blocked.scale.flags.c_contiguous
    np.testing.assert_array_equal(levels_of(blocked), levels_of(weight))
    np.testing.assert_array_equal(step_of(blocked), step_of(weight))
    np.testing.assert_array_equal(blocked_levels(blocked), levels_of(weight))
    np.testing.assert_array_equal(blocked_scales(blocked), weight.scale)
    # Arrays, and in the structure of the tree all else: bits, group, axis and columns.
    chex.assert_trees_all_equal(from_blocks(blocked), weight, strict=True)


@every_block_width
@every_axis
def test_padding_weighs_nothing(axis, bits, group):
    """Outputs and inputs that are not there are zeros (8 in a nibble), whatever is read of them."""
    weight = quantized((2, 20, 40) if axis == -2 else (20, 40), bits, group, axis)
    blocked = to_blocks(weight)
    # Everything that the blocks hold, as if it were all part of the weight.
    if axis == -1:
        whole = dataclasses.replace(blocked, shape=(32, 64), group=0, scale=np.ones(32, np.float32))
        inside = np.s_[:20, :40]
    else:
        whole = dataclasses.replace(blocked, shape=(2, 32, 48), group=0, scale=np.ones((2, 48), np.float32))
        inside = np.s_[:, :20, :40]
    levels = levels_of(whole)
    np.testing.assert_array_equal(levels[inside], levels_of(weight))
    # No level of two bits is zero: padding inputs meet activations that are.
    padding = -1 if bits == 2 else 0
    levels[inside] = padding
    assert np.all(levels == padding)
    assert np.count_nonzero(blocked.scale) == np.count_nonzero(weight.scale)


@every_axis
@pytest.mark.parametrize("shape", BLOCK_SHAPES, ids=str)
def test_minima_stand_behind_the_scales_of_their_panel(shape, axis):
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32) + np.float32(0.5)
    stored = quantize(weight, bits=4, axis=axis, group=32, minima=True)
    blocked = to_blocks(stored)
    shapes = blocked_shapes(shape, bits=4, group=32, axis=axis, minima=True)
    chex.assert_shape([blocked.data, blocked.scale], shapes)
    assert blocked.minima
    np.testing.assert_array_equal(wide(blocked), wide(stored))
    np.testing.assert_allclose(np.asarray(dequantize(blocked, jnp.float32)), wide(stored), rtol=1e-6)
    chex.assert_trees_all_equal(from_blocks(blocked), stored, strict=True)
    # All 16 levels lie between a group's smallest and largest weight, but for clipping and halves.
    spread = np.max(weight, axis=axis) - np.min(weight, axis=axis)
    assert np.all(np.abs(wide(stored) - weight) <= np.expand_dims(spread, axis) * 0.12 + 1e-3)


# Parts
