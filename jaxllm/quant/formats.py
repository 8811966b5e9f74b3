"""Quantizes weights to 8, 4 and 2 bits, symmetric or with a minimum per group; recognizes floats on a grid of
4 bits."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from jaxllm.axes import Axes
from jaxllm.errors import ConfigError

# Quantization-aware training leaves floats on a grid of 4 bits in bfloat16: a group of inputs has integer
# multiples, -8 to 7, of one step. Its levels are recovered by trying the level of the largest value, where an
# ordinary search for the minimum error would shift them.
_LEVELS = 16
# Number of sampled groups, minimum number of conclusive ones, and their minimum share on a grid.
_SAMPLE, _LEAST, _SHARE = 256, 64, 0.95
# The largest float16 number, and its bits.
_LARGEST, _LARGEST_BITS = float(np.finfo(np.float16).max), np.int16(0x7BFF)
# Values that differ by less than this share of the largest are one level, stored in 16 bits.
_ROUNDING = 2.0**-7


def on_grid(grouped: np.ndarray) -> bool:
    """Whether groups `[..., n, group]` are on grids, judged by some of them.

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

    Of the steps with which the largest value is a level, the largest with an error of only rounding, else
    the one with the minimum error.
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
    # All values of the group determine the step, each up to its rounding to bfloat16.
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
    # The nearest one last, with precedence.
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


# A weight is `[..., R, C]` with the unit axis leading. It has one of two orientations (see
# `jaxllm/nn/linear.py`): contracted along its last axis (`axis=-1`, units are outputs) or along its second-
# to-last axis (`axis=-2`, units are inputs). Scales are shared along the contracted axis only: one for the
# whole axis (default at 8 bits) or one per group of 32 or 64 inputs (4 and 2 bits). So a product can be
# computed in integers and scaled once per group, and a prefix of units has separate scales.
INT4_GROUP = 32
# Number of elements quantized at once: small float32 copies stay in a processor's caches, and those of large
# weights would dominate memory.
_MOST_AT_ONCE = 1 << 20
Bits = Literal[2, 4, 8]
BITS: tuple[Bits, ...] = (2, 4, 8)
# The largest magnitude of a level, by bits.
_TOP_LEVELS = {2: 3.0, 4: 8.0, 8: 127.0}
# Allowed group sizes: inputs that share one float16 scale.
GROUPS = (32, 64)
# Candidate shrink factors of the int2 scale, of which `quantize` uses the best for each group: clipping a
# group's extremes often lowers its squared error.
_INT2_SHRINK = (1.0, 0.92, 0.84, 0.76, 0.68, 0.6, 0.52, 0.44)


class Shaped:
    """Anything with a shape."""

    shape: Any

    @property
    def ndim(self) -> int:
        """Rank of the represented weight."""
        return len(self.shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QArray(Shaped):
    """A quantized weight: packed levels and their scales.

    Invariants: `data` is int8 `[..., R, C]` for 8 bits, uint8 `[..., R, packed_columns(C, bits)]` for
    fewer (see `pack`). `scale` has the weight's rank, and `ceil(n/group)` entries
    along `axis`, where n is the weight's length there; group 0 means one scale for the whole axis. The
    last group may be short.

    With a `minimum`, float16 of the scale's shape, at 4 bits, a value is `(level + 8) * scale + minimum`;
    without one it is `level * scale`.
    """

    data: jax.Array
    scale: jax.Array
    bits: int = dataclasses.field(metadata={"static": True})
    group: int = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(metadata={"static": True})
    columns: int = dataclasses.field(metadata={"static": True})
    minimum: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the represented weight."""
        return (*self.data.shape[:-1], self.columns)


def packed_columns(columns: int, bits: int = 4) -> int:
    """Bytes of a packed row of `columns` values of 4 or 2 bits: a half or a quarter of them, in whole
    groups."""
    return -(-columns // (8 // bits * INT4_GROUP)) * INT4_GROUP


def pack(levels: np.ndarray, bits: int) -> np.ndarray:
    """Packs levels `[..., C]` of 4 or 2 bits into bytes, uint8 `[..., packed_columns(C, bits)]`; those of 8
    bits stay as they are.

    At 4 bits levels in [-8, 7] are stored plus 8, at 2 bits the levels -3, -1, 1 and 3 as codes 0 to 3. The
    lowest bits of the bytes are the row's first part, the next bits its second, and so on, zero-padded: so
    that unpacking reads contiguous streams without interleaving, and no group is split.
    """
    if bits == 8:
        return levels
    parts, size = 8 // bits, packed_columns(levels.shape[-1], bits)
    pad = [(0, 0)] * (levels.ndim - 1) + [(0, parts * size - levels.shape[-1])]
    padded = np.pad(levels, pad, constant_values=0 if bits == 4 else -3)
    return packed_parts(padded.reshape(*levels.shape[:-1], parts, size), bits, -2)


def packed_parts(levels: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Levels of 4 or 2 bits, those of a byte along `axis` from the lowest bits up, as bytes without it."""
    codes = (levels + 8).astype(np.uint8) if bits == 4 else (levels + 3).astype(np.uint8) >> 1
    parts = [part << (bits * at) for at, part in enumerate(np.moveaxis(codes, axis, 0))]
    return functools.reduce(np.bitwise_or, parts)


def unpack(packed: Any, columns: int, bits: int, dtype: DTypeLike) -> Any:
    """Inverse of `pack`: whole numbers `[..., columns]` in `dtype`; host arrays stay on the host."""
    if bits == 8:
        return packed.astype(dtype)
    Axes("unpack", bytes=packed_columns(columns, bits)).check(jnp.uint8, "... bytes", packed=packed)
    xp = np if isinstance(packed, np.ndarray) else jnp
    mask = np.uint8((1 << bits) - 1)
    parts = [(packed >> np.uint8(shift)) & mask for shift in range(0, 8, bits)]
    codes = xp.concatenate([part.astype(dtype) for part in parts], axis=-1)[..., :columns]
    return codes - np.asarray(8, dtype) if bits == 4 else codes * np.asarray(2, dtype) - np.asarray(3, dtype)


def quantize(
    weight: np.ndarray,
    *,
    bits: Bits,
    axis: int,
    group: int | None = None,
    per_tensor: bool = False,
    minima: bool = False,
    input_squares: np.ndarray | None = None,
) -> QArray:
    """Quantizes a float weight, on the host.

    Args:
      weight: `[..., R, C]` floats, finite.
      bits: 8, 4 or 2. At 2 bits the levels are -3, -1, 1 and 3, which suit normally distributed weights
        better than four with a zero.
      axis: contracted axis of the product, -1 or -2.
      group: number of inputs per float16 scale, 32 or 64; 0 for one float32 scale per output channel (8
        bits only). None is 0 for 8 bits and 32 for fewer.
      per_tensor: whether to use one scale for the whole tensor, at 8 bits without groups; it is stored once
        per output channel.
      minima: whether to add a float16 minimum per group, at 4 bits: all 16 levels are between a group's
        smallest and largest weight. Floats on a grid of 4 bits have none.
      input_squares: at 4 bits, mean squares of the inputs over a text, `[n]` for all contracted ones
        together: a weight's squared error counts by that of its input (see `scale_search.py`). None counts
        all alike.

    Returns:
      A QArray of numpy arrays. The error of an element is at most half a scale, at 2 bits (levels two
      apart) a whole one, except for values outside of the range of the group's scale. At 4 bits no group has
      a larger sum of squared errors, each times its input's mean square, than with plain rounding.

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
    if minima and bits != 4:
        raise ConfigError(f"weights with a minimum per group have 4 bits, got {bits}")
    # The contracted axis is last until `joined`.
    moved = np.moveaxis(np.asarray(weight), axis, -1)
    # Quantization-aware training chose levels without minima.
    minima = minima and not on_grid(_by_group(moved[:: max(1, len(moved) // _SAMPLE)], group))
    # One scale for all requires all values at once.
    count = 1 if per_tensor else max(1, min(len(moved), -(-moved.size // _MOST_AT_ONCE)))
    weights = [None] * count
    if input_squares is not None:
        weights = np.array_split(_by_value(input_squares, moved, weight.shape, axis), count)
    parts = [
        _quantized(part, bits, group, per_tensor, minima, own)
        for part, own in zip(np.array_split(moved, count), weights, strict=True)
    ]

    def joined(each: Sequence[np.ndarray | None]) -> np.ndarray | None:
        found = [part for part in each if part is not None]
        return np.ascontiguousarray(np.moveaxis(np.concatenate(found), -1, axis)) if found else None

    scale, minimum, levels = map(joined, zip(*parts, strict=True))
    return QArray(
        # Host arrays until the caller puts them on a device.
        data=cast(jax.Array, pack(cast(np.ndarray, levels), bits)),
        scale=cast(jax.Array, scale),
        bits=bits,
        group=group,
        axis=axis,
        columns=weight.shape[-1],
        minimum=cast("jax.Array | None", minimum),
    )


def _by_value(input_squares: np.ndarray, moved: np.ndarray, shape: tuple[int, ...], axis: int) -> np.ndarray:
    """The mean square of the input of each value of a weight of `shape`, with the contracted axis last."""
    inputs = shape[-1:] if axis == -1 else shape[:-1]
    if (
        input_squares.shape != (int(np.prod(inputs)),)
        or not np.isfinite(input_squares).all()
        or input_squares.min() < 0
    ):
        raise ConfigError(
            f"mean squares of inputs must be {int(np.prod(inputs))} finite numbers of at least 0, got the "
            f"shape {input_squares.shape}; measure them on another text"
        )
    own = input_squares if axis == -1 else np.moveaxis(input_squares.reshape(*inputs, 1), axis, -1)
    return np.broadcast_to(own.astype(np.float32), moved.shape)


def _quantized(
    values: np.ndarray,
    bits: Bits,
    group: int,
    per_tensor: bool,
    minima: bool,
    input_squares: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    values = np.asarray(values, np.float32)
    if not np.isfinite(values).all():
        raise ConfigError("weights hold NaN or infinite values and cannot be quantized")
    most = _TOP_LEVELS[bits] * float(np.finfo(np.float16).max)
    if group and np.abs(values).max() > (float(np.finfo(np.float16).max) if minima else most):
        raise ConfigError(f"weights above {most:g} have no int{bits} scale in float16; use one per channel")
    if group == 0:
        scale = np.abs(values).max(-1, keepdims=True) / 127.0
        scale = np.full_like(scale, scale.max()) if per_tensor else scale
        return scale, None, _int8_levels(values, scale)

    grouped, minimum = _by_group(values, group), None
    if bits == 8:
        scale = (np.abs(grouped).max(-1, keepdims=True) / 127.0).astype(np.float16)
        levels = _int8_levels(grouped, scale.astype(np.float32))
    elif bits == 2:
        scale, levels = _best_int2(grouped)
    elif not minima and on_grid(grouped):
        scale = grid_scale(grouped).astype(np.float16)
        step = _nonzero(scale.astype(np.float32))
        levels = np.clip(np.rint(grouped / step), -8, 7).astype(np.int8)
    else:
        # Imported here: what runs weights does not make them.
        from jaxllm.quant.scale_search import search_scales

        weights = None if input_squares is None else _by_group(input_squares, group)
        scale, minimum, levels = search_scales(grouped, weights, minima=minima)
        minimum = None if minimum is None else minimum[..., 0]
    levels = levels.reshape(*values.shape[:-1], -1)[..., : values.shape[-1]]
    return scale[..., 0], minimum, levels


def _by_group(values: np.ndarray, group: int) -> np.ndarray:
    """`[..., n_groups, group]`, the last one zero-padded."""
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % group)])
    return padded.reshape(*values.shape[:-1], -1, group)


def scaled(
    levels: jax.Array, scale: jax.Array, minimum: jax.Array | None, group: int, axis: int
) -> jax.Array:
    """Dequantizes levels of floats, in their dtype; scales and minima as in `QArray`."""
    dtype, length = levels.dtype, levels.shape[axis]
    if minimum is None:
        return levels * _spread(scale.astype(dtype), group, length, axis)
    # Steps and minimum may be far larger than their sum, which 16 bits would lose.
    wide, least = (_spread(each.astype(jnp.float32), group, length, axis) for each in (scale, minimum))
    return ((levels.astype(jnp.float32) + np.float32(8)) * wide + least).astype(dtype)


def _spread(scale: jax.Array, group: int, length: int, axis: int) -> jax.Array:
    """Scales of groups along `axis`, repeated for each of `length` values; with `group` 0 (one scale for the
    whole axis) they are returned unchanged and broadcast."""
    if not group:
        return scale
    scale = jnp.repeat(scale, group, axis=axis)
    return jax.lax.slice_in_dim(scale, 0, length, axis=scale.ndim + axis)


def _nonzero(scale: np.ndarray) -> np.ndarray:
    return np.where(scale == 0, np.ones_like(scale), scale)


def _int8_levels(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    # A subnormal scale is so coarse that the largest weight may exceed 127 steps: clip.
    return np.clip(np.rint(values / _nonzero(scale)), -127, 127).astype(np.int8)


def _best_int2(grouped: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale `[..., n, 1]` (float16) and levels -3, -1, 1 and 3 `[..., n, group]`, of the candidates those
    with the minimum squared error per group."""
    extreme = np.abs(grouped).max(-1, keepdims=True)

    def at(shrink: float) -> tuple[np.ndarray, ...]:
        scale = (extreme * (shrink / 3.0)).astype(np.float16)
        step = _nonzero(scale.astype(np.float32))
        levels = np.clip(2 * np.floor(grouped / (2 * step)) + 1, -3, 3)
        error = np.square(levels * scale.astype(np.float32) - grouped).sum(-1, keepdims=True)
        return error, scale, levels.astype(np.int8)

    _, scale, levels = least_error(map(at, _INT2_SHRINK))
    return scale, levels


def least_error(candidates: Iterable[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    """For each entry the candidate with the minimum error, the first of equals.

    Args:
      candidates: errors, and arrays whose leading axes are those of the errors, or broadcast to them.
    """
    best: tuple[np.ndarray, ...] = ()
    for found in candidates:
        if not best:
            best = found
            continue
        better = found[0] < best[0]
        best = tuple(
            np.where(better.reshape(*better.shape, *[1] * (new.ndim - better.ndim)), new, old)
            for new, old in zip(found, best, strict=True)
        )
    return best
