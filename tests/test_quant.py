"""Quantized weights: exact bytes, error bounds, what is refused, and that a prefix of units is a prefix."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import ConfigError
from jaxllm.quant import (
    INT4_GROUP,
    Bfloat16Bits,
    QArray,
    dequantize,
    pack_int4,
    packed_columns,
    quantize,
    take_rows,
    unpack_int4,
)

# Ragged groups, whole groups, several groups, fewer than one; matrices and stacks of them.
SHAPES = [(5, 7), (3, 32), (64, 33), (70, 65), (2, 40, 9), (3, 33, 64)]
# Levels end 8 steps from zero on one side and 7 on the other; the least scale is 0.84 of the one that
# reaches the extreme, rounded to float16.
INT4_REACH = 8 / 0.84 * (1 + 2**-10)
# Compiling is most of this file's time.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def normal(shape, seed=0):
    """Rows and columns of very different magnitudes."""
    rng = np.random.default_rng(seed)
    spread = np.exp2(rng.integers(-6, 7, (*shape[:-1], 1))) * np.exp2(rng.integers(-2, 3, shape[-1:]))
    return (rng.standard_normal(shape) * spread).astype(np.float32)


def wide(weight):
    """What a QArray of numpy arrays stands for, in float64 and without the code under test."""
    if weight.bits == 8:
        levels = weight.data.astype(np.float64)
    else:
        nibbles = np.concatenate([weight.data & 15, weight.data >> 4], axis=-1)
        levels = nibbles[..., : weight.columns].astype(np.float64) - 8
    return levels * step_of(weight)


def step_of(weight):
    """The scale of every element, float64, of the weight's shape."""
    scale = weight.scale.astype(np.float64)
    if weight.group:
        scale = np.repeat(scale, weight.group, axis=weight.axis)
        length = weight.shape[weight.axis]
        scale = np.take(scale, np.arange(length), axis=weight.axis)
    return np.broadcast_to(scale, weight.shape)


# Packing


# Every width is a compilation, so few of them.
WIDTHS = (1, 2, 31, 32, 33, 63, 64, 65, 97, 127, 128, 129)
unpack_jit = jit(unpack_int4, static_argnums=(1, 2))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_unpacking_undoes_packing(data):
    columns = data.draw(st.sampled_from(WIDTHS))
    values = data.draw(st.lists(st.integers(-8, 7), min_size=columns, max_size=columns))
    values = np.array([[values, values[::-1]]], np.int8)
    packed = pack_int4(values)
    assert packed.shape == (1, 2, packed_columns(columns))
    assert packed.dtype == np.uint8
    np.testing.assert_array_equal(unpack_jit(packed, columns, jnp.dtype(jnp.int32)), values)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_unpacked_dtype(dtype):
    values = np.random.default_rng(0).integers(-8, 8, (2, 3, 65)).astype(np.int8)
    got = unpack_jit(pack_int4(values), 65, jnp.dtype(dtype))
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got, np.float64), values)


@pytest.mark.parametrize(
    ("columns", "size"), [(1, 32), (32, 32), (63, 32), (64, 32), (65, 64), (128, 64), (130, 96)]
)
def test_packed_columns(columns, size):
    assert packed_columns(columns) == size


def test_packed_bytes():
    """Low nibbles are the first half of the row, high ones the second, values are stored plus 8."""
    row = np.zeros(64, np.int8)
    row[:3], row[32:35] = (-8, 7, 1), (2, -1, -8)
    packed = pack_int4(row[None])[0]
    assert [f"{byte:02x}" for byte in packed[:4]] == ["a0", "7f", "09", "88"]
    assert set(packed[4:]) == {0x88}
    short = pack_int4(np.array([[-8, 7, 0]], np.int8))
    assert [f"{byte:02x}" for byte in short[0]] == ["80", "8f", "88", *["88"] * 29]


# Exact small cases


def test_int8_by_hand():
    got = quantize(np.array([[127.0, -63.5, 1.4], [0.0, 0.0, 0.0], [-2.54, 1.27, 0.0]]), bits=8, axis=-1)
    assert got.data.dtype == np.int8
    assert got.data.tolist() == [[127, -64, 1], [0, 0, 0], [-127, 64, 0]]
    assert got.scale.dtype == np.float32
    np.testing.assert_allclose(got.scale, [[1.0], [0.0], [0.02]], rtol=1e-7)
    assert (got.bits, got.group, got.axis, got.columns) == (8, 0, -1, 3)


def test_int8_along_the_other_axis_by_hand():
    got = quantize(np.array([[127.0, 0.5], [-12.7, 1.0]]), bits=8, axis=-2)
    assert got.data.tolist() == [[127, 64], [-13, 127]]
    np.testing.assert_allclose(got.scale, [[1.0, 1 / 127]], rtol=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_int4_by_hand(sign):
    """The extreme becomes -8, whatever its sign, so the scale takes the other one."""
    row = np.zeros((1, 40), np.float32)
    row[0, :4], row[0, 32:34] = (-4.0, 3.5, 0.5, -1.0), (0.25, 0.125)
    got = quantize(sign * row, bits=4, axis=-1)
    assert got.scale.dtype == np.float16
    # The second group's extreme is positive, so its scale is negative.
    assert got.scale.tolist() == [[sign * 0.5, sign * -1 / 32]]
    # Levels -8, 7, 1, -2 and -8, -4; element 32 + j of the row is the high nibble of byte j.
    assert [f"{byte:02x}" for byte in got.data[0]] == ["00", "4f", "89", "86", *["88"] * 28]
    np.testing.assert_array_equal(wide(got), sign * row)


def test_zeros_stay_zero():
    for bits in (4, 8):
        for axis in (-1, -2):
            weight = np.zeros((40, 40), np.float32)
            weight[0, 0] = 3.0
            got = quantize(weight, bits=bits, axis=axis)
            np.testing.assert_allclose(wide(got), weight, rtol=1e-3)
            assert np.count_nonzero(wide(got)) == 1
            assert np.isfinite(got.scale).all()


# Error bounds


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_within_half_a_step(shape, axis):
    weight = normal(shape)
    got = quantize(weight, bits=8, axis=axis)
    assert got.data.shape == got.shape == weight.shape
    assert got.ndim == weight.ndim
    assert got.scale.shape == tuple(1 if i == weight.ndim + axis else n for i, n in enumerate(shape))
    assert np.all(np.abs(wide(got) - weight) <= step_of(got) * (0.5 + 1e-5))
    # The scale is no larger than the extreme needs.
    np.testing.assert_array_equal(np.abs(got.data).max(axis), 127)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("shape", SHAPES)
def test_int4_is_within_half_a_step_where_it_does_not_clip(shape, axis):
    weight = normal(shape)
    got = quantize(weight, bits=4, axis=axis)
    assert got.data.shape == (*shape[:-1], packed_columns(shape[-1]))
    assert got.shape == weight.shape
    assert got.scale.shape == tuple(
        -(-n // INT4_GROUP) if i == weight.ndim + axis else n for i, n in enumerate(shape)
    )
    in_steps = weight / step_of(got)
    assert np.abs(in_steps).max() <= INT4_REACH
    off = np.abs(wide(got) / step_of(got) - in_steps)
    clipped = (in_steps < -8.5) | (in_steps > 7.5)
    assert clipped.any() or weight.size < 1000
    assert off[~clipped].max() <= 0.5 + 1e-5
    assert off.max() <= INT4_REACH - 7


def test_int4_may_clip_a_value_by_two_steps():
    """The documented limit is not idle: 30 values that a smaller scale suits better outweigh two extremes."""
    group = np.full((1, 32), 0.315, np.float32)
    group[0, :2] = -1.0, 1.0
    got = quantize(group, bits=4, axis=-1)
    off = np.abs(wide(got) - group)[0] / step_of(got)[0]
    assert 1.5 < off[1] < INT4_REACH - 7
    widest = np.clip(np.rint(group * 8), -8, 7) / 8
    assert np.square(wide(got) - group).sum() < np.square(widest - group).sum()


def test_int4_error_is_no_more_than_that_of_the_scale_that_reaches_the_extreme():
    group = np.random.default_rng(0).standard_normal((200, 32)).astype(np.float32)
    got = quantize(group, bits=4, axis=-1)
    extreme = np.take_along_axis(group, np.abs(group).argmax(-1, keepdims=True), -1)
    step = (extreme / -8).astype(np.float16).astype(np.float64)
    plain = np.square(np.clip(np.rint(group / step), -8, 7) * step - group).sum(-1)
    best = np.square(wide(got) - group).sum(-1)
    assert np.all(best <= plain * (1 + 1e-5))
    assert np.mean(best < plain * 0.99) > 0.3


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.floats(-140, 100), st.sampled_from([-1, -2]))
def test_int8_bound_at_every_magnitude(seed, exponent, axis):
    """Down to subnormal weights, whose scale is so coarse that the bound needs room for its rounding."""
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((6, 5)) * 2.0**exponent).astype(np.float32)
    got = quantize(weight, bits=8, axis=axis)
    slack = 127 * 2.0**-149
    assert np.all(np.abs(wide(got) - weight) <= step_of(got) * (0.5 + 1e-5) + slack)
    assert np.all(np.sign(wide(got)) * np.sign(weight) >= 0)


@pytest.mark.parametrize("magnitude", [1e-9, 1e-7, 1e-6, 1e-4])
def test_tiny_int4_groups_keep_their_size(magnitude):
    """Where float16 scales are coarse, the error is still at most what their rounding (2**-25) explains."""
    weight = (np.random.default_rng(0).standard_normal((50, 32)) * magnitude).astype(np.float32)
    got = quantize(weight, bits=4, axis=-1)
    bound = np.abs(step_of(got)) * (INT4_REACH - 7) + 8 * 2.0**-25
    assert np.all(np.abs(wide(got) - weight) <= bound)


# Refusals


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_must_be_finite(bits, value):
    weight = np.ones((3, 4), np.float32)
    weight[1, 2] = value
    with pytest.raises(ConfigError, match="NaN or infinite"):
        quantize(weight, bits=bits, axis=-1)


def test_weights_too_large_for_an_int4_scale_are_refused():
    weight = np.full((1, 32), 65504.0 * 8, np.float32)
    np.testing.assert_array_equal(wide(quantize(weight, bits=4, axis=-1)), weight)
    with pytest.raises(ConfigError, match="use 8 bits"):
        quantize(weight * np.float32(1.01), bits=4, axis=-1)
    assert np.isfinite(wide(quantize(weight * np.float32(1.01), bits=8, axis=-1))).all()


@pytest.mark.parametrize(
    ("shape", "bits", "axis"), [((4, 4), 2, -1), ((4, 4), 8, 0), ((4, 4), 8, 1), ((4,), 8, -1)]
)
def test_unsupported_quantization_is_refused(shape, bits, axis):
    with pytest.raises(ConfigError, match=f"bits={bits}, axis={axis}"):
        quantize(np.ones(shape, np.float32), bits=bits, axis=axis)


# Reading back

dequantize_jit = jit(dequantize, static_argnums=1)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("shape", [(5, 7), (70, 65), (2, 40, 9)])
def test_dequantize_is_levels_times_scale(shape, axis, bits):
    weight = quantize(normal(shape), bits=bits, axis=axis)
    got = dequantize_jit(weight, jnp.dtype(jnp.float32))
    assert got.dtype == jnp.float32
    assert got.shape == shape
    np.testing.assert_allclose(got, wide(weight), rtol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_dequantize_to_bfloat16(bits):
    weight = quantize(normal((5, 70)), bits=bits, axis=-1)
    got = dequantize_jit(weight, jnp.dtype(jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float64), wide(weight), rtol=2**-7)


def test_dense_weights_only_change_their_dtype():
    weight = normal((4, 6))
    got = dequantize(jnp.asarray(weight), jnp.dtype(jnp.bfloat16))
    np.testing.assert_array_equal(got, weight.astype(ml_dtypes.bfloat16))


def test_bfloat16_bits_widen_exactly():
    """All 65,536 patterns, NaNs with their payloads included."""
    patterns = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    weight = Bfloat16Bits(bits=jnp.asarray(patterns))
    assert weight.shape == (256, 256)
    assert weight.ndim == 2
    got = dequantize_jit(weight, jnp.dtype(jnp.float32))
    bits = np.asarray(jax.lax.bitcast_convert_type(got, jnp.uint32))
    np.testing.assert_array_equal(bits, patterns.astype(np.uint32) << 16)
    same = np.asarray(dequantize_jit(weight, jnp.dtype(jnp.bfloat16)))
    numbers = (patterns & 0x7FFF) <= 0x7F80
    np.testing.assert_array_equal(same.view(np.uint16)[numbers], patterns[numbers])


def prefix(weight, units):
    """The first units (rows of the leading axis) of a weight, as contiguous memory gives them."""
    if isinstance(weight, Bfloat16Bits):
        return Bfloat16Bits(bits=weight.bits[:units])
    along_units = weight.ndim == 2 and weight.axis == -2
    if not along_units:
        return dataclasses.replace(weight, data=weight.data[:units], scale=weight.scale[:units])
    groups = -(-units // weight.group) if weight.group else 1
    return dataclasses.replace(weight, data=weight.data[:units], scale=weight.scale[:groups])


@pytest.mark.parametrize("units", [1, 33, 64])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("bits", [4, 8])
def test_prefix_of_units_is_prefix_of_the_whole(bits, axis, units):
    weight = quantize(normal((70, 33)), bits=bits, axis=axis)
    whole = dequantize_jit(weight, jnp.dtype(jnp.float32))
    part = prefix(weight, units)
    assert part.shape == (units, 33)
    np.testing.assert_array_equal(dequantize_jit(part, jnp.dtype(jnp.float32)), whole[:units])


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("bits", [4, 8])
def test_prefix_of_a_stack_of_units(bits, axis):
    weight = quantize(normal((3, 40, 9)), bits=bits, axis=axis)
    whole = dequantize_jit(weight, jnp.dtype(jnp.float32))
    part = dequantize_jit(prefix(weight, 2), jnp.dtype(jnp.float32))
    np.testing.assert_array_equal(part, whole[:2])


def test_prefix_of_bits():
    weight = Bfloat16Bits(bits=normal((6, 5)).astype(ml_dtypes.bfloat16).view(np.uint16))
    part = dequantize_jit(prefix(weight, 4), jnp.dtype(jnp.float32))
    np.testing.assert_array_equal(part, dequantize_jit(weight, jnp.dtype(jnp.float32))[:4])


@pytest.mark.parametrize("kind", ["dense", "bits", "int8", "int4"])
def test_rows_are_taken_as_they_are_stored(kind):
    weight = normal((9, 40))
    if kind == "dense":
        stored = jnp.asarray(weight)
    elif kind == "bits":
        stored = Bfloat16Bits(bits=weight.astype(ml_dtypes.bfloat16).view(np.uint16))
    else:
        stored = quantize(weight, bits=int(kind[-1]), axis=-1)
    rows = np.array([[8, 0, 3], [3, 3, 1]], np.int32)
    taken = take_rows(stored, rows)
    assert type(taken) is type(stored) or kind == "dense"
    for part, source in zip(jax.tree.leaves(taken), jax.tree.leaves(stored), strict=True):
        assert part.dtype == source.dtype
        np.testing.assert_array_equal(part, np.asarray(source)[rows])


def test_qarray_is_a_tree_of_its_arrays():
    weight = quantize(normal((4, 6)), bits=8, axis=-1)
    leaves, structure = jax.tree.flatten(weight)
    assert [leaf.shape for leaf in leaves] == [(4, 6), (4, 1)]
    again = jax.tree.unflatten(structure, leaves)
    assert isinstance(again, QArray)
    assert (again.bits, again.group, again.axis, again.columns) == (8, 0, -1, 6)
