"""What is known of a stored context besides its chunks: whose it is, its tokens, and what made its cache."""

import dataclasses
import functools
import json
from collections.abc import Mapping, Set
from types import MappingProxyType

import numpy as np
import xxhash

from jaxllm.errors import ContextGone
from jaxllm.kv.codecs import ChunkFormat, ChunkShape
from jaxllm.kv.recompute import LOST


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """What made a context's keys and values, and how they lie in chunks: they are of no use to anything else.

    Attributes:
      model: fingerprint of the bundle, its tokenizer included.
      level: of the bundle, in percent.
      adapter: name of the low-rank adapter; empty for none.
      codec: how chunks are stored.
      chunk_tokens: of each.
      dtype: of the cache.
      heads: of each layer, the kv heads that chunks hold: those of the level where native kernels read them,
        else those of the buckets' caches.
      head_width: of each head.
    """

    model: str
    level: int
    adapter: str
    codec: str
    chunk_tokens: int
    dtype: str
    heads: tuple[int, ...]
    head_width: int

    @functools.cached_property
    def layer_bytes(self) -> Mapping[int, tuple[int, ...]]:
        """Of one chunk in each layer `[L]`, by width."""
        form = ChunkFormat.named(self.codec, self.chunk_tokens)
        sizes = [
            form.sizes(
                ChunkShape(heads=heads, tokens=self.chunk_tokens, width=self.head_width, dtype=self.dtype)
            )
            for heads in self.heads
        ]
        return MappingProxyType({bits: tuple(each[bits] for each in sizes) for bits in form.widths})

    def facts(self) -> dict[str, object]:
        """Its fields, as JSON has them."""
        facts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**facts, "heads": list(self.heads)}

    def require(self, other: "Origin", name: str) -> None:
        """Checks that `other` made it too.

        Raises:
          ContextGone: it did not; the message names what differs.
        """
        ours, theirs = self.facts(), other.facts()
        differing = [each for each in ours if ours[each] != theirs[each]]
        if differing:
            facts = ", ".join(f"{each} {ours[each]!s:.40} (here {theirs[each]!s:.40})" for each in differing)
            raise ContextGone(
                f"the context {name} is of another model or of other settings: {facts}; open it with those, "
                "or delete it"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A stored context.

    Attributes:
      name: unique in the store.
      app: whose it is.
      origin: what made its cache.
      tokens: all of it, as text of last resort: whatever else is lost can be computed again from them.
      bits: of each chunk in order, or `LOST`; tokens behind the last chunk are computed again.
      mass: of each chunk, the attention that its tokens got so far, and
      seen: how much they could have got (see `jaxllm.kv.tolerance`).
      files: of each chunk, the name of the segment that holds it; empty where it is lost.
      tables: of each segment that holds some chunk, the checksum of its table.
      pinned: never evicted to make room for another app's.
      used: counts up with every use in the store.
    """

    name: str
    app: str
    origin: Origin
    tokens: tuple[int, ...] = ()
    bits: tuple[int, ...] = ()
    mass: tuple[float, ...] = ()
    seen: tuple[float, ...] = ()
    files: tuple[str, ...] = ()
    tables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pinned: bool = False
    used: int = 0

    @property
    def segments(self) -> tuple[str, ...]:
        """The segments that hold some chunk."""
        return tuple(sorted(set(self.files) - {""}))

    @functools.cached_property
    def sources(self) -> tuple[str, ...]:
        """Of each whole chunk a checksum of what its keys and values are computed from: the origin, and all
        tokens up to the chunk's end."""
        size = self.origin.chunk_tokens
        rows = np.asarray(self.tokens[: len(self.tokens) // size * size], "<u4").reshape(-1, size)
        digest = xxhash.xxh3_64(json.dumps(self.origin.facts(), sort_keys=True).encode())
        found = []
        for row in rows:
            digest.update(row.tobytes())
            found.append(digest.hexdigest())
        return tuple(found)

    def lose(self, chunks: Set[int]) -> "Record":
        """This context with some chunks to be computed again."""
        bits = tuple(LOST if place in chunks else each for place, each in enumerate(self.bits))
        files = tuple("" if place in chunks else each for place, each in enumerate(self.files))
        tables = {name: each for name, each in self.tables.items() if name in files}
        return dataclasses.replace(self, bits=bits, files=files, tables=tables)

    def beside(self, resident: Mapping[int, int]) -> "Record":
        """This context with the widths of those chunks that are in memory alone, by number."""
        bits = tuple(resident.get(n, LOST) if each == LOST else each for n, each in enumerate(self.bits))
        return dataclasses.replace(self, bits=bits)
