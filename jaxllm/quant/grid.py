"""Recognizes floats that lie on a grid of 4 bits, as quantization-aware training leaves them in bfloat16.

Such a group of inputs holds whole multiples, -8 to 7, of one step. Its levels are found again by trying which
level the largest value is, where an ordinary search for the least error would shift them.
"""

import ml_dtypes
import numpy as np

_LEVELS = 16
# Groups that are looked at, the least of them that tell, and their share that must lie on a grid.
_SAMPLE, _LEAST, _SHARE = 256, 64, 0.95
# The largest float16 number, and its bits.
_LARGEST, _LARGEST_BITS = float(np.finfo(np.float16).max), np.int16(0x7BFF)
# Values that differ by less than this of the largest are one level, stored in 16 bits.
_ROUNDING = 2.0**-7


def on_grid(grouped: np.ndarray) -> bool:
    """Whether groups `[..., n, group]` lie on grids, by some of them.

    Ordinary weights have about as many values as a group has inputs; those of a grid at most 16.
    """
    sample = grouped.reshape(-1, grouped.shape[-1])
    sample = sample[:: max(1, len(sample) // _SAMPLE)][:_SAMPLE]
    sample = sample[sample.any(-1)]
    if len(sample) < _LEAST:
        return False
    step = grid_scale(sample)
    room = np.abs(sample).max(-1, keepdims=True) * _ROUNDING
    levels = np.rint(sample / np.where(step == 0, 1, step))
    off = np.abs(levels * step - sample).max(-1, keepdims=True)
    distinct = np.count_nonzero(np.diff(np.sort(levels, axis=-1), axis=-1), axis=-1) + 1
    same = np.count_nonzero(np.diff(np.sort(sample, axis=-1), axis=-1), axis=-1) + 1
    # As many values as levels: no two values share a level by chance.
    fits = (off[..., 0] <= room[..., 0]) & (same <= np.minimum(distinct, _LEVELS))
    return bool(np.mean(fits) >= _SHARE)


def grid_scale(grouped: np.ndarray) -> np.ndarray:
    """The step `[..., n, 1]` float32 of each group's grid, a float16 number.

    Of the steps with which the largest value is a level, the largest that leaves no more than rounding, or
    else the one that leaves least.
    """
    place = np.abs(grouped).argmax(-1, keepdims=True)
    extreme = np.take_along_axis(grouped, place, -1)
    best = extreme / np.float32(-8)
    least = _off(grouped, best)
    room = np.abs(extreme) * _ROUNDING / 2
    # From fine steps to coarse ones.
    for level in (-7, 7, -6, 6, -5, 5, -4, 4, -3, 3, -2, 2, -1, 1):
        step = extreme / np.float32(level)
        off = _off(grouped, step)
        better = np.where(off <= room, True, off < least)
        best, least = np.where(better, step, best), np.where(better, off, least)
    levels = np.clip(np.rint(grouped / np.where(best == 0, 1, best)), -8, 7)
    # All values of the group say what the step is, each but for its rounding to bfloat16.
    weight = np.square(levels).sum(-1, keepdims=True)
    step = (levels * grouped).sum(-1, keepdims=True) / np.where(weight == 0, 1, weight)
    mantissa, exponent = np.frexp(np.abs(grouped))
    half = np.ldexp(np.float32(1), exponent - 9)
    # Below a power of two bfloat16 numbers are twice as dense.
    below = np.where(mantissa == 0.5, half / 2, half)
    there, size = levels != 0, np.maximum(np.abs(levels), 1)
    low = np.where(there, (np.abs(grouped) - below) / size, 0).max(-1, keepdims=True)
    high = np.where(there, (np.abs(grouped) + half) / size, np.inf).min(-1, keepdims=True)
    near = np.minimum(np.clip(np.abs(step), low, np.maximum(low, high)), _LARGEST).astype(np.float16)
    stored, chosen = grouped.astype(ml_dtypes.bfloat16), near
    # The nearest one last, which is taken before others.
    for ulps in (-2, 2, -1, 1, 0):
        side = np.clip(near.view(np.int16) + np.int16(ulps), 0, _LARGEST_BITS).view(np.float16)
        again = levels * np.copysign(side.astype(np.float32), step)
        same = (again.astype(ml_dtypes.bfloat16) == stored).all(-1, keepdims=True)
        chosen = np.where(same, side, chosen)
    return np.copysign(chosen.astype(np.float32), step)


def _off(grouped: np.ndarray, step: np.ndarray) -> np.ndarray:
    """The largest distance of a group from its grid."""
    levels = np.clip(np.rint(grouped / np.where(step == 0, 1, step)), -8, 7)
    return np.abs(levels * step - grouped).max(-1, keepdims=True)
