"""Records of stored contexts: the app, the tokens, and the origin of the cache."""

import dataclasses
import functools
import json
from collections.abc import Mapping, Set
from types import MappingProxyType

import numpy as np
import xxhash

from jaxllm.kv.codecs import RAW, STATE, ChunkFormat, ChunkShape
from jaxllm.kv.recompute import LOST

# Fields of an origin that follow from others, and from the kernels that read chunks.
_LAYOUT = ("heads", "head_width", "state_bytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """The origin of a context's keys and values, and their layout in chunks. Chunks are valid only for an
    equal origin.

    Attributes:
      model: fingerprint of the bundle, its tokenizer included.
      level: of the bundle, in percent.
      adapter: digest of the low-rank adapter; empty for none.
      codec: how chunks are stored.
      chunk_tokens: tokens of a chunk (C).
      dtype: of the cache.
      heads: kv heads in chunks of each layer: those of the level where native kernels read them, else those
        of the buckets' caches.
      head_width: of each head (H).
      state_bytes: of the states, where a model has state layers: its chunks have the attention layers alone,
        all in one blob (see `serving.contexts.state_chunks`). 0 of other models.
    """

    model: str
    level: int
    adapter: str
    codec: str
    chunk_tokens: int
    dtype: str
    heads: tuple[int, ...]
    head_width: int
    state_bytes: int = 0

    @functools.cached_property
    def layer_bytes(self) -> Mapping[int, tuple[int, ...]]:
        """Bytes of one chunk in each layer `[L]`, by width."""
        form = ChunkFormat.named(self.codec, self.chunk_tokens)
        sizes = [
            form.sizes(
                ChunkShape(heads=heads, tokens=self.chunk_tokens, width=self.head_width, dtype=self.dtype)
            )
            for heads in self.heads
        ]
        if self.state_bytes:
            whole = sum(each[RAW] for each in sizes)
            return MappingProxyType({RAW: (whole,), STATE: (whole + self.state_bytes,)})
        return MappingProxyType({bits: tuple(each[bits] for each in sizes) for bits in form.widths})

    def facts(self) -> dict[str, object]:
        """Its fields as JSON values."""
        facts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if not self.state_bytes:
            # Sources of chunks that were stored before stay as they are.
            del facts["state_bytes"]
        return {**facts, "heads": list(self.heads)}

    def differing(self, other: "Origin") -> tuple[str, ...]:
        """Names of the fields in which `other` differs; those of the layout where no other does."""
        names = [field.name for field in dataclasses.fields(self)]
        found = tuple(each for each in names if getattr(self, each) != getattr(other, each))
        return tuple(each for each in found if each not in _LAYOUT) or found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A stored context.

    Attributes:
      name: unique in the store.
      app: that owns it.
      origin: of its cache.
      tokens: all tokens of the context; whatever else is lost is computed again from them. Of an
        encoder-decoder those of its decoder.
      source: of an encoder-decoder, the tokens that its encoder reads: its first turn's.
      bits: width of each chunk in order, or `LOST`; tokens after the last chunk are computed again.
      state_tokens: where a model has state layers, the tokens that the states have gone through: the last
        chunk, of width `STATE`, has them; without it, or another chunk, all tokens are computed again. 0
        where there are none.
      mass: attention that the tokens of each chunk got so far.
      seen: the most attention they could have got (see `jaxllm.kv.tolerance`).
      files: name of each chunk's segment; empty where the chunk is lost.
      checksums: checksum of the index of each segment in `files`, and of `rows`, by name.
      rows: name of the file with the rows that stand in place of tokens, such as those of images (see
        `row_file`); empty for none. In `tokens` they have ids behind the vocabulary.
      pinned: whether its chunks are never evicted to make room for another context's.
      tokenizer: digest of the tokenizer whose ids `tokens` are; empty where that is not known, as of records
        of versions before 6.
      used: order of its last use in the store.
      created_s: when it was made, in whole seconds since 1970; 0 where that is not known, as of records of
        versions before 4.
    """

    name: str
    app: str
    origin: Origin
    tokens: tuple[int, ...] = ()
    source: tuple[int, ...] = ()
    bits: tuple[int, ...] = ()
    mass: tuple[float, ...] = ()
    seen: tuple[float, ...] = ()
    files: tuple[str, ...] = ()
    checksums: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rows: str = ""
    pinned: bool = False
    tokenizer: str = ""
    used: int = 0
    created_s: int = 0
    state_tokens: int = 0

    @property
    def cached_tokens(self) -> int:
        """How many tokens a cache has that all chunks are loaded into."""
        return self.state_tokens or len(self.bits) * self.origin.chunk_tokens

    @property
    def segments(self) -> tuple[str, ...]:
        """Names of the segments in `files`, sorted."""
        return tuple(sorted(set(self.files) - {""}))

    @property
    def own_files(self) -> set[str]:
        """Names of the files beside the record: segments and rows."""
        return {*self.files, self.rows} - {""}

    @functools.cached_property
    def sources(self) -> tuple[str, ...]:
        """A checksum per whole chunk of what its keys and values are computed from: the origin, the source if
        there is one, and all tokens up to the chunk's end."""
        size = self.origin.chunk_tokens
        rows = np.asarray(self.tokens[: len(self.tokens) // size * size], "<u4").reshape(-1, size)
        digest = xxhash.xxh3_64(json.dumps(self.origin.facts(), sort_keys=True).encode())
        if self.source:
            digest.update(np.asarray([len(self.source), *self.source], "<u4").tobytes())
        found = []
        for row in rows:
            digest.update(row.tobytes())
            found.append(digest.hexdigest())
        if self.state_tokens:
            whole = self.state_tokens // size
            digest = xxhash.xxh3_64(json.dumps(self.origin.facts(), sort_keys=True).encode())
            digest.update(np.asarray([STATE, *self.tokens[: self.state_tokens]], "<u4").tobytes())
            found[whole:] = [digest.hexdigest()]
        return tuple(found)

    def agrees(self, other: "Record") -> bool:
        """Whether chunks of this record are those of `other`, wherever they are stored."""
        return all(
            getattr(self, each) == getattr(other, each)
            for each in ("origin", "source", "tokens", "bits", "state_tokens")
        )

    def moved(self, origin: Origin) -> "Record":
        """This record with another origin: its tokens and rows alone, whose chunks are computed again."""
        return dataclasses.replace(self.cut(0), origin=origin, checksums=self._checksums_of({self.rows}))

    def cut(self, chunks: int) -> "Record":
        """This record with its first chunks; the tokens behind them are computed again: all where there are
        states, which are of all chunks."""
        state_tokens = self.state_tokens if chunks >= len(self.bits) else 0
        chunks = chunks if state_tokens == self.state_tokens else 0
        first = {field: getattr(self, field)[:chunks] for field in ("bits", "mass", "seen", "files")}
        return dataclasses.replace(self, state_tokens=state_tokens, **first)

    def restorable(self, vocab_size: int) -> "Record":
        """This record up to the first chunk that is lost and is not computed by itself: one with rows in
        place of tokens, behind which all are computed as a prompt is, with their rows; or any where there are
        states, which nothing but the first token gives again."""
        if self.state_tokens and LOST in self.bits:
            return self.cut(0)
        size = self.origin.chunk_tokens
        for place, bits in enumerate(self.bits):
            own = self.tokens[place * size : (place + 1) * size]
            if bits == LOST and max(own) >= vocab_size:
                return self.cut(place)
        return self

    def lose(self, chunks: Set[int]) -> "Record":
        """This record with some chunks marked as lost, to be computed again."""
        bits = tuple(LOST if place in chunks else each for place, each in enumerate(self.bits))
        files = tuple("" if place in chunks else each for place, each in enumerate(self.files))
        checksums = self._checksums_of({*files, self.rows})
        return dataclasses.replace(self, bits=bits, files=files, checksums=checksums)

    def _checksums_of(self, names: Set[str]) -> dict[str, str]:
        return {name: each for name, each in self.checksums.items() if name in names}

    def beside(self, resident: Mapping[int, int]) -> "Record":
        """This record with the widths of chunks that are in memory only, by number."""
        bits = tuple(resident.get(n, LOST) if each == LOST else each for n, each in enumerate(self.bits))
        return dataclasses.replace(self, bits=bits)
