"""Laws of the search for scales of 4 bits."""

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.quant import quantize
from jaxllm.quant.scale_search import search_scales
from tests.quant.plain import wide

both = pytest.mark.parametrize("minima", [False, True])


def normal(shape, seed=0):
    draw = np.random.default_rng(seed)
    return (draw.standard_normal(shape) * np.exp2(draw.integers(-4, 5, (*shape[:-1], 1)))).astype(np.float32)


def rounded(grouped, minima):
    """Plain rounding: levels lie evenly between a group's extremes, or are steps of the largest value."""
    if minima:
        low, high = grouped.min(-1, keepdims=True), grouped.max(-1, keepdims=True)
        scale, first = ((high - low) / 15).astype(np.float16).astype(np.float32), low.astype(np.float16)
    else:
        extreme = np.take_along_axis(grouped, np.abs(grouped).argmax(-1, keepdims=True), -1)
        scale = (extreme / -8).astype(np.float16).astype(np.float32)
        first = -8 * scale
    return np.clip(np.rint((grouped - first) / np.where(scale == 0, 1, scale)), 0, 15) * scale + first


def found(grouped, squares, minima):
    scale, minimum, levels = search_scales(grouped, squares, minima=minima)
    assert (minimum is None) is not minima
    assert levels.min() >= -8
    assert levels.max() <= 7
    floats = levels * scale.astype(np.float32)
    return floats if minimum is None else floats + 8 * scale.astype(np.float32) + minimum.astype(np.float32)


@both
def test_no_group_has_a_larger_error_than_with_plain_rounding(minima):
    grouped = normal((40, 3, 32))
    squares = np.exp2(np.random.default_rng(1).integers(-12, 13, (3, 32))).astype(np.float32)
    for weights in (None, squares):
        mine, plain = (
            (np.square(each - grouped) * (1 if weights is None else weights)).sum(-1)
            for each in (found(grouped, weights, minima), rounded(grouped, minima))
        )
        # What has no weight counts a ten-thousandth.
        assert np.all(mine <= plain * (1 + 2e-3))
        assert mine.sum() < 0.93 * plain.sum()


@both
def test_errors_move_to_inputs_that_count_less(minima):
    grouped = normal((200, 1, 32))
    squares = np.ones(32, np.float32)
    squares[:4] = 1000.0
    plain, mine = (np.square(found(grouped, each, minima) - grouped).mean((0, 1)) for each in (None, squares))
    assert mine[:4].mean() < 0.6 * plain[:4].mean()
    assert mine[4:].mean() > plain[4:].mean()


@both
def test_a_grid_that_spans_all_levels_is_kept(minima):
    draw = np.random.default_rng(0)
    levels = draw.integers(-8, 8, (50, 2, 32)).astype(np.float32)
    levels[..., 0], levels[..., 1] = -8, 7
    scale = draw.integers(1, 200, (50, 2, 1)).astype(np.float32) / 1024
    grouped = levels * scale + (draw.integers(-9, 9, (50, 2, 1)) / np.float32(8) if minima else 0)
    np.testing.assert_array_equal(found(grouped.astype(np.float32), None, minima), grouped)


@pytest.mark.parametrize("values", [0.0, 3.0, -65504.0, 1e-9])
@both
def test_equal_values_have_one_level(values, minima):
    grouped = np.full((2, 2, 32), values, np.float32)
    np.testing.assert_allclose(found(grouped, None, minima), grouped, rtol=2**-10, atol=1e-7)


@pytest.mark.parametrize("axis", [-1, -2])
def test_mean_squares_belong_to_contracted_inputs(axis):
    """Of a stack's units all inputs are contracted together."""
    weight = normal((3, 64, 96))
    inputs = 96 if axis == -1 else 3 * 64
    squares = np.ones(inputs, np.float32)
    squares[5] = 1e6
    got = wide(quantize(weight, bits=4, axis=axis, minima=True, input_squares=squares))
    plain = wide(quantize(weight, bits=4, axis=axis, minima=True))
    at = (..., 5) if axis == -1 else (0, 5)
    assert np.abs(got - weight)[at].mean() < 0.1 * np.abs(plain - weight)[at].mean()
    if axis == -2:
        assert np.mean(got[1:] != plain[1:]) < 0.01
    for wrong in (squares[1:], -squares, squares * np.nan):
        with pytest.raises(ConfigError, match=f"{inputs} finite numbers"):
            quantize(weight, bits=4, axis=axis, input_squares=wrong)
