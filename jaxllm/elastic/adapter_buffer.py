"""Puts the adapters of all matrices of a model into one buffer, so that a bucket has one argument for all of
them.

Each argument takes memory in a bucket and time in every dispatch; two per matrix would triple their number.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.models.lora import Adapter
from jaxllm.models.parameters import param_specs

# XLA on a CPU uses host memory of this alignment without a copy.
_ALIGN_BYTES = 64


class AdapterLocation(NamedTuple):
    """Location of the adapter of a matrix `[*U, D]` in the buffer (see `jaxllm.quant.AdaptedFromBuffer`).

    Attributes:
      name: of the parameter.
      offset: index of its first float in the buffer.
      rank: r: the factors `[r, *U]` and `[r, D]` are stored one after the other.
    """

    name: str
    offset: int
    rank: int


def adapter_locations(cfg: ModelConfig, ranks: Mapping[str, int]) -> tuple[AdapterLocation, ...]:
    """Locations of adapters with given ranks by parameter, one after the other in the model's order.

    The adapters of a layer are contiguous, in the same layout for all layers of a kind, and each begins
    aligned, so that a layer's part of the buffer can be passed without a copy.
    """
    locations, end = [], 0
    for name in sorted(ranks, key=list(param_specs(cfg)).index):
        locations.append(AdapterLocation(name, end, ranks[name]))
        end = _end(cfg, locations[-1])
    return tuple(locations)


def fill_buffer(
    cfg: ModelConfig,
    locations: Sequence[AdapterLocation],
    adapters: Sequence[tuple[Adapter, float]],
) -> np.ndarray:
    """A buffer `[N]` float32 with the sum of some adapters, their ranks one after the other.

    Parts without an adapter are zero, and take no memory until they are read.

    Args:
      cfg: the whole model.
      locations: not empty, of at least the sum of the adapters' ranks.
      adapters: (adapter, scaling) pairs, of the whole model or of a sub-model, as in `jaxllm.models.lora`.
    """
    buffer = _aligned_zeros(max(_end(cfg, each) for each in locations))
    specs = param_specs(cfg)
    for name, offset, rank in locations:
        *units, width = specs[name].shape
        right_at = offset + rank * math.prod(units)
        left = buffer[offset:right_at].reshape(rank, *units)
        right = buffer[right_at : right_at + rank * width].reshape(rank, width)
        filled = 0
        for adapter, scaling in adapters:
            if f"{name}.left" not in adapter:
                continue
            given = np.moveaxis(np.asarray(adapter[f"{name}.left"]), -1, 0)
            other = np.asarray(adapter[f"{name}.right"])
            ranks = slice(filled, filled + len(other))
            left[(ranks, *map(slice, given.shape[1:]))] = given * np.float32(scaling)
            right[ranks] = other
            filled = ranks.stop
    return buffer


def _end(cfg: ModelConfig, location: AdapterLocation) -> int:
    """First aligned index after a location."""
    *units, width = param_specs(cfg)[location.name].shape
    step = _ALIGN_BYTES // 4
    return location.offset + -(-location.rank * (math.prod(units) + width) // step) * step


def _aligned_zeros(count: int) -> np.ndarray:
    raw = np.zeros(4 * count + _ALIGN_BYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGN_BYTES
    return raw[start : start + 4 * count].view(np.float32)
