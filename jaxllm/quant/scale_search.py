"""Searches scales, and minima, of groups of 4-bit weights for the minimum weighted squared error.

Each group tries several ranges, at the middle of which its values lie. A range gives each value a level; the
levels give the best scale and minimum for them, by weighted least squares; and these give new levels. The
candidate with the minimum error is used, plain rounding among them, so that no group has a larger error than
with plain rounding. llama.cpp's quantizers of Q4_0 and Q4_K (`make_qx_quants`, `make_qkx3_quants`) search
alike.

A weight's error counts as much as the mean square of the input that it multiplies (see
`jaxllm/models/input_squares.py`): the sum over a group is then the expected squared error of its part of the
output, for uncorrelated inputs.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

# Steps of the scale in the range of a group: fewer than levels have between them leave values outside.
_WIDTHS_OF_MINIMA = (15.0, 15.5, 16.0, 16.7, 17.5, 18.5, 14.4)
# The same for scales alone: steps between zero and the value of the largest magnitude.
_WIDTHS = (8.0, 8.35, 8.7, 9.1, 9.5, 7.6, -8.0, -7.5, -8.5)
_LARGEST = float(np.finfo(np.float16).max)
# Number of elements searched at once, whose arrays stay in a processor's caches.
_AT_ONCE = 1 << 15


@dataclasses.dataclass(frozen=True)
class _Groups:
    """Values `[group, n]` of n groups and their weights, groups last so that sums over one are fast; sums
    `[n]` of weights and of weighted values."""

    values: np.ndarray
    weights: np.ndarray
    weight: np.ndarray
    value: np.ndarray


def search_scales(
    grouped: np.ndarray, input_squares: np.ndarray | None = None, *, minima: bool
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Scales and levels of 4 bits with the minimum weighted squared error.

    Args:
      grouped: `[..., group]` float32, finite.
      input_squares: weights of squared errors, not negative, broadcast to `grouped`; None for equal ones.
      minima: whether groups have a minimum.

    Returns:
      Scale `[..., 1]` float16, minimum `[..., 1]` float16 (None without), and levels `[..., group]` int8 in
      [-8, 7] (see `QArray`).
    """
    size = grouped.shape[-1]
    values = grouped.reshape(-1, size)
    weights = (
        None if input_squares is None else np.broadcast_to(input_squares, grouped.shape).reshape(-1, size)
    )
    scale = np.empty(len(values), np.float16)
    minimum = np.empty(len(values), np.float16) if minima else None
    levels = np.empty(values.shape, np.int8)
    step = max(1, _AT_ONCE // size)
    for start in range(0, len(values), step):
        part = slice(start, start + step)
        own = np.ascontiguousarray(values[part].T)
        found = _search(_weighted(own, None if weights is None else weights[part].T), minima)
        scale[part], least, codes = found
        if minimum is not None:
            minimum[part] = least
        levels[part] = codes.T - np.int8(8)
    shape = (*grouped.shape[:-1], 1)
    least = None if minimum is None else minimum.reshape(shape)
    return scale.reshape(shape), least, levels.reshape(grouped.shape)


def _weighted(values: np.ndarray, input_squares: np.ndarray | None) -> _Groups:
    if input_squares is None:
        weights = np.ones_like(values)
    else:
        # Relative to the group's largest, which has no units to overflow. What counts nothing here may count
        # in another text.
        weights = input_squares.astype(np.float32)
        most = weights.max(0)
        weights = weights / np.where(most > 0, most, 1) + np.float32(1e-4)
    return _Groups(values, weights, weights.sum(0), (weights * values).sum(0))


def _search(of: _Groups, minima: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scale and minimum `[n]` float16, and codes `[group, n]` int8 from 0 to 15, of the best candidate;
    without minima 8 steps below zero is the first code."""
    best: tuple[np.ndarray, ...] | None = None
    for scale, minimum in _candidates(of, minima):
        scale, minimum = (np.clip(each, -_LARGEST, _LARGEST).astype(np.float16) for each in (scale, minimum))
        step = scale.astype(np.float32)
        first = minimum.astype(np.float32) if minima else -8 * step
        codes = _codes(of.values, step, first)
        error = codes * step
        error += first
        error -= of.values
        error *= error
        error *= of.weights
        found = error.sum(0), scale, minimum, codes.astype(np.int8)
        best = found if best is None else tuple(
            np.where(found[0] < best[0], new, old) for new, old in zip(found, best, strict=True)
        )  # fmt: skip
    assert best is not None
    return best[1], best[2], best[3]


def _candidates(of: _Groups, minima: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Scales and minima `[n]` float32, plain rounding first."""
    if minima:
        low, high = of.values.min(0), of.values.max(0)
        for width in _WIDTHS_OF_MINIMA:
            scale = (high - low) / np.float32(width)
            # What does not fit is at both ends.
            first = low + (high - low - 15 * scale) / 2
            if width == _WIDTHS_OF_MINIMA[0]:
                yield scale, first
            yield _fitted_both(of, _codes(of.values, scale, first), scale, first)
    else:
        # The value of the largest magnitude is -8 steps, the level without a positive counterpart.
        place = np.abs(of.values).argmax(0)
        extreme = np.take_along_axis(of.values, place[None], 0)[0]
        for width in _WIDTHS:
            scale = extreme / np.float32(-width)
            if width == _WIDTHS[0]:
                yield scale, scale
            codes = _codes(of.values, scale, -8 * scale) - 8
            squares = (of.weights * codes * codes).sum(0)
            fitted = (of.weights * codes * of.values).sum(0) / np.where(squares > 0, squares, 1)
            yield np.where(squares > 0, fitted, scale), scale


def _codes(values: np.ndarray, scale: np.ndarray, first: np.ndarray) -> np.ndarray:
    codes = values - first
    codes *= 1 / np.where(scale == 0, 1, scale)
    np.rint(codes, out=codes)
    return np.clip(codes, 0, 15, out=codes)


def _fitted_both(
    of: _Groups, codes: np.ndarray, scale: np.ndarray, first: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Scale and minimum with the minimum error for codes, as in linear regression; those given where all
    values have one code."""
    weighted = of.weights * codes
    one = weighted.sum(0)
    two = (weighted * codes).sum(0)
    both = (weighted * of.values).sum(0)
    spread = of.weight * two - one * one
    known = spread > 1e-6 * of.weight * two
    spread = np.where(known, spread, 1)
    slope = (of.weight * both - one * of.value) / spread
    begin = (two * of.value - one * both) / spread
    return np.where(known, slope, scale), np.where(known, begin, first)
