"""Nested weights: 8 bits in two planes of 4, of which the first alone is a good 4-bit weight.

A level is `16 · high + low`, with high and low in [-8, 7] and the level in [-128, 119]. Each group of 64
inputs has a scale: a float32 of its output channel times a factor of 4 bits, a whole number in [-16, -9] or
[8, 15]. So there is one copy of a model: both planes are its int8 weights, the first plane is a 4-bit model
of its own.

Scale and levels are chosen for both models together: of the factors that could serve a group, the one that
minimizes the squared error of the high plane plus `_BOTH` times that of both planes.
"""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError

NESTED_GROUP = 64
LOWEST, HIGHEST = -128, 119
# Factors by their codes: 8 to 15 as they are, 0 to 7 less 16.
FACTORS = np.array([*range(-16, -8), *range(8, 16)], np.int8)
# How much more an error of both planes counts than one of the high plane. At 100 rows of 256 and more have no
# larger error in both than 8 bits with a scale per channel give (0.6 to 0.9 of it), and in the high plane 1.4
# times that of 4 bits in groups of 32; at 8 it was 1.1 to 1.4, and 1.3.
_BOTH = 100.0
# Candidates of a channel's scale, as shares of what its largest weight asks for: less clips it.
_SHRINK = (1.0, 0.97, 0.94, 0.91)


@dataclasses.dataclass(frozen=True)
class NestedLevels:
    """A nested weight as whole numbers, on the host, the contracted axis last.

    Attributes:
      levels: `[..., n]` int8 in [-128, 119].
      channel: `[..., 1]` float32, the scale of an output channel.
      factor: `[..., ceil(n / 64)]` int8, of `FACTORS`.
    """

    levels: np.ndarray
    channel: np.ndarray
    factor: np.ndarray


def nest(moved: np.ndarray) -> NestedLevels:
    """Quantizes a float weight whose contracted axis is last, `[..., n]`.

    Raises:
      ConfigError: the weight holds values that are not finite.
    """
    moved = np.asarray(moved, np.float32)
    if not np.isfinite(moved).all():
        raise ConfigError("weights hold NaN or infinite values and cannot be quantized")
    rows = moved.reshape(-1, moved.shape[-1])
    short = -rows.shape[-1] % NESTED_GROUP
    grouped = np.pad(rows, ((0, 0), (0, short))).reshape(len(rows), -1, NESTED_GROUP)
    best: tuple[np.ndarray, ...] | None = None
    largest = np.abs(grouped).max((-1, -2)) / -float(LOWEST)
    for shrink in _SHRINK:
        # The largest magnitude of a factor is 16, of a positive one 15.
        channel = np.float32(shrink / 15.0) * largest
        error, factor, levels = _best_factors(grouped, np.where(channel == 0, np.float32(1), channel))
        found = (error.sum(-1), channel, factor, levels)
        if best is None:
            best = found
            continue
        better = found[0] < best[0]
        best = tuple(
            np.where(better.reshape(-1, *[1] * (new.ndim - 1)), new, old)
            for new, old in zip(found, best, strict=True)
        )
    assert best is not None
    _, channel, factor, levels = best
    lead = moved.shape[:-1]
    return NestedLevels(
        levels=levels.reshape(*lead, -1)[..., : moved.shape[-1]],
        channel=channel.astype(np.float32).reshape(*lead, 1),
        factor=factor.reshape(*lead, -1),
    )


def _best_factors(grouped: np.ndarray, channel: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Errors `[R, G]`, factors `[R, G]` and levels `[R, G, 64]` of least error of groups, given the scales of
    channels `[R]`."""
    top, bottom = grouped.max(-1), -grouped.min(-1)
    # The larger side of a group goes to the side of the levels that reaches further.
    turned = top > bottom
    large, small = np.maximum(top, bottom) / -float(LOWEST), np.minimum(top, bottom) / HIGHEST
    wanted = np.ceil(np.maximum(large, small) / channel[:, None] - 1e-4)
    least, most = np.where(turned, 9, 8), np.where(turned, 16, 15)
    best: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    for more in (0, 1, -1):
        factor = np.clip(wanted + more, least, most) * np.where(turned, -1, 1)
        scale = (channel[:, None] * factor.astype(np.float32))[..., None]
        levels = np.clip(np.rint(grouped / scale), LOWEST, HIGHEST)
        of_high = np.square(grouped - 16 * np.floor((levels + 8) / 16) * scale).sum(-1)
        error = of_high + _BOTH * np.square(grouped - levels * scale).sum(-1)
        found = error, factor.astype(np.int8), levels.astype(np.int8)
        if best is None:
            best = found
            continue
        better = error < best[0]
        best = (
            np.where(better, error, best[0]),
            np.where(better, found[1], best[1]),
            np.where(better[..., None], found[2], best[2]),
        )
    assert best is not None
    return best


def high_of(levels: np.ndarray) -> np.ndarray:
    """The high planes of levels, int8 in [-8, 7]."""
    return ((levels.astype(np.int16) + 8) >> 4).astype(np.int8)


def low_of(levels: np.ndarray) -> np.ndarray:
    """The low planes of levels, int8 in [-8, 7]."""
    return (levels.astype(np.int16) - 16 * high_of(levels).astype(np.int16)).astype(np.int8)


def pack_scales(channel: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Scales as native kernels read them.

    Args:
      channel: `[..., P, 16]` float32, of panels of 16 outputs.
      factor: `[..., G, P, 16]` int8, of `FACTORS`.

    Returns:
      `[..., P·64 + G·P·8]` uint8: the floats of all panels, then of each group the factors of all panels, two
      in a byte: of output j in the low bits, of output j + 8 in the high ones.
    """
    code = (factor.astype(np.int16) & 15).astype(np.uint8)
    packed = code[..., :8] | (code[..., 8:] << 4)
    lead = channel.shape[:-2]
    floats = np.ascontiguousarray(channel, np.float32).view(np.uint8).reshape(*lead, -1)
    return np.concatenate([floats, packed.reshape(*lead, -1)], axis=-1)


def unpack_scales(packed: jax.Array, panels: int) -> jax.Array:
    """The inverse of `pack_scales`, multiplied out: `[..., G, P, 16]` float32; host arrays stay there."""
    channel, factor = scale_parts(packed, panels)
    return channel * factor.astype(np.float32)


def scale_parts(packed: jax.Array, panels: int) -> tuple[jax.Array, jax.Array]:
    """The inverse of `pack_scales`: channels `[..., 1, P, 16]` float32 and factors `[..., G, P, 16]` int8;
    host arrays stay there."""
    on_host = isinstance(packed, np.ndarray)
    lead, floats = packed.shape[:-1], packed[..., : 64 * panels]
    if on_host:
        channel = np.ascontiguousarray(floats).view(np.float32).reshape(*lead, 1, panels, 16)
    else:
        grouped = floats.reshape(*lead, panels, 16, 4)
        channel = jax.lax.bitcast_convert_type(grouped, jnp.float32)[..., None, :, :]
    xp = np if on_host else jnp
    pairs = packed[..., 64 * panels :].reshape(*lead, -1, panels, 8)
    code = xp.concatenate([pairs & np.uint8(15), pairs >> np.uint8(4)], axis=-1)
    return cast(jax.Array, channel), cast(jax.Array, xp.asarray(FACTORS)[code.astype(np.int32)])
