"""Which chunks leave memory first: the policies of `memory.ChunkMemory`.

A policy orders what may go, and says whether contexts leave whole. Adding one is a function and its line in
`POLICIES`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.kv.codecs import RAW


@dataclasses.dataclass(kw_only=True, eq=False, slots=True)
class Resident:
    """A chunk in memory. Only `used` changes while it is there: a context that is called has a hundred of
    them, and making them anew takes part of a switch's time.

    Attributes:
      context: name of its context.
      chunk: its number there.
      bits: its width, or `RAW`.
      blobs: of each layer, uint8 `[bytes]`.
      size_bytes: of all blobs.
      came: counts up with every chunk that comes into memory.
      used: counts up with every use of a context; the last one of its.
      restore_ms: what bringing it back would take; 0 where nobody knows.
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
    """What leaves memory, and in which order.

    Attributes:
      order: of what may leave; those that leave first come first.
      whole: with a chunk goes all of its context, which `order` has in a row.
    """

    order: Callable[[Iterable[Resident]], list[Resident]]
    whole: bool = False


def fifo(chunks: Iterable[Resident]) -> list[Resident]:
    """First in, first out."""
    return sorted(chunks, key=lambda each: each.came)


def lru(chunks: Iterable[Resident]) -> list[Resident]:
    """Least recently used; of one context the last chunks first, for what follows needs those before."""
    return sorted(chunks, key=lambda each: (each.used, -each.chunk))


def lctru(chunks: Iterable[Resident]) -> list[Resident]:
    """Least compression-tolerable and least recently used (LLMS, section 3.4): a queue per width, the widest
    first, each by use.

    Wide chunks free most memory each, and what is left in memory is the most of contexts per byte.
    """
    return sorted(chunks, key=lambda each: (-_width(each), each.used, -each.chunk))


def cost_aware(chunks: Iterable[Resident]) -> list[Resident]:
    """What is cheapest to bring back per byte that it frees, weighed by how lately it was used (as
    GreedyDual-Size does)."""
    chunks = list(chunks)
    newest = max((each.used for each in chunks), default=0)

    def worth(each: Resident) -> tuple[float, int, int]:
        return (each.restore_ms / each.size_bytes / (1 + newest - each.used), each.used, -each.chunk)

    return sorted(chunks, key=worth)


def whole_contexts(chunks: Iterable[Resident]) -> list[Resident]:
    """All of the least recently used context, then of the next: what a system that knows no chunks does."""
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
      ConfigError: there is none.
    """
    if name not in POLICIES:
        raise ConfigError(f"no eviction policy {name!r:.80}; there are {', '.join(POLICIES)}")
    return POLICIES[name]


def _width(chunk: Resident) -> int:
    """Bits of a chunk, those of a raw one more than all others."""
    return 1 << 10 if chunk.bits == RAW else chunk.bits
