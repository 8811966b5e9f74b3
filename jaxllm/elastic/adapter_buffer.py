"""The adapters of all matrices of a model in one buffer, so that a graph has one operand for all of them.

An operand costs a graph memory and every call of it time; two for each matrix would triple their number.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.models.parameters import param_specs

# A CPU's XLA takes memory that begins here as it is.
_ALIGN_BYTES = 64


class AdapterPlace(NamedTuple):
    """Where a matrix `[*U, D]` has its adapter: see `jaxllm.quant.AdaptedFromBuffer`.

    Attributes:
      name: the parameter.
      at: of the buffer's floats the first.
      rank: r, of `[r, *U]` and `[r, D]` one behind the other.
    """

    name: str
    at: int
    rank: int


def adapter_places(cfg: ModelConfig, ranks: Mapping[str, int]) -> tuple[AdapterPlace, ...]:
    """Places of adapters of some ranks, by parameter: one behind the other in the model's order.

    Those of a layer lie together, as in every layer of its kind, and memory may be shared from each on.
    """
    places, end = [], 0
    for name in sorted(ranks, key=list(param_specs(cfg)).index):
        places.append(AdapterPlace(name, end, ranks[name]))
        end = _end(cfg, places[-1])
    return tuple(places)


def fill_buffer(
    cfg: ModelConfig,
    places: Sequence[AdapterPlace],
    adapters: Sequence[tuple[Mapping[str, np.ndarray], float]],
) -> np.ndarray:
    """A buffer `[N]` float32 with the sum of some adapters: the ranks of each behind those of the one before.

    What has no adapter is zeros, and takes no memory until it is read.

    Args:
      cfg: the whole model.
      places: of at least as many ranks as the adapters have together; not empty.
      adapters: of the whole model or of a sub-model, as `jaxllm.lora` has them, and their scalings.
    """
    buffer = _aligned_zeros(max(_end(cfg, place) for place in places))
    specs = param_specs(cfg)
    for name, at, rank in places:
        *units, width = specs[name].shape
        right_at = at + rank * math.prod(units)
        left = buffer[at:right_at].reshape(rank, *units)
        right = buffer[right_at : right_at + rank * width].reshape(rank, width)
        filled = 0
        for adapter, scaling in adapters:
            if f"{name}.left" not in adapter:
                continue
            given, other = np.moveaxis(adapter[f"{name}.left"], -1, 0), adapter[f"{name}.right"]
            ranks = slice(filled, filled + len(other))
            left[(ranks, *map(slice, given.shape[1:]))] = given * np.float32(scaling)
            right[ranks] = other
            filled = ranks.stop
    return buffer


def _end(cfg: ModelConfig, place: AdapterPlace) -> int:
    """Where the next place may begin."""
    *units, width = param_specs(cfg)[place.name].shape
    step = _ALIGN_BYTES // 4
    return place.at + -(-place.rank * (math.prod(units) + width) // step) * step


def _aligned_zeros(count: int) -> np.ndarray:
    raw = np.zeros(4 * count + _ALIGN_BYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGN_BYTES
    return raw[start : start + 4 * count].view(np.float32)
