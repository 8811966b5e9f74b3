"""Records of stored contexts: the app, the tokens, and the origin of the cache; and their JSON, typed,
limited and validated."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping, Set
from types import MappingProxyType
from typing import Any

import numpy as np
import xxhash

from jaxllm.contexts.codecs import CODECS, RAW, STATE, ChunkFormat, ChunkShape
from jaxllm.contexts.recompute import LOST
from jaxllm.errors import CheckpointError
from jaxllm.text.tokenizer import MAX_TOKEN_ID

# Names of segments.
SEGMENT = re.compile(r"(0|[1-9][0-9]{0,8})\.kv")
# Chunk -> its segment, and the checksum of that.
Linked = Mapping[int, tuple[str, str]]
MOST_USED = 1 << 53
MOST_BYTES = 1 << 26
_MOST_TEXT = 1 << 10
_MOST_ATTENTION = 1e18
_MOST_STATE_BYTES = 1 << 31
_DTYPES = ("float32", "float16", "bfloat16")

# Fields of an origin that depend on others, and on the kernels that read chunks.
_LAYOUT = ("heads", "head_width", "state_bytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """The origin of a context's keys and values, and their layout in chunks. Chunks are valid only for an
    equal origin.

    Attributes:
      model: fingerprint of the bundle, including its tokenizer.
      level: level of the bundle, in percent.
      adapter: digest of the low-rank adapter; empty for none.
      codec: codec of the chunks.
      chunk_tokens: tokens of a chunk (C).
      dtype: dtype of the cache.
      heads: number of kv heads in chunks of each layer: the level's if native kernels read them, else those
        of the buckets' caches.
      head_width: size of each head (H).
      state_bytes: bytes of the states of a model with state layers, whose chunks have only the attention
        layers, all in one blob (see `jaxllm.serving.contexts.chunk_io`); 0 for other models.
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
        """The fields as JSON values."""
        facts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**facts, "heads": list(self.heads)}

    def differing(self, other: "Origin") -> tuple[str, ...]:
        """Names of the fields that differ from `other`; fields of the layout only if no others differ."""
        names = [field.name for field in dataclasses.fields(self)]
        found = tuple(each for each in names if getattr(self, each) != getattr(other, each))
        return tuple(each for each in found if each not in _LAYOUT) or found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A stored context.

    Attributes:
      name: name, unique in the store.
      app: owner of the context.
      origin: origin of its cache.
      tokens: all tokens of the context, from which everything else can be recomputed; for an
        encoder-decoder those of its decoder.
      source: source of an encoder-decoder: the tokens of its first turn.
      bits: width of each chunk in order, or `LOST`; tokens after the last chunk are recomputed.
      state_tokens: number of tokens that the states of a model with state layers have consumed: the last
        chunk, of width `STATE`, has them; if it or another chunk is missing, all tokens are recomputed. 0
        without states.
      mass: attention mass of the tokens of each chunk so far.
      seen: maximum possible attention mass (see `jaxllm.contexts.tolerance`).
      files: name of each chunk's segment; empty for a lost chunk.
      checksums: checksum of the index of each segment in `files`, and of `rows`, by name.
      rows: name of the file with prompt embeddings, such as those of images (see `segment`); empty for
        none. In `tokens` they have ids beyond the vocabulary.
      pinned: whether its chunks are never evicted for another context's.
      tokenizer: digest of the tokenizer of `tokens`; empty if unknown.
      used: order of its last use in the store.
      created_s: creation time in whole seconds since 1970.
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
        """Number of tokens in a cache after loading all chunks."""
        return self.state_tokens or len(self.bits) * self.origin.chunk_tokens

    @property
    def segments(self) -> tuple[str, ...]:
        """Names of the segments in `files`, sorted."""
        return tuple(sorted(set(self.files) - {""}))

    @property
    def own_files(self) -> set[str]:
        """Names of the context's files: segments and rows."""
        return {*self.files, self.rows} - {""}

    @functools.cached_property
    def sources(self) -> tuple[str, ...]:
        """A checksum per whole chunk of its inputs: the origin, the source if there is one, and all tokens
        up to the chunk's end."""
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
        """Whether this record's chunks equal those of `other`, wherever they are stored."""
        return all(
            getattr(self, each) == getattr(other, each)
            for each in ("origin", "source", "tokens", "bits", "state_tokens")
        )

    def moved(self, origin: Origin) -> "Record":
        """This record with another origin: its tokens and rows, without chunks."""
        return dataclasses.replace(self.cut(0), origin=origin, checksums=self._checksums_of({self.rows}))

    def cut(self, chunks: int) -> "Record":
        """This record with its first chunks; later tokens are recomputed, and all tokens if there are states,
        which cover all chunks."""
        state_tokens = self.state_tokens if chunks >= len(self.bits) else 0
        chunks = chunks if state_tokens == self.state_tokens else 0
        first = {field: getattr(self, field)[:chunks] for field in ("bits", "mass", "seen", "files")}
        return dataclasses.replace(self, state_tokens=state_tokens, **first)

    def restorable(self, vocab_size: int) -> "Record":
        """This record up to the first lost chunk that cannot be recomputed between others: one with prompt
        embeddings, from which on all are computed as a prompt, with their rows; or any with states, which can
        only be recomputed from the first token."""
        if self.state_tokens and LOST in self.bits:
            return self.cut(0)
        size = self.origin.chunk_tokens
        for place, bits in enumerate(self.bits):
            own = self.tokens[place * size : (place + 1) * size]
            if bits == LOST and max(own) >= vocab_size:
                return self.cut(place)
        return self

    def with_links(self, linked: Linked) -> "Record":
        """This record with linked chunks."""
        count = max([len(self.files), *(n + 1 for n in linked)])
        files = [*self.files, *[""] * (count - len(self.files))]
        for n, (file, _) in linked.items():
            files[n] = file
        checksums = {**self.checksums, **dict(linked.values())}
        return dataclasses.replace(self, files=tuple(files), checksums=checksums)

    def kept_files(self, before: "Record") -> list[str]:
        """The segment of each chunk, as in the record before; empty for new or lost chunks."""
        there = [*before.files, *[""] * len(self.bits)]
        return ["" if bits == LOST else file for bits, file in zip(self.bits, there, strict=False)]

    def lose(self, chunks: Set[int]) -> "Record":
        """This record with some chunks marked as lost, to be recomputed."""
        bits = tuple(LOST if place in chunks else each for place, each in enumerate(self.bits))
        files = tuple("" if place in chunks else each for place, each in enumerate(self.files))
        checksums = self._checksums_of({*files, self.rows})
        return dataclasses.replace(self, bits=bits, files=files, checksums=checksums)

    def _checksums_of(self, names: Set[str]) -> dict[str, str]:
        return {name: each for name, each in self.checksums.items() if name in names}

    def beside(self, resident: Mapping[int, int]) -> "Record":
        """This record with the widths of chunks that are only in memory, by number."""
        bits = tuple(resident.get(n, LOST) if each == LOST else each for n, each in enumerate(self.bits))
        return dataclasses.replace(self, bits=bits)


_FIELDS = frozenset(field.name for field in dataclasses.fields(Record))
_ORIGIN_FIELDS = frozenset(field.name for field in dataclasses.fields(Origin))


def encoded(record: Record) -> bytes:
    """A record as JSON.

    Raises:
      CheckpointError: it could not be read again.
    """
    # Not `asdict`, which copies every token.
    facts = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    facts |= {"origin": record.origin.facts(), "checksums": dict(record.checksums)}
    try:
        content = json.dumps(facts, separators=(",", ":"), sort_keys=True, allow_nan=False).encode()
        if len(content) > MOST_BYTES:
            raise ValueError(f"it has {len(content):,} bytes, and at most {MOST_BYTES:,} are read")
        _record_of(json.loads(content), record.app, record.name)
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"the context {record.name} cannot be kept: its record could not be read again ({error})"
        ) from error
    return content


def decoded(content: bytes, app: str, name: str) -> Record:
    """Parses the record of an app's context; typed, limited and validated.

    Raises:
      CheckpointError: it is malformed.
    """
    try:
        return _record_of(json.loads(content), app, name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"the record of the context {name} is malformed ({error!s:.120})") from error


def _record_of(facts: Any, app: str, name: str) -> Record:
    """A record from any JSON value.

    Raises:
      ValueError: it is not a record of this context.
    """
    _require("fields", isinstance(facts, dict) and facts.keys() == _FIELDS)
    _require("name", facts["name"] == name)
    _require("app", type(facts["app"]) is str and facts["app"] == app)
    origin = _origin_of(facts["origin"])
    form = ChunkFormat.named(origin.codec, origin.chunk_tokens)
    tokens, source = (_row(facts, name, _is_token) for name in ("tokens", "source"))
    state_tokens = facts["state_tokens"]
    _require("state_tokens", type(state_tokens) is int and 0 <= state_tokens <= len(tokens))
    _require("state_tokens", not state_tokens or bool(origin.state_bytes))
    widths = (LOST, *form.widths, *((STATE,) if state_tokens else ()))
    bits = _row(facts, "bits", lambda each: type(each) is int and each in widths)
    count = len(bits)
    if origin.state_bytes:
        _require("bits", count == (state_tokens // origin.chunk_tokens + 1 if state_tokens else 0))
        _require("bits", STATE not in bits[:-1] and bits[-1:] in ((), (LOST,), (STATE,)))
    else:
        _require("bits", count <= len(tokens) // origin.chunk_tokens)
    mass = _row(facts, "mass", _is_attention, count)
    seen = _row(facts, "seen", _is_attention, count)
    files = _row(facts, "files", lambda each: each == "" or _is_segment(each), count)
    _require("files", all((width == LOST) == (not file) for width, file in zip(bits, files, strict=True)))
    checksums, rows = facts["checksums"], facts["rows"]
    _require("rows", rows == "" or (_is_segment(rows) and rows not in files))
    _require("checksums", isinstance(checksums, dict) and checksums.keys() == {*files, rows} - {""})
    _require("checksums", all(_is_text(each) for each in checksums.values()))
    _require("tokenizer", _is_text(facts["tokenizer"]))
    _require("pinned", type(facts["pinned"]) is bool)
    for key in ("used", "created_s"):
        _require(key, type(facts[key]) is int and 0 <= facts[key] <= MOST_USED)
    return Record(
        name=name, app=facts["app"], origin=origin, tokens=tokens, source=source, bits=bits, mass=mass,
        seen=seen, files=files, checksums=checksums, rows=rows, pinned=facts["pinned"],
        tokenizer=facts["tokenizer"], used=facts["used"],
        created_s=facts["created_s"], state_tokens=state_tokens,
    )  # fmt: skip


def _origin_of(facts: Any) -> Origin:
    _require("origin", isinstance(facts, dict))
    _require("origin", facts.keys() == _ORIGIN_FIELDS)
    _require("model", _is_text(facts["model"]))
    _require("adapter", _is_text(facts["adapter"]))
    _require("level", _is_count(facts["level"], 100))
    _require("codec", type(facts["codec"]) is str and facts["codec"] in ("raw", *CODECS))
    _require("chunk_tokens", _is_count(facts["chunk_tokens"], 1 << 16))
    _require("dtype", type(facts["dtype"]) is str and facts["dtype"] in _DTYPES)
    heads = _row(facts, "heads", lambda each: _is_count(each, 1 << 16))
    _require("heads", 0 < len(heads) <= 1 << 12)
    _require("head_width", _is_count(facts["head_width"], 1 << 16) and facts["head_width"] % 4 == 0)
    state_bytes = facts["state_bytes"]
    _require("state_bytes", type(state_bytes) is int and 0 <= state_bytes <= _MOST_STATE_BYTES)
    _require("state_bytes", not state_bytes or facts["codec"] == "raw")
    return Origin(**{**facts, "heads": heads})


def _row(
    facts: Mapping[str, Any], name: str, good: Callable[[Any], bool], count: int | None = None
) -> tuple[Any, ...]:
    row = facts[name]
    _require(name, isinstance(row, list) and count in (None, len(row)) and all(map(good, row)))
    return tuple(row)


def _require(name: str, good: bool) -> None:
    if not good:
        raise ValueError(f"malformed {name}")


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKEN_ID


def _is_segment(name: Any) -> bool:
    return type(name) is str and bool(SEGMENT.fullmatch(name))


def _is_text(text: Any) -> bool:
    return type(text) is str and len(text) <= _MOST_TEXT and text.isascii() and text.isprintable()


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 1 <= value <= most


def _is_attention(value: Any) -> bool:
    return type(value) is float and 0 <= value <= _MOST_ATTENTION
