"""Puts levels and scales of a quantized checkpoint into our order, without touching a number."""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.models.parameters import ParamSpec
from jaxllm.models.translate import Tensor, heads_of, swap_pairs
from jaxllm.quant.formats import QArray, pack_int4

GROUP = 32
# Twice the numbers of MXFP4 (e2m1), by their 4 bits.
_TWICE_E2M1 = np.asarray((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.int8)


@dataclasses.dataclass(frozen=True)
class Levels:
    """A checkpoint's tensor as integers and scales: what stands for `levels · scale`, or with minima for
    `(levels + 8) · scale + minimum`.

    Attributes:
      levels: int8, of the tensor's shape.
      scale: one for `group` values of the last axis, float16; or one for all of them, float32 (group 0).
      bits: 8 or 4.
      group: 32 or 0; 4 bits have groups.
      minimum: of 4 bits, float16 of the shape of `scale`; None without.
    """

    levels: np.ndarray
    scale: np.ndarray
    bits: int
    group: int = GROUP
    minimum: np.ndarray | None = None

    def values(self) -> np.ndarray:
        """The numbers, in float32."""
        repeats = self.group or self.levels.shape[-1]

        def wide(each: np.ndarray) -> np.ndarray:
            return each.astype(np.float32).repeat(repeats, -1)[..., : self.levels.shape[-1]]

        levels = self.levels.astype(np.float32)
        if self.minimum is None:
            return levels * wide(self.scale)
        return (levels + np.float32(8)) * wide(self.scale) + wide(self.minimum)

    def packed(self, axis: int) -> QArray:
        """Our weight of these levels, contracted along `axis`."""
        data = self.levels if self.bits == 8 else pack_int4(self.levels)
        return QArray(
            data=np.ascontiguousarray(data),  # pyright: ignore[reportArgumentType]: a host array
            scale=np.ascontiguousarray(self.scale),  # pyright: ignore[reportArgumentType]
            bits=self.bits,
            group=self.group,
            axis=axis,
            columns=self.levels.shape[-1],
            minimum=None if self.minimum is None else np.ascontiguousarray(self.minimum),  # pyright: ignore
        )


def e2m1_levels(codes: np.ndarray, exponents: np.ndarray) -> Levels:
    """A tensor of MXFP4 as 8-bit levels, bit for bit.

    Args:
      codes: `[..., groups, 32]` integers below 16.
      exponents: `[..., groups]` uint8, of powers of two, 127 above the power; 255 is no number.

    Raises:
      CheckpointError: a scale is not finite, or above what float16 holds.
    """
    levels, exponents = _TWICE_E2M1[codes], exponents.astype(np.int32)
    empty = ~levels.any(-1)
    if (exponents == 255).any():
        raise CheckpointError("a scale is not finite; take another copy of the weights")
    # Of levels that are twice the numbers. Powers of two from 2**-24 to 2**15 are float16.
    power = np.where(empty, 0, exponents - 128)
    if power.max(initial=0) > 15:
        raise CheckpointError("a scale is above what float16 holds; take the float weights")
    # Levels of smaller scales are rounded to multiples of the least.
    if (below := np.minimum(power + 24, 0)).any():
        levels = np.rint(np.ldexp(levels.astype(np.float32), below[..., None])).astype(np.int8)
    scale = np.ldexp(np.float32(1), np.maximum(power, -24)).astype(np.float16)
    return Levels(levels.reshape(*codes.shape[:-2], -1), scale, 8)


def packed_parameter(of: Levels, tensor: Tensor, param: str, specs: Mapping[str, ParamSpec]) -> QArray | None:
    """One of our parameters in a checkpoint's tensor, as it is stored.

    Args:
      of: the tensor, of the checkpoint's shape; of experts all `[E, ...]` or, by `tensor.expert`, one.
      tensor: how our parameters lie in it.
      param: the parameter.
      specs: of all parameters.

    Returns:
      The weight; None where a group of the checkpoint lies in two of our units, each of which needs scales of
      its own.
    """
    spec = specs[param]
    stacked = tensor.stacked or (tensor.expert is not None and of.levels.ndim == 3)
    shape = spec.shape if tensor.expert is None or stacked else spec.shape[1:]
    if stacked and not tensor.stacked:
        values = np.stack([tensor.read(each, param, specs) for each in of.levels])
    else:
        values = tensor.read(of.levels, param, specs)

    def turned(scale: np.ndarray) -> np.ndarray | None:
        """Scales in our order, or minima."""
        scale = scale.swapaxes(-1, -2)
        if len(shape) < 3 or stacked:
            return scale
        return _scales_of_units(scale, shape[0], shape[1], of.group)

    def plain(scale: np.ndarray) -> np.ndarray:
        if tensor.alternating:
            scale = tensor.rows_of(scale, param, slice(None))
        elif not stacked:
            scale = _scales_of_rows(scale, tensor, param, specs)
        return scale.reshape(*shape[:-1], -1)

    inputs = spec.role == "from_units"
    place = turned if inputs else plain
    scale, minimum = (None if each is None else place(each) for each in (of.scale, of.minimum))
    if scale is None:
        return None
    return dataclasses.replace(of, levels=values, scale=scale, minimum=minimum).packed(-2 if inputs else -1)


def _scales_of_rows(
    scale: np.ndarray, tensor: Tensor, param: str, specs: Mapping[str, ParamSpec]
) -> np.ndarray:
    """Scales of the rows of a parameter, as `Tensor.read` takes the rows themselves."""
    lead = 0 if tensor.expert is None else 1
    counts = [math.prod(specs[name].shape[lead:-1]) for name in tensor.params]
    place = tensor.params.index(param)
    if tensor.by_head:
        return heads_of(scale, len(counts), place, specs[param.rsplit(".", 1)[0] + ".k"].shape[1])
    scale = scale[sum(counts[:place]) :][: counts[place]]
    if not tensor.interleaved:
        return scale
    return swap_pairs(scale, specs[param.rsplit(".", 1)[0] + ".k"].shape[1], 2)


def _scales_of_units(scale: np.ndarray, units: int, rows: int, group: int) -> np.ndarray | None:
    """Scales `[groups, D]` of all rows of units as `[units, groups of a unit, D]`; None where a group is in
    two."""
    if group == 0:
        return np.broadcast_to(scale[None], (units, *scale.shape))
    if rows % group and group % rows:
        return None
    first = np.arange(units)[:, None] * rows + np.arange(-(-rows // group))[None] * group
    return scale[first // group]
