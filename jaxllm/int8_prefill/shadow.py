"""Multiplies shadow outliers, the excess that a static 8-bit step clips, in floats (mllm-NPU, arXiv
2407.05858, section 3.3).

With one calibrated step for all activations, a product is a product of integer tensors with one scale, which
suits integer processors. The few channels with outliers exceed 127 steps. Their excess is gathered into a
compact tensor and multiplied with these channels' weights in floats, on another processor if there is one.
The sum is exact (equation 1): x = clip(x) + excess(x).

Compact tensors have static sizes. Exceeding channels are counted first; the smallest size for all of them is
taken, or the largest size several times, so that nothing is dropped. (No size is for all channels: every
dispatch would reserve memory for all weights in floats, which is hardly ever needed.)

Steps, channels and layers are chosen by `calibration.py`.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes
from jaxllm.kernels.stepwise import TOP_LEVEL
from jaxllm.quant import Weight, contracted_rows

# Sizes of compact tensors in channels, ascending: few outliers are the rule (5 to 15 channels in the paper's
# models), and each size is a branch to compile.
_ROOMS = (16, 128)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FloatRows:
    """Weights in floats of the channels with outliers, for the products of one input.

    Excess is large and multiplies the rounding errors of quantized weights, hence floats. Channels without a
    row here use the 8-bit weight.

    Attributes:
      place: `[D]` int32, index of each channel's row, or -1.
      rows: per weight, `[R, outputs]` floats, perhaps mapped from storage.
    """

    place: jax.Array
    rows: tuple[jax.Array, ...]


def excess(x: jax.Array, step: jax.Array) -> jax.Array:
    """The part of `x` beyond ±127 steps, in the shape of x: zero for most values."""
    top = np.float32(TOP_LEVEL) * step
    return x - jnp.clip(x, -top, top)


def rooms(channels: int) -> tuple[int, ...]:
    """Sizes of compact tensors for an input of `channels` channels, ascending from 0."""
    return (0, *(room for room in _ROOMS if room < channels), *([channels] if channels <= _ROOMS[-1] else []))


def shadow_products(
    x: jax.Array, step: jax.Array, weights: Sequence[Weight], rows: FloatRows | None, *, last: bool
) -> tuple[list[jax.Array], jax.Array]:
    """Products of the excess of `x` `[T, D]` with each weight.

    Args:
      x: activations; NaN and infinity are ignored here, the integer product shows them.
      step: float32 scalar.
      weights: their D inputs are contracted, along the last axis if `last`, else along all other axes
        together.
      rows: weights in floats; None uses the quantized weights of all channels.
      last: see `weights`.

    Returns:
      `[T, outputs]` float32 for each weight, and the number of channels with an outlier, int32 scalar.
    """
    axes = Axes("shadow_products")
    axes.check(jnp.floating, "T D", x=x)
    axes.check(jnp.float32, "", step=step)
    axes.check(jnp.int32, "D", place=None if rows is None else rows.place)
    x = x.astype(jnp.float32)
    hit = jnp.any(jnp.abs(x) > np.float32(TOP_LEVEL) * step, axis=0)
    count = jnp.sum(hit, dtype=jnp.int32)
    _, *sizes, largest = rooms(x.shape[-1])

    def compact_products(x: jax.Array, channels: jax.Array, before: jax.Array) -> list[jax.Array]:
        # Unused entries are channel 0 with an excess of zero.
        real = before + jnp.arange(len(channels), dtype=jnp.int32) < count
        beyond = jnp.nan_to_num(excess(x[:, channels], step), nan=0.0, posinf=0.0, neginf=0.0)
        compact = jnp.where(real, beyond, np.float32(0))
        return [compact @ each for each in _rows_of(channels, real, weights, rows, last)]

    def nothing(x: jax.Array, hit: jax.Array) -> list[jax.Array]:
        del hit
        return [jnp.zeros((len(x), _outputs(each, last)), jnp.float32) for each in weights]

    def once(room: int) -> Callable[[jax.Array, jax.Array], list[jax.Array]]:
        return lambda x, hit: compact_products(x, _first(hit, room), jnp.zeros((), jnp.int32))

    def as_often_as_needed(x: jax.Array, hit: jax.Array) -> list[jax.Array]:
        channels = _first(hit, -(-len(hit) // largest) * largest)

        def add(number: jax.Array, found: list[jax.Array]) -> list[jax.Array]:
            own = jax.lax.dynamic_slice_in_dim(channels, number * largest, largest)
            more = compact_products(x, own, number * largest)
            return [each + added for each, added in zip(found, more, strict=True)]

        return jax.lax.fori_loop(0, -(-count // largest), add, nothing(x, hit))

    branches = [nothing, *(once(room) for room in sizes), as_often_as_needed]
    smallest = sum((count > room).astype(jnp.int32) for room in (0, *sizes))
    return jax.lax.switch(smallest, branches, x, hit), count


def added_by_shadow(
    x: jax.Array, step: jax.Array, weights: Sequence[Weight], rows: FloatRows | None, *, last: bool
) -> tuple[list[jax.Array], jax.Array]:
    """The shadow of a product's inputs `[..., inputs]` for each of its results `[..., *units]`, in their
    shapes; and the number of channels with an outlier (see `shadow_products`)."""
    found, count = shadow_products(x.reshape(-1, x.shape[-1]), step, weights, rows, last=last)
    units = [each.shape[:-1] if last else each.shape[-1:] for each in weights]
    shaped = [
        out.astype(x.dtype).reshape(*x.shape[:-1], *unit) for out, unit in zip(found, units, strict=True)
    ]
    return shaped, count


def _first(hit: jax.Array, room: int) -> jax.Array:
    """The channels `[room]` int32 where `hit` is true, ascending, padded with channel 0."""
    (channels,) = jnp.nonzero(hit, size=room, fill_value=0)
    return channels.astype(jnp.int32)


def _rows_of(
    channels: jax.Array, real: jax.Array, weights: Sequence[Weight], rows: FloatRows | None, last: bool
) -> list[jax.Array]:
    """The rows of some channels, `[N, outputs]` of each weight; rows of padding are finite and otherwise
    undefined."""

    def of_weights() -> list[jax.Array]:
        return [contracted_rows(each, channels, last=last) for each in weights]

    if rows is None or not rows.rows[0].shape[0]:
        return of_weights()
    place = rows.place[channels]

    def of_floats() -> list[jax.Array]:
        at = jnp.maximum(place, 0)
        cut = [floats[:, : _outputs(each, last)] for floats, each in zip(rows.rows, weights, strict=True)]
        return [jnp.take(each, at, axis=0, mode="clip").astype(jnp.float32) for each in cut]

    def of_both() -> list[jax.Array]:
        known = place[:, None] >= 0
        return [jnp.where(known, *pair) for pair in zip(of_floats(), of_weights(), strict=True)]

    # Dequantizing rows takes longer than the product, so it is done only if some channel has no float row.
    return jax.lax.cond(jnp.any(real & (place < 0)), of_both, of_floats)


def _outputs(weight: Weight, last: bool) -> int:
    return int(np.prod(weight.shape[:-1])) if last else weight.shape[-1]
