"""Narrow weights on the host: exact bytes, error bounds, what is refused."""

import chex
import ml_dtypes
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.quant import formats, quantize
from jaxllm.quant.formats import INT4_GROUP, on_grid, pack, packed_columns
from tests.quant.plain import step_of, wide

# Ragged groups, whole groups, several groups, fewer than one; matrices and stacks of them.
SHAPES = [(5, 7), (3, 32), (64, 33), (70, 65), (2, 40, 9), (3, 33, 64)]


def normal(shape, seed=0):
    """Rows and columns of very different magnitudes."""
    rng = np.random.default_rng(seed)
    spread = np.exp2(rng.integers(-6, 7, (*shape[:-1], 1))) * np.exp2(rng.integers(-2, 3, shape[-1:]))
    return (rng.standard_normal(shape) * spread).astype(np.float32)


# Packing


def test_packed_bytes():
    """Low nibbles are the first half of the row, high ones the second, values are stored plus 8."""
    row = np.zeros(64, np.int8)
    row[:3], row[32:35] = (-8, 7, 1), (2, -1, -8)
    packed = pack(row[None], 4)[0]
    assert [f"{byte:02x}" for byte in packed[:4]] == ["a0", "7f", "09", "88"]
    assert set(packed[4:]) == {0x88}
    short = pack(np.array([[-8, 7, 0]], np.int8), 4)
    assert [f"{byte:02x}" for byte in short[0]] == ["80", "8f", "88", *["88"] * 29]


# Grids of quantization-aware training


@pytest.mark.parametrize("axis", [-1, -2])
def test_a_grid_of_four_bits_is_kept(axis):
    """Levels are found again, and the numbers in bfloat16 with them, whichever levels a group has."""
    draw = np.random.default_rng(0)
    levels = np.clip(np.rint(draw.normal(size=(64, 96)) * 2.6), -8, 7)
    step = draw.uniform(0.001, 0.02, (64, 3)).astype(np.float16).astype(np.float32).repeat(32, 1)
    stored = (levels * step).astype(ml_dtypes.bfloat16)
    given = stored.T if axis == -2 else stored
    got = quantize(given.astype(np.float32), bits=4, axis=axis, minima=True)
    assert got.minimum is None
    np.testing.assert_array_equal(wide(got).astype(np.float32).astype(ml_dtypes.bfloat16), given)


def test_ordinary_weights_are_on_no_grid():
    weight = normal((64, 96)).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert not on_grid(weight.reshape(64, 3, 32))
    assert not on_grid(np.zeros((4, 3, 32), np.float32))
    # Eight bits are more levels than four.
    assert not on_grid(np.rint(weight.reshape(64, 3, 32) / 0.01) * np.float32(0.01))


# Exact small cases


def test_int8_by_hand():
    got = quantize(np.array([[127.0, -63.5, 1.4], [0.0, 0.0, 0.0], [-2.54, 1.27, 0.0]]), bits=8, axis=-1)
    chex.assert_type([got.data, got.scale], [np.int8, np.float32])
    assert got.data.tolist() == [[127, -64, 1], [0, 0, 0], [-127, 64, 0]]
    np.testing.assert_allclose(got.scale, [[1.0], [0.0], [0.02]], rtol=1e-7)
    assert (got.bits, got.group, got.axis, got.columns) == (8, 0, -1, 3)


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


def test_int2_by_hand():
    """Levels -3, -1, 1 and 3, four to a byte: element 32 i + j has the bits from 2 i on of byte j."""
    row = np.zeros((1, 128), np.float32)
    row[0, :32], row[0, 32:64], row[0, 96:] = np.tile([3.0, -1.0, 1.0, -3.0], 8), 0.75, np.tile([-6, 6], 16)
    got = quantize(row, bits=2, axis=-1)
    assert got.scale.dtype == np.float16
    assert got.scale.tolist() == [[1.0, 0.25, 0.0, 2.0]]
    # Codes 3, 1, 2, 0, then 3 in all of the second group, any in the third, 0 and 3 in the fourth.
    chex.assert_shape(got.data, (1, 32))
    chex.assert_type(got.data, np.uint8)
    assert (got.data[0] & 0b11001111)[:4].tolist() == [0b1111, 0b11001101, 0b1110, 0b11001100]
    np.testing.assert_array_equal(wide(got), row)


# Error bounds


@pytest.mark.parametrize("group", [0, 32, 64])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_within_half_a_step(shape, axis, group):
    """Of groups more only by what the rounding of a float16 scale explains."""
    weight = normal(shape)
    got = quantize(weight, bits=8, axis=axis, **({"group": group} if group else {}))
    scales = tuple(
        (-(-n // group) if group else 1) if i == weight.ndim + axis else n for i, n in enumerate(shape)
    )
    chex.assert_shape([got, got.data, got.scale], [shape, shape, scales])
    assert got.ndim == weight.ndim
    slack = 127 * 2.0**-25 if group else 0
    assert np.all(np.abs(wide(got) - weight) <= step_of(got) * (0.5 + 1e-5) + slack)
    assert np.abs(got.data).max() == 127
    if not group:
        # The scale is no larger than the extreme needs.
        np.testing.assert_array_equal(np.abs(got.data).max(axis), 127)
    elif shape[axis] > group:
        # Rows of ragged magnitudes are better off than with one scale.
        whole = quantize(weight, bits=8, axis=axis)
        assert np.abs(wide(got) - weight).mean() < np.abs(wide(whole) - weight).mean()


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("shape", SHAPES)
def test_int4_is_within_half_a_step_where_it_does_not_clip(shape, axis):
    weight = normal(shape)
    got = quantize(weight, bits=4, axis=axis)
    packed = (*shape[:-1], packed_columns(shape[-1]))
    scales = tuple(-(-n // INT4_GROUP) if i == weight.ndim + axis else n for i, n in enumerate(shape))
    chex.assert_shape([got, got.data, got.scale], [shape, packed, scales])
    in_steps = weight / step_of(got)
    off = np.abs(wide(got) / step_of(got) - in_steps)
    clipped = (in_steps < -8.5) | (in_steps > 7.5)
    assert clipped.any() or weight.size < 1000
    assert off[~clipped].max() <= 0.5 + 1e-5
    assert off.max() <= 5


# Refusals


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_must_be_finite(bits, value):
    weight = np.ones((3, 4), np.float32)
    weight[1, 2] = value
    with pytest.raises(ConfigError, match="NaN or infinite"):
        quantize(weight, bits=bits, axis=-1)


@pytest.mark.parametrize(("bits", "most"), [(2, 3), (4, 8), (8, 127)])
def test_weights_too_large_for_a_float16_scale_are_refused(bits, most):
    weight = np.full((1, 32), 65504.0 * most, np.float32)
    np.testing.assert_array_equal(wide(quantize(weight, bits=bits, axis=-1, group=32)), weight)
    larger = weight * np.float32(1.01)
    with pytest.raises(ConfigError, match=f"no int{bits} scale in float16; use one per channel"):
        quantize(larger, bits=bits, axis=-1, group=32)
    assert np.isfinite(wide(quantize(larger, bits=8, axis=-1))).all()


@pytest.mark.parametrize(("bits", "group"), [(2, 0), (4, 0), (4, 16), (4, 128), (8, 1), (8, 33), (8, -32)])
def test_groups_that_the_kernels_lack_are_refused(bits, group):
    with pytest.raises(ConfigError, match=rf"groups of {group}; take one of \(32, 64\)"):
        quantize(np.ones((4, 256), np.float32), bits=bits, axis=-1, group=group)


# The form


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(
    "how",
    [
        {"bits": 8},
        {"bits": 8, "group": 32},
        {"bits": 8, "per_tensor": True},
        {"bits": 4},
        {"bits": 4, "minima": True},
        {"bits": 2},
    ],
)
@pytest.mark.parametrize("shape", [(70, 96), (3, 40, 96)])
def test_parts_are_quantized_as_the_whole(monkeypatch, shape, how, axis):
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    whole = quantize(weight, axis=axis, **how)
    monkeypatch.setattr(formats, "_MOST_AT_ONCE", 1000)
    parts = quantize(weight, axis=axis, **how)
    for name in ("data", "scale", "minimum"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name), strict=True)
