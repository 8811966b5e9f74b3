"""Narrow weights on the host: exact bytes, error bounds, what is refused."""

import chex
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import ConfigError
from jaxllm.quant import formats, quantize
from jaxllm.quant.formats import INT4_GROUP, on_grid, pack, packed_columns
from tests.quant.plain import levels_of, step_of, wide

# Ragged groups, whole groups, several groups, fewer than one; matrices and stacks of them.
SHAPES = [(5, 7), (3, 32), (64, 33), (70, 65), (2, 40, 9), (3, 33, 64)]
# Levels end 8 steps from zero on one side and 7 on the other; the least scale is 0.84 of the one that
# reaches the extreme, rounded to float16.
INT4_REACH = 8 / 0.84 * (1 + 2**-10)


def normal(shape, seed=0):
    """Rows and columns of very different magnitudes."""
    rng = np.random.default_rng(seed)
    spread = np.exp2(rng.integers(-6, 7, (*shape[:-1], 1))) * np.exp2(rng.integers(-2, 3, shape[-1:]))
    return (rng.standard_normal(shape) * spread).astype(np.float32)


# Packing


@pytest.mark.parametrize(
    ("columns", "size"), [(1, 32), (32, 32), (63, 32), (64, 32), (65, 64), (128, 64), (130, 96)]
)
def test_packed_columns(columns, size):
    assert packed_columns(columns) == size


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
    got = quantize(given.astype(np.float32), bits=4, axis=axis)
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


def test_int2_clips_where_that_errs_less():
    """One large value among small ones: levels for the small ones."""
    row = np.tile([0.3, -0.1, 0.1, -0.3], 8).astype(np.float32)
    row[0] = 0.6
    got = quantize(row[None], bits=2, axis=-1)
    assert got.scale[0, 0] < 0.15
    assert levels_of(got)[0, :4].tolist() == [3, -1, 1, -3]


def test_int2_of_normal_weights():
    """The best four equal steps lose 11.9% of the square (Max, 1960, table 2); scales that adapt lose
    about as much of so few numbers."""
    weight = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    lost = np.square(wide(quantize(weight, bits=2, axis=-1)) - weight).sum() / np.square(weight).sum()
    assert 0.08 < lost < 0.119


def test_int8_by_groups_by_hand():
    """A float16 scale for each 32 inputs, the last group short."""
    row = np.zeros((1, 40), np.float32)
    row[0, :3], row[0, 32:34] = (127.0, -63.5, 1.4), (-0.25, 0.125)
    got = quantize(row, bits=8, axis=-1, group=32)
    assert got.scale.dtype == np.float16
    assert got.scale.tolist() == [[1.0, float(np.float16(0.25 / 127))]]
    assert got.data[0, :3].tolist() == [127, -64, 1]
    assert got.data[0, 32:].tolist() == [-127, 64, *[0] * 6]
    assert (got.bits, got.group, got.axis, got.columns) == (8, 32, -1, 40)


def test_groups_of_64():
    weight = normal((4, 130))
    for bits in (4, 8):
        got = quantize(weight, bits=bits, axis=-1, group=64)
        assert got.scale.shape == (4, 3)
        # A group by itself gets the same scale and levels.
        alone = quantize(weight[:, 64:128], bits=bits, axis=-1, group=64)
        np.testing.assert_array_equal(got.scale[:, 1:2], alone.scale)
        np.testing.assert_array_equal(wide(got)[:, 64:128], wide(alone))
        other = quantize(weight.T, bits=bits, axis=-2, group=64)
        np.testing.assert_array_equal(wide(other).T, wide(got))


@pytest.mark.parametrize("group", [None, 32])
def test_zeros_stay_zero(group):
    for bits in (4, 8):
        for axis in (-1, -2):
            weight = np.zeros((40, 40), np.float32)
            weight[0, 0] = 3.0
            got = quantize(weight, bits=bits, axis=axis, group=group)
            np.testing.assert_allclose(wide(got), weight, rtol=1e-3)
            assert np.count_nonzero(wide(got)) == 1
            chex.assert_tree_all_finite(got.scale)


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


@settings(max_examples=60)
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


@pytest.mark.parametrize(
    ("shape", "bits", "axis"), [((4, 4), 3, -1), ((4, 4), 8, 0), ((4, 4), 8, 1), ((4,), 8, -1)]
)
def test_unsupported_quantization_is_refused(shape, bits, axis):
    with pytest.raises(ConfigError, match=f"bits={bits}, axis={axis}"):
        quantize(np.ones(shape, np.float32), bits=bits, axis=axis)


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
