"""Nested weights: two planes that make exactly one model of 8 bits, whose first is a model of 4."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.quant import dequantize, embedding_rows, from_blocks, nested, nested_blocks, quantize, unit_at
from jaxllm.quant.blocks import blocked_levels, blocked_shapes, take_blocked_inputs
from jaxllm.quant.nested import (
    HIGHEST,
    LOWEST,
    NestedLevels,
    calibrated_levels,
    high_of,
    low_of,
    nest,
    output_errors,
)
from jaxllm.quant.parts import by_outputs, levels_by_outputs, with_levels

F32 = jnp.dtype(jnp.float32)
SHAPES = [((40, 100), -1), ((3, 32, 64), -1), ((96, 40), -2), ((3, 64, 50), -2)]


def weight_of(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def squared_error(weight: np.ndarray, other: jax.Array) -> float:
    return float(np.square(weight - np.asarray(other)).mean())


def test_planes_make_every_level() -> None:
    levels = np.arange(LOWEST, HIGHEST + 1).astype(np.int8)
    high, low = high_of(levels).astype(int), low_of(levels).astype(int)
    assert ((16 * high + low) == levels).all()
    for plane in (high, low):
        assert plane.min() == -8
        assert plane.max() == 7
    # The high plane is the nearest.
    assert np.abs(16.0 * high - levels).max() <= 8


def test_a_weight_that_is_representable_is_exact() -> None:
    """All levels at a factor of 15, which is what the largest weight asks for."""
    rng = np.random.default_rng(3)
    levels = rng.integers(LOWEST, HIGHEST + 1, (4, 128)).astype(np.float32)
    levels[:, ::64] = LOWEST
    found = nest(levels * np.float32(0.25))
    scale = np.repeat(found.channel * found.factor, 64, axis=-1)
    np.testing.assert_allclose(found.levels * scale, levels * 0.25, rtol=1e-6)


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_both_planes_and_one_are_good(shape: tuple[int, ...], axis: int) -> None:
    weight = weight_of(shape)
    blocks = nested_blocks(weight, axis)  # pyright: ignore[reportArgumentType]
    both, high = dequantize(blocks, F32), dequantize(dataclasses.replace(blocks, low=None), F32)
    assert blocks.nested
    expected = blocked_shapes(shape, bits=4, group=64, axis=axis, nested=True)
    assert (blocks.data.shape, blocks.scale.shape) == expected
    assert blocks.low.shape == blocks.data.shape  # pyright: ignore[reportOptionalMemberAccess]
    as_int8 = squared_error(weight, dequantize(quantize(weight, bits=8, axis=axis), F32))
    as_int4 = squared_error(weight, dequantize(quantize(weight, bits=4, axis=axis), F32))
    assert squared_error(weight, both) < 2 * as_int8
    assert squared_error(weight, high) < 1.6 * as_int4
    # The high plane is near the level.
    np.testing.assert_allclose(high, both, rtol=0, atol=8.01 * float(np.abs(np.asarray(both)).max()) / 119)


@pytest.mark.parametrize("alone", [False, True])
def test_rows_and_inputs(alone: bool) -> None:
    weight = weight_of((40, 100))
    blocks = nested_blocks(weight, -1)
    blocks = jax.tree.map(jnp.asarray, dataclasses.replace(blocks, low=None) if alone else blocks)
    whole = np.asarray(dequantize(blocks, F32))
    rows, inputs = jnp.array([[0, 39], [17, 3]]), jnp.array([0, 99, 64, 31], jnp.int32)
    np.testing.assert_array_equal(embedding_rows(blocks, rows, F32), whole[np.asarray(rows)])
    np.testing.assert_array_equal(take_blocked_inputs(blocks, inputs), whole[:, np.asarray(inputs)].T)
    blocks = jax.tree.map(jnp.asarray, nested_blocks(weight_of((3, 64, 50)), -2))
    whole = np.asarray(dequantize(blocks, F32)).reshape(-1, 50)
    index = jnp.array([0, 63, 64, 150, 191], jnp.int32)
    np.testing.assert_array_equal(take_blocked_inputs(blocks, index), whole[np.asarray(index)])


def test_weights_of_zeros_and_no_numbers() -> None:
    blocks = nested_blocks(np.zeros((16, 64), np.float32), -1)
    assert not np.asarray(blocked_levels(blocks)).any()
    assert not np.asarray(dequantize(blocks, F32)).any()
    for bad in (np.nan, np.inf):
        weight = weight_of((16, 64))
        weight[3, 5] = bad
        with pytest.raises(ConfigError, match="NaN or infinite"):
            nested_blocks(weight, -1)


@pytest.mark.parametrize(("shape", "axis"), [*SHAPES, ((3, 80, 50), -2)])
def test_levels_go_out_and_back(shape: tuple[int, ...], axis: int) -> None:
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    blocks = nested_blocks(weight, axis)  # pyright: ignore[reportArgumentType]
    levels, scale = levels_by_outputs(blocks)
    whole = np.asarray(dequantize(blocks, F32))
    np.testing.assert_array_equal(by_outputs(whole, axis), levels * scale)
    # Devices without these blocks read the same numbers, of one plane too; and each matrix of a stack.
    for planes in (blocks, dataclasses.replace(blocks, low=None)):
        np.testing.assert_array_equal(dequantize(from_blocks(planes), F32), dequantize(planes, F32))
    if len(shape) == 3:
        one = unit_at(jax.tree.map(jnp.asarray, blocks), jnp.int32(1))
        np.testing.assert_array_equal(dequantize(one, F32), whole[1])
    again = with_levels(blocks, levels)
    for field in ("data", "low", "scale"):
        np.testing.assert_array_equal(getattr(again, field), getattr(blocks, field))
    assert dataclasses.replace(again, data=None, low=None, scale=None) == dataclasses.replace(
        blocks, data=None, low=None, scale=None
    )
    others = np.random.default_rng(1).integers(-128, 120, levels.shape).astype(np.int8)
    np.testing.assert_array_equal(levels_by_outputs(with_levels(blocks, others))[0], others)


# Levels that are rounded by the inputs of their products


def inputs_of(count: int, seed: int = 0) -> np.ndarray:
    """The gram matrix of inputs that go together, as those of models do."""
    rng = np.random.default_rng(seed)
    common, own = rng.standard_normal((400, 8)), rng.standard_normal((400, count))
    mixed = common @ np.random.default_rng(7).standard_normal((8, count)) + own
    return (mixed.T @ mixed / len(mixed)).astype(np.float32)


def nested_weight_of(rows: int, count: int) -> tuple[np.ndarray, NestedLevels, np.ndarray]:
    """A weight, its levels, and the scale of each."""
    weight = np.random.default_rng(1).standard_normal((rows, count)).astype(np.float32)
    found = nest(weight)
    scale = np.repeat(found.channel * found.factor.astype(np.float32), 64, axis=-1)[:, :count]
    return weight, found, scale


def test_errors_of_inputs_that_go_together_cancel() -> None:
    """7.4 and 7.4 are 0 and 0 by their nearest high levels, and 16 and 0 where inputs are always equal."""
    target, scale, both = np.full((1, 2), 7.4, np.float32), np.ones((1, 2), np.float32), np.ones((2, 2))
    levels = np.full((1, 2), 7, np.int8)
    found = calibrated_levels(levels, scale, target, both)
    np.testing.assert_array_equal(found, [[8, 7]])
    np.testing.assert_array_equal(high_of(found), [[1, 0]])
    of_both, of_high = output_errors(found, scale, target, both)
    np.testing.assert_allclose((of_both, of_high), (0.2**2, 1.2**2), rtol=1e-4)
    # 6.4 is too far from 8.
    far = calibrated_levels(levels - np.int8(1), scale, target - 1, both)
    np.testing.assert_array_equal(high_of(far), [[0, 0]])


def test_both_planes_stay_and_the_high_plane_gets_better() -> None:
    weight, found, scale = nested_weight_of(24, 192)
    gram = inputs_of(192)
    levels = calibrated_levels(found.levels, scale, weight, gram)
    before, after = (output_errors(each, scale, weight, gram) for each in (found.levels, levels))
    assert after[0] < before[0]
    assert after[1] < 0.7 * before[1]
    moved = levels != found.levels
    assert 0.02 < moved.mean() < 0.3
    assert np.abs(levels - weight / scale)[moved].max() <= 1.5 + 1e-4
    # What was held out is as good: the inputs' own law is found, not their noise.
    assert output_errors(levels, scale, weight, inputs_of(192))[1] < 0.7 * before[1]


def test_no_single_move_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against every allowed move of every level, by sums written out; outputs come in parts."""
    monkeypatch.setattr(nested, "_OUTPUTS", 2)
    weight, found, scale = nested_weight_of(3, 70)
    gram = inputs_of(70)
    levels = calibrated_levels(found.levels, scale, weight, gram, sweeps=30).astype(np.int16)
    damped = gram.astype(np.float64) + 0.01 * np.trace(gram) / 70 * np.eye(70)

    def objective(row: int, own: np.ndarray) -> float:
        errors = [weight[row] - each * scale[row] for each in (16.0 * high_of(own), own.astype(np.float64))]
        return sum(times * error @ damped @ error for times, error in zip((1, 30), errors, strict=True))

    for row, place, way in itertools.product(range(3), range(70), (1, -1)):
        other = levels[row].copy()
        other[place] += way
        over = high_of(other)[place] != high_of(levels[row])[place]
        if abs(other[place] - weight[row, place] / scale[row, place]) > (1.5 if over else 1.0):
            continue
        if other[place] in (-129, 120):
            continue
        least = objective(row, levels[row])
        assert objective(row, other) > least * (1 - 1e-5)
