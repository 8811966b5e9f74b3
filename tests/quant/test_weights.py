"""Stored weights read back: whole, row by row, and their first units; whatever their form."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import ConfigError
from jaxllm.quant import (
    Adapted,
    Bfloat16Bits,
    contracted_rows,
    dequantize,
    embedding_rows,
    from_blocks,
    quantize,
    take_units,
    to_blocks,
)
from jaxllm.quant.formats import pack, packed_columns, unpack
from tests.kernels.drawing import WIDTHS as KERNEL_WIDTHS
from tests.kernels.drawing import weight_of as drawn_weight
from tests.quant.plain import wide
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


@every_form
@every_width
def test_dequantize_to_bfloat16(bits, group, form):
    weight = form(quantize(normal((5, 70)), bits=bits, axis=-1, group=group))
    got = dequantize_jit(weight, jnp.dtype(jnp.bfloat16))
    chex.assert_type(got, jnp.bfloat16)
    np.testing.assert_allclose(np.asarray(got, np.float64), wide(weight), rtol=2**-7)


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


def test_prefix_of_floats():
    weight = normal((6, 5))
    np.testing.assert_array_equal(take_units(jnp.asarray(weight), 4), weight[:4])
    np.testing.assert_array_equal(wide(take_units(bits_of(weight), 4)), wide(bits_of(weight))[:4])


@every_width
def test_prefixes_of_prefixes(bits, group):
    """And back to columns, for a device without native kernels: only the units it has."""
    weight = to_blocks(quantize(normal((70, 40)), bits=bits, axis=-2, group=group))
    part = take_units(take_units(weight, 50), 33)
    np.testing.assert_array_equal(wide(part), wide(weight)[:33])
    columns = from_blocks(part)
    assert columns.data.shape[0] == 33
    np.testing.assert_array_equal(wide(columns), wide(part))


@every_form
@pytest.mark.parametrize("count", [0, -1, 6])
def test_units_that_are_not_there_are_refused(count, form):
    weight = form(quantize(normal((5, 40)), bits=8, axis=-1))
    with pytest.raises(ConfigError, match=f"5 units has no first {count}"):
        take_units(weight, count)


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


@pytest.mark.parametrize("bits", [8, 4])
def test_contracted_rows_of_other_forms(bits):
    draw = np.random.default_rng(0)
    out, back = draw.normal(size=(3, 11, 100)), draw.normal(size=(4, 25, 37))
    forms = [(jnp.asarray(out, jnp.float32), True), (jnp.asarray(back, jnp.float32), False)]
    forms += [(quantize(out, bits=bits, axis=-1), True), (quantize(back, bits=bits, axis=-2), False)]
    for weight, last in forms:
        np.testing.assert_array_equal(
            contracted_rows(weight, INDEX, last=last), contracted(weight, last=last)
        )
    # What an adapter changes is no business of the weight's rows.
    base, left, right = forms[0][0], jnp.ones((1, 3, 11)), jnp.ones((1, 100))
    np.testing.assert_array_equal(
        contracted_rows(Adapted(base, left, right), INDEX, last=True), contracted(base, last=True)
    )
