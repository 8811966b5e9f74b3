"""Levels of nested weights that are rounded by the inputs of their products."""

import itertools

import numpy as np
import pytest

from jaxllm.quant import nested
from jaxllm.quant.nested import NestedLevels, calibrated_levels, high_of, nest, output_errors


def inputs_of(count: int, seed: int = 0) -> np.ndarray:
    """The gram matrix of inputs that go together, as those of models do."""
    rng = np.random.default_rng(seed)
    common, own = rng.standard_normal((400, 8)), rng.standard_normal((400, count))
    mixed = common @ np.random.default_rng(7).standard_normal((8, count)) + own
    return (mixed.T @ mixed / len(mixed)).astype(np.float32)


def weight_of(rows: int, count: int) -> tuple[np.ndarray, NestedLevels, np.ndarray]:
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


def test_inputs_that_are_independent_are_rounded_one_by_one() -> None:
    """Each level is the best by itself: an error of both planes counts 30 times one of the high plane."""
    weight, found, scale = weight_of(8, 128)
    levels = calibrated_levels(found.levels, scale, weight, np.eye(128))
    assert (levels != found.levels).any()

    def error(level: int, place: float) -> float:
        return (16 * ((level + 8) // 16) - place) ** 2 + 30 * (level - place) ** 2

    for level, place in zip(levels.flat, (weight / scale).astype(float).flat, strict=True):
        least = min(error(each, place) for each in range(-128, 120))
        assert error(int(level), place) <= least * (1 + 1e-4)


def test_both_planes_stay_and_the_high_plane_gets_better() -> None:
    weight, found, scale = weight_of(24, 192)
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
    weight, found, scale = weight_of(3, 70)
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
