"""Nested weights: 8 bits in two planes of 4; the first is a good 4-bit weight.

A level is `16 · high + low`, with high and low in [-8, 7] and the level in [-128, 119]. Each group of 64
inputs has a scale: a float32 of its output channel times a factor of 4 bits, an integer in [-16, -9] or
[8, 15]. So there is one copy of a model: both planes are its int8 weights, and the first plane is a 4-bit
model.

Scale and levels are chosen for both models together: of the candidate factors of a group, the one that
minimizes the squared error of the high plane plus `_BOTH` times that of both planes.
"""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.quant.formats import least_error

NESTED_GROUP = 64
LOWEST, HIGHEST = -128, 119
# Factors by their codes: 8 to 15 unchanged, 0 to 7 less 16.
FACTORS = np.array([*range(-16, -8), *range(8, 16)], np.int8)
# Weight of an error of both planes relative to one of the high plane. At 100, rows of 256 and more have no
# larger error in both than 8 bits with a scale per channel (0.6 to 0.9 of it), and in the high plane 1.4
# times that of 4 bits in groups of 32; at 8 it was 1.1 to 1.4, and 1.3.
_BOTH = 100.0
# Candidates of a channel's scale, relative to that of its largest weight: smaller ones clip it.
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
      ConfigError: the weight has values that are not finite.
    """
    moved = np.asarray(moved, np.float32)
    if not np.isfinite(moved).all():
        raise ConfigError("weights hold NaN or infinite values and cannot be quantized")
    rows = moved.reshape(-1, moved.shape[-1])
    short = -rows.shape[-1] % NESTED_GROUP
    grouped = np.pad(rows, ((0, 0), (0, short))).reshape(len(rows), -1, NESTED_GROUP)
    largest = np.abs(grouped).max((-1, -2)) / -float(LOWEST)

    def at(shrink: float) -> tuple[np.ndarray, ...]:
        # The largest magnitude of a factor is 16, of a positive one 15.
        channel = np.float32(shrink / 15.0) * largest
        error, factor, levels = _best_factors(grouped, np.where(channel == 0, np.float32(1), channel))
        return error.sum(-1), channel, factor, levels

    _, channel, factor, levels = least_error(map(at, _SHRINK))
    lead = moved.shape[:-1]
    return NestedLevels(
        levels=levels.reshape(*lead, -1)[..., : moved.shape[-1]],
        channel=channel.astype(np.float32).reshape(*lead, 1),
        factor=factor.reshape(*lead, -1),
    )


def _best_factors(grouped: np.ndarray, channel: np.ndarray) -> tuple[np.ndarray, ...]:
    """Errors `[R, G]`, factors `[R, G]` and levels `[R, G, 64]` with the minimum error of groups, given the
    scales of channels `[R]`."""
    top, bottom = grouped.max(-1), -grouped.min(-1)
    # Map the larger side of a group to the side of the levels that reaches further.
    turned = top > bottom
    large, small = np.maximum(top, bottom) / -float(LOWEST), np.minimum(top, bottom) / HIGHEST
    wanted = np.ceil(np.maximum(large, small) / channel[:, None] - 1e-4)
    least, most = np.where(turned, 9, 8), np.where(turned, 16, 15)

    def at(more: int) -> tuple[np.ndarray, ...]:
        factor = np.clip(wanted + more, least, most) * np.where(turned, -1, 1)
        scale = (channel[:, None] * factor.astype(np.float32))[..., None]
        levels = np.clip(np.rint(grouped / scale), LOWEST, HIGHEST)
        of_high = np.square(grouped - 16 * np.floor((levels + 8) / 16) * scale).sum(-1)
        error = of_high + _BOTH * np.square(grouped - levels * scale).sum(-1)
        return error, factor.astype(np.int8), levels.astype(np.int8)

    return least_error(map(at, (0, 1, -1)))


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
    """The inverse of `pack_scales`, multiplied: `[..., G, P, 16]` float32; host arrays stay on the host."""
    channel, factor = scale_parts(packed, panels)
    return channel * factor.astype(np.float32)


def scale_parts(packed: jax.Array, panels: int) -> tuple[jax.Array, jax.Array]:
    """The inverse of `pack_scales`: channels `[..., 1, P, 16]` float32 and factors `[..., G, P, 16]` int8;
    host arrays stay on the host."""
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


# Levels may be rounded by the inputs of their products, for better outputs of the high plane.
#
# A level whose low part is 7 is one below the level whose low part is -8 and whose high part is one more.
# From one to the other both planes change by one level of 256, and the high plane's error from 7 to -8.
# About an eighth of all weights have that choice, and theirs are the largest errors of the high plane.
# Errors of weights with correlated inputs cancel in an output if their signs are chosen accordingly, as
# GPTQ (arXiv 2210.17323) does with all levels. The other levels may move to the second nearest, so that
# both planes have no more error than before.

# How much more an error of both planes counts than one of the high plane.
_BOTH_ROUNDED = 30.0
# Number of inputs visited before their moves are applied to the other inputs' gradients together.
_BLOCK = NESTED_GROUP
# Number of outputs computed together, which limits memory.
_OUTPUTS = 4096
# Share of the mean square of the inputs that is added to each: a text is short, and others follow.
_DAMPING = 0.01
# Maximum distance of a level from the weight, in levels: if it has another high level than the nearest, and
# otherwise, if it is one of the two nearest.
_OVER, _BESIDE = 1.5, 1.0


def calibrated_levels(
    levels: np.ndarray, scale: np.ndarray, target: np.ndarray, gram: np.ndarray, *, sweeps: int = 3
) -> np.ndarray:
    """Adjusts levels to reduce the sum of squared errors of outputs: that of the high plane, plus `_BOTH`
    times that of both.

    By coordinate descent: inputs are visited in order, and each level moves by one if the sum of its output
    falls, given all others.

    Args:
      levels: `[R, n]` int8 in [-128, 119], for R outputs.
      scale: `[R, n]` float32, the scale of each level.
      target: `[R, n]` float32, the weights that levels represent.
      gram: `[n, n]` float32, sums (or means) of the products of any two inputs over a text.
      sweeps: number of visits of all inputs.

    Returns:
      Levels `[R, n]` int8. None is further than 1.5 levels from its weight, unless it was before.
    """
    inputs = levels.shape[1]
    short = -inputs % _BLOCK
    gram = np.asarray(gram, np.float32)
    damped = gram + np.float32(_DAMPING * np.trace(gram) / inputs) * np.eye(inputs, dtype=np.float32)
    damped = np.pad(damped, ((0, short), (0, short)))
    found = []
    for first in range(0, len(levels), _OUTPUTS):
        part = slice(first, first + _OUTPUTS)
        begun, steps, wanted = (
            np.pad(np.asarray(each[part]).T, ((0, short), (0, 0)), constant_values=filler)
            for each, filler in ((levels, 0), (scale, 1), (target, 0))
        )
        moved = _descend(begun, steps.astype(np.float32), wanted.astype(np.float32), damped, sweeps=sweeps)
        found.append(np.asarray(moved).T[:, :inputs])
    return np.ascontiguousarray(np.concatenate(found))


def output_errors(
    levels: np.ndarray, scale: np.ndarray, target: np.ndarray, gram: np.ndarray
) -> tuple[float, float]:
    """Sums of squared errors of outputs, of both planes and of only the high plane; for the arguments see
    `calibrated_levels`."""
    wide = levels.astype(np.int16)
    errors = []
    for taken in (wide, 16 * _high(wide)):
        error = jnp.asarray(target - taken * scale, jnp.float32)
        errors.append(float(jnp.sum((error @ jnp.asarray(gram, jnp.float32)) * error)))
    return errors[0], errors[1]


def _high(levels: Any) -> Any:
    return (levels + 8) >> 4


@functools.partial(jax.jit, static_argnames="sweeps")
def _descend(
    begun: jax.Array, scale: jax.Array, target: jax.Array, gram: jax.Array, *, sweeps: int
) -> jax.Array:
    """`calibrated_levels` with inputs first: `[n, R]`, n a multiple of blocks."""
    blocks = len(begun) // _BLOCK
    wide, wanted = begun.astype(jnp.int32), target / scale

    def block(
        number: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        levels, high, both = carry
        start = number % blocks * _BLOCK

        def own(array: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(array, start, _BLOCK)

        rows = own(gram)
        square = jax.lax.dynamic_slice_in_dim(rows, start, _BLOCK, axis=1)
        steps, goal = own(scale), own(wanted)

        def visit(at: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            levels, high, both, changed_high, changed_both = carry
            level, step, weight = levels[at], steps[at], square[at, at]
            gains, ways = [], (1, -1)
            for way in ways:
                moved = level + way
                over = _high(moved) != _high(level)
                near = jnp.abs(moved.astype(jnp.float32) - goal[at]) <= jnp.where(over, _OVER, _BESIDE)
                in_range = (moved <= HIGHEST) & (moved >= LOWEST)
                of_high, of_both = jnp.where(over, -16.0 * way, 0.0) * step, -way * step
                gain = of_high * (2 * high[at] + of_high * weight)
                gain += _BOTH_ROUNDED * of_both * (2 * both[at] + of_both * weight)
                gains.append(jnp.where(near & in_range, gain, 0))
            way = jnp.where(gains[0] < gains[1], ways[0], ways[1])
            way = jnp.where(jnp.minimum(*gains) < 0, way, 0)
            moved = level + way
            of_both = -way.astype(jnp.float32) * step
            of_high = -16.0 * (_high(moved) - _high(level)).astype(jnp.float32) * step
            column = square[:, at][:, None]
            return (
                levels.at[at].set(moved),
                high + column * of_high,
                both + column * of_both,
                changed_high.at[at].set(of_high),
                changed_both.at[at].set(of_both),
            )

        none = jnp.zeros(steps.shape, jnp.float32)
        start_of = (own(levels), own(high), own(both), none, none)
        now, _, _, changed_high, changed_both = jax.lax.fori_loop(0, _BLOCK, visit, start_of)
        levels = jax.lax.dynamic_update_slice_in_dim(levels, now, start, 0)
        return levels, high + rows.T @ changed_high, both + rows.T @ changed_both

    high = gram @ (target - 16 * _high(wide).astype(jnp.float32) * scale)
    both = gram @ (target - wide.astype(jnp.float32) * scale)
    levels, _, _ = jax.lax.fori_loop(0, sweeps * blocks, block, (wide, high, both))
    return levels.astype(jnp.int8)
