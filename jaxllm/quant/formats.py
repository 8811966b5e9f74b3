"""Weights at 8, 4 and 2 bits: symmetric linear quantization along the axis that a product contracts.

A weight here is `[..., R, C]` with the unit axis leading. Two orientations exist (see `linear.py`):
contracted along its last axis (`axis=-1`, unit axis = output rows) or along its second-to-last one
(`axis=-2`, unit axis = reduction). Scales are shared along that axis only, by whole axis (int8 unless
told otherwise) or by groups of 32 or 64 (int4, int2), so a product can be done in integers and scaled per
group, and a prefix of units keeps its own scales.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, cast

import jax
import numpy as np

from jaxllm.errors import ConfigError

INT4_GROUP = 32
Bits = Literal[2, 4, 8]
BITS: tuple[Bits, ...] = (2, 4, 8)
# The largest level of each width.
_TOP_LEVELS = {2: 3.0, 4: 8.0, 8: 127.0}
# Inputs that may share a float16 scale.
GROUPS = (32, 64)
# Candidate shrink factors of the int4 scale: clipping a group's extremes a little often lowers its
# squared error. Searched offline, once, by `quantize`.
_INT4_SHRINK = (1.0, 0.96, 0.92, 0.88, 0.84)
# The same at 2 bits, whose four levels lie so far apart that more is worth clipping.
_INT2_SHRINK = (1.0, 0.92, 0.84, 0.76, 0.68, 0.6, 0.52, 0.44)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QArray:
    """A quantized weight and how to read it.

    Invariants: `data` is int8 `[..., R, C]` for 8 bits, uint8 `[..., R, packed_columns(C, bits)]` for
    fewer (see `pack_int4` and `pack_int2`). `scale` has the weight's rank, and `ceil(n/group)` entries
    along `axis`, where n is the weight's length there; group 0 means one scale for the whole axis. The
    last group may be short.
    """

    data: jax.Array
    scale: jax.Array
    bits: int = dataclasses.field(metadata={"static": True})
    group: int = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(metadata={"static": True})
    columns: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight this stands for."""
        return (*self.data.shape[:-1], self.columns)

    @property
    def ndim(self) -> int:
        """Rank of the weight."""
        return self.data.ndim


def packed_columns(columns: int, bits: int = 4) -> int:
    """Bytes that a row of `columns` values of 4 or 2 bits takes: a half or a quarter, in whole groups."""
    return -(-columns // (8 // bits * INT4_GROUP)) * INT4_GROUP


def pack_int4(values: np.ndarray) -> np.ndarray:
    """Packs integers in [-8, 7], two per byte: `[..., C]` -> uint8 `[..., packed_columns(C)]`.

    The low nibbles are the row's first half, the high ones its second (stored plus 8, zero-padded), so
    that unpacking is two contiguous streams and no interleaving, and no group is cut.
    """
    half = packed_columns(values.shape[-1])
    pad = [(0, 0)] * (values.ndim - 1) + [(0, 2 * half - values.shape[-1])]
    nibbles = (np.pad(values, pad) + 8).astype(np.uint8)
    return nibbles[..., :half] | (nibbles[..., half:] << 4)


def pack_int2(values: np.ndarray) -> np.ndarray:
    """Packs the numbers -3, -1, 1 and 3, four per byte: `[..., C]` -> uint8 `[..., packed_columns(C, 2)]`.

    The lowest bits are the row's first quarter, and so on, as in `pack_int4`; stored as codes 0 to 3.
    """
    quarter = packed_columns(values.shape[-1], 2)
    pad = [(0, 0)] * (values.ndim - 1) + [(0, 4 * quarter - values.shape[-1])]
    codes = (np.pad(values, pad, constant_values=-3) + 3).astype(np.uint8) >> 1
    parts = [codes[..., i * quarter : (i + 1) * quarter] << (2 * i) for i in range(4)]
    return parts[0] | parts[1] | parts[2] | parts[3]


def quantize(
    weight: np.ndarray, *, bits: Bits, axis: int, group: int | None = None, per_tensor: bool = False
) -> QArray:
    """Quantizes a float weight, on the host.

    Args:
      weight: `[..., R, C]` floats, finite.
      bits: 8, 4 or 2. At 2 bits the levels are -3, -1, 1 and 3, which serve normal weights better than four
        with a zero.
      axis: the axis a product contracts, -1 or -2.
      group: inputs that share a float16 scale, 32 or 64; 0 for one float32 scale per output channel
        (8 bits only). None is 0 for 8 bits and 32 for fewer.
      per_tensor: one scale for all output channels instead, of 8 bits without groups; it is stored for each
        of them.

    Returns:
      A QArray of numpy arrays. Error per element is at most half a scale (a whole one at 2 bits, where
      levels are two apart), but for int4 and int2 values that the chosen scale clips: those of int4 may
      be two scales further off (the group's squared error is the least of all candidates' even so), more
      in groups under 1e-3, where float16 scales are coarse.

    Raises:
      ConfigError: unsupported bits, group or axis, or weights that are not finite or too large to
        scale.
    """
    if bits not in BITS or axis not in (-1, -2) or weight.ndim < 2:
        raise ConfigError(
            f"quantize takes bits 2, 4 or 8, axis -1 or -2 and a matrix; got bits={bits}, axis={axis}, "
            f"shape={weight.shape}"
        )
    group = (0 if bits == 8 else INT4_GROUP) if group is None else group
    if group not in ((0, *GROUPS) if bits == 8 else GROUPS):
        raise ConfigError(
            f"{bits}-bit weights cannot share scales in groups of {group}; take one of {GROUPS}"
        )
    if per_tensor and (bits != 8 or group):
        raise ConfigError(
            f"one scale per tensor takes 8 bits without groups, got {bits} in groups of {group}"
        )
    # Contracted axis last while scales are worked out.
    moved = np.moveaxis(np.asarray(weight, np.float32), axis, -1)
    if not np.isfinite(moved).all():
        raise ConfigError("weights hold NaN or infinite values and cannot be quantized")
    most = _TOP_LEVELS[bits] * float(np.finfo(np.float16).max)
    if group and np.abs(moved).max() > most:
        raise ConfigError(f"weights above {most:g} have no int{bits} scale in float16; use one per channel")
    if group == 0:
        scale = np.abs(moved).max(-1, keepdims=True) / 127.0
        scale = np.full_like(scale, scale.max()) if per_tensor else scale
        data = _back(_int8_levels(moved, scale), axis)
    else:
        grouped = _in_groups(moved, group)
        scale, levels = {8: _int8_by_group, 4: _best_int4, 2: _best_int2}[bits](grouped)
        scale = scale[..., 0]
        data = _back(levels.reshape(*moved.shape[:-1], -1)[..., : moved.shape[-1]], axis)
        data = {8: np.asarray, 4: pack_int4, 2: pack_int2}[bits](data)
    return QArray(
        # Arrays of the host until someone places them.
        data=cast(jax.Array, data),
        scale=cast(jax.Array, _back(scale, axis)),
        bits=bits,
        group=group,
        axis=axis,
        columns=weight.shape[-1],
    )


def _nonzero(scale: np.ndarray) -> np.ndarray:
    return np.where(scale == 0, np.ones_like(scale), scale)


def _back(moved: np.ndarray, axis: int) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(moved, -1, axis))


def _in_groups(moved: np.ndarray, group: int) -> np.ndarray:
    """Splits the last axis into groups `[..., n_groups, group]`, zero-padding the last one."""
    short = -moved.shape[-1] % group
    padded = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, short)])
    return padded.reshape(*moved.shape[:-1], -1, group)


def _int8_levels(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    # Clipped because a subnormal scale is so coarse that its largest weight may be past 127 steps.
    return np.clip(np.rint(values / _nonzero(scale)), -127, 127).astype(np.int8)


def _int8_by_group(grouped: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale `[..., n, 1]` (float16) and levels `[..., n, group]`."""
    scale = (np.abs(grouped).max(-1, keepdims=True) / 127.0).astype(np.float16)
    return scale, _int8_levels(grouped, scale.astype(np.float32))


def _best_int4(grouped: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale `[..., n, 1]` (float16) and levels `[..., n, group]` of least squared error per group.

    The value of largest magnitude is mapped to -8, the one level without a positive twin, so all 16
    levels are in use.
    """
    index = np.abs(grouped).argmax(-1, keepdims=True)
    extreme = np.take_along_axis(grouped, index, -1)

    def levels_at(step: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(grouped / step), -8, 7)

    return _best_scale(grouped, [extreme * (-shrink / 8.0) for shrink in _INT4_SHRINK], levels_at)


def _best_int2(grouped: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same of the levels -3, -1, 1 and 3."""
    extreme = np.abs(grouped).max(-1, keepdims=True)

    def levels_at(step: np.ndarray) -> np.ndarray:
        return np.clip(2 * np.floor(grouped / (2 * step)) + 1, -3, 3)

    return _best_scale(grouped, [extreme * (shrink / 3.0) for shrink in _INT2_SHRINK], levels_at)


def _best_scale(
    grouped: np.ndarray, scales: Sequence[np.ndarray], levels_at: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Of candidates `[..., n, 1]` the scale (float16) whose levels have each group's least squared error."""

    def at(candidate: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        scale = candidate.astype(np.float16)
        step = _nonzero(scale.astype(np.float32))
        levels = levels_at(step)
        error = np.square(levels * scale.astype(np.float32) - grouped).sum(-1, keepdims=True)
        return scale, levels.astype(np.int8), error

    scale, levels, error = at(scales[0])
    for candidate in scales[1:]:
        other_scale, other_levels, other_error = at(candidate)
        better = other_error < error
        scale = np.where(better, other_scale, scale)
        levels = np.where(better, other_levels, levels)
        error = np.minimum(error, other_error)
    return scale, levels
