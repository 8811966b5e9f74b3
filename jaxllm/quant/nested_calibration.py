"""Rounds nested weights by the inputs of their products, so that the high plane alone gives better outputs.

A level whose low part is 7 is one below the level whose low part is -8 and whose high part is one more. From
one to the other both planes change by one level of 256, and the high plane goes from an error of 7 to one of
-8. About an eighth of all weights have that choice, and theirs are the largest errors of the high plane.
Errors of weights whose inputs go together cancel in an output if their signs are chosen for it, which is what
GPTQ (arXiv 2210.17323) does with all levels. The other levels may go to the second nearest, so that both
planes err no more than before.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.quant.nested import HIGHEST, LOWEST, NESTED_GROUP

# How much more an error of both planes counts than one of the high plane.
_BOTH = 30.0
# Inputs that are visited one after the other before their moves reach the other inputs' gradients together.
_BLOCK = NESTED_GROUP
# Outputs that are computed together, which bounds memory.
_OUTPUTS = 4096
# Share of the mean square of the inputs that is added to each: a text is short, and others follow.
_DAMPING = 0.01
# Furthest that a level may be from the weight, in levels: if it has another high level than the nearest, and
# else, where it is one of the two nearest.
_OVER, _BESIDE = 1.5, 1.0


def calibrated_levels(
    levels: np.ndarray, scale: np.ndarray, target: np.ndarray, gram: np.ndarray, *, sweeps: int = 3
) -> np.ndarray:
    """Levels near those given that make the sum of squared errors of outputs smaller: that of the high plane,
    plus `_BOTH` times that of both.

    By coordinate descent: inputs are visited in order, and each level moves by one if the sum of its output
    falls, given all others.

    Args:
      levels: `[R, n]` int8 in [-128, 119], of R outputs.
      scale: `[R, n]` float32, the scale of each level.
      target: `[R, n]` float32, the weights that levels stand for.
      gram: `[n, n]` float32, sums (or means) of the products of any two inputs over a text.
      sweeps: times that all inputs are visited.

    Returns:
      Levels `[R, n]` int8. None is further than 1.5 levels from its weight, unless it was and stayed.
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
    """Sums of squared errors of outputs, of both planes and of the high plane alone; for the arguments see
    `calibrated_levels`."""
    wide = levels.astype(np.int16)
    errors = []
    for taken in (wide, 16 * _high(wide)):
        error = jnp.asarray(target - taken * scale, jnp.float32)
        errors.append(float(jnp.sum((error @ jnp.asarray(gram, jnp.float32)) * error)))
    return errors[0], errors[1]


def _high(levels):
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
                gain += _BOTH * of_both * (2 * both[at] + of_both * weight)
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
