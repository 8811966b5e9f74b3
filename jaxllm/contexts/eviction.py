"""Eviction policies: the order in which chunks of contexts are evicted.

A policy orders the evictable chunks, and defines whether contexts are evicted as a whole. A new policy is a
function and its line in `POLICIES`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import numpy as np

from jaxllm.contexts.codecs import RAW, STATE
from jaxllm.errors import ConfigError


@dataclasses.dataclass(kw_only=True, eq=False, slots=True)
class Resident:
    """A chunk in memory. Mutable, and only `used` changes: a context has a hundred of them, and replacing
    them at each call would cost part of a switch's time.

    Attributes:
      chunk: its number in the context.
      bits: its width, or `RAW`.
      blobs: blob of each layer, uint8 `[bytes]`.
      size_bytes: size of all blobs.
      came: order of arrival in memory.
      used: order of the last use of its context.
      restore_ms: time to restore it after an eviction; 0 if unknown.
    """

    context: str
    chunk: int
    bits: int
    blobs: tuple[np.ndarray, ...]
    size_bytes: int
    came: int
    used: int
    restore_ms: float = 0.0


@dataclasses.dataclass(frozen=True)
class Policy:
    """An eviction policy.

    Attributes:
      order: sorts evictable chunks, first evicted first.
      whole: whether a chunk is evicted with all chunks of its context, which `order` puts next to each other.
    """

    order: Callable[[Iterable[Resident]], list[Resident]]
    whole: bool = False


def fifo(chunks: Iterable[Resident]) -> list[Resident]:
    """First in, first out."""
    return sorted(chunks, key=lambda each: each.came)


def lru(chunks: Iterable[Resident]) -> list[Resident]:
    """Least recently used; of one context the last chunks first, because later chunks depend on earlier
    ones."""
    return sorted(chunks, key=lambda each: (each.used, -each.chunk))


def lctru(chunks: Iterable[Resident]) -> list[Resident]:
    """Least compression-tolerable and least recently used (LLMS, section 3.4): a queue per width, the widest
    first, each by use.

    Wide chunks free the most memory each, so that the most chunks per byte stay.
    """
    return sorted(chunks, key=lambda each: (-_width(each), each.used, -each.chunk))


def cost_aware(chunks: Iterable[Resident]) -> list[Resident]:
    """Cheapest to restore per byte, weighed by the time since the last use (as GreedyDual-Size does)."""
    chunks = list(chunks)
    newest = max((each.used for each in chunks), default=0)

    def worth(each: Resident) -> tuple[float, int, int]:
        return (each.restore_ms / each.size_bytes / (1 + newest - each.used), each.used, -each.chunk)

    return sorted(chunks, key=worth)


def whole_contexts(chunks: Iterable[Resident]) -> list[Resident]:
    """All chunks of the least recently used context, then of the next, like systems without chunks."""
    return sorted(chunks, key=lambda each: (each.used, each.context, each.chunk))


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "lctru": Policy(lctru),
        "lru": Policy(lru),
        "fifo": Policy(fifo),
        "cost-aware": Policy(cost_aware),
        "whole-contexts": Policy(whole_contexts, whole=True),
    }
)


def find_policy(name: str) -> Policy:
    """The policy of a name.

    Raises:
      ConfigError: no policy has this name.
    """
    if name not in POLICIES:
        raise ConfigError(f"no eviction policy {name!r:.80}; there are {', '.join(POLICIES)}")
    return POLICIES[name]


def _width(chunk: Resident) -> int:
    """Bits of a chunk; unquantized chunks are wider than all others."""
    return 1 << 10 if chunk.bits in (RAW, STATE) else chunk.bits
