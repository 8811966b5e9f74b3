"""Records of stored contexts: the app, the tokens, and the origin of the cache; and their JSON, typed,
limited and validated. And the tokens that a turn adds to a context: a user's text, or messages of a
conversation.

The first turn in a context of an encoder-decoder is its source, permanently; later turns are forced tokens
of its decoder.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import datetime
from types import MappingProxyType
from typing import Any, Unpack

import numpy as np
import xxhash

from jaxllm.config import ModelConfig
from jaxllm.contexts.codecs import CODECS, RAW, STATE, ChunkFormat, ChunkShape
from jaxllm.contexts.recompute import LOST
from jaxllm.errors import CheckpointError, ConfigError, TemplateError
from jaxllm.serving.contexts.layout import SEGMENT
from jaxllm.text.marked_text import PLACE
from jaxllm.text.prompts import Prompt, prompt_ids, reads_sources, source_prompt
from jaxllm.text.tokenizer import MAX_TOKEN_ID, ChatOptions, Tokenizer

# Chunk -> its segment, and the checksum of that.
Linked = Mapping[int, tuple[str, str]]
MAX_USED = 1 << 53
_MAX_BYTES = 1 << 26
_MAX_STATE_BYTES = 1 << 31
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
        return dataclasses.asdict(self)

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
        size, origin = self.origin.chunk_tokens, json.dumps(self.origin.facts(), sort_keys=True).encode()
        rows = np.asarray(self.tokens[: len(self.tokens) // size * size], "<u4").reshape(-1, size)
        digest = xxhash.xxh3_64(origin)
        if self.source:
            digest.update(np.asarray([len(self.source), *self.source], "<u4").tobytes())
        found = []
        for row in rows:
            digest.update(row.tobytes())
            found.append(digest.hexdigest())
        if self.state_tokens:
            inputs = np.asarray([STATE, *self.tokens[: self.state_tokens]], "<u4").tobytes()
            found[self.state_tokens // size :] = [xxhash.xxh3_64_hexdigest(origin + inputs)]
        return tuple(found)

    def agrees(self, other: "Record") -> bool:
        """Whether this record's chunks equal those of `other`, wherever they are stored."""
        fields = ("origin", "source", "tokens", "bits", "state_tokens")
        return all(getattr(self, each) == getattr(other, each) for each in fields)

    def moved(self, origin: Origin) -> "Record":
        """This record with another origin: its tokens and rows, without chunks."""
        return dataclasses.replace(self.cut(0), origin=origin, checksums=self._checksums_of({self.rows}))

    def cut(self, chunks: int, tokens: Sequence[int] | None = None) -> "Record":
        """This record with its first chunks, and perhaps other tokens: later ones are recomputed, and all of
        them if there are states, which cover all chunks."""
        if self.state_tokens and chunks < len(self.bits):
            chunks = 0
        first = {field: getattr(self, field)[:chunks] for field in ("bits", "mass", "seen", "files")}
        states = self.state_tokens if chunks else 0
        tokens = self.tokens if tokens is None else tuple(tokens)
        return dataclasses.replace(self, tokens=tokens, state_tokens=states, **first)

    def restorable(self, vocab_size: int, *, computes: bool) -> "Record":
        """This record up to the first lost chunk that cannot be recomputed between others: any unless the
        model `computes` such chunks, and one with prompt embeddings, from which on all are computed as a
        prompt, with their rows; or without chunks if states are lost, which can only be recomputed from the
        first token."""
        if self.state_tokens and LOST in self.bits:
            return self.cut(0)
        size = self.origin.chunk_tokens
        for place, bits in enumerate(self.bits):
            rows = max(self.tokens[place * size : (place + 1) * size]) >= vocab_size
            if bits == LOST and (rows or not computes):
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
        files = [*before.files, *[""] * len(self.bits)]
        return ["" if bits == LOST else file for bits, file in zip(self.bits, files, strict=False)]

    def lose(self, chunks: Set[int]) -> "Record":
        """This record with some chunks marked as lost, to be recomputed."""
        bits = tuple(LOST if place in chunks else each for place, each in enumerate(self.bits))
        files = tuple("" if place in chunks else each for place, each in enumerate(self.files))
        checksums = self._checksums_of({*files, self.rows})
        return dataclasses.replace(self, bits=bits, files=files, checksums=checksums)

    def _checksums_of(self, names: Set[str]) -> dict[str, str]:
        return {name: each for name, each in self.checksums.items() if name in names}


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
        if len(content) > _MAX_BYTES:
            raise ValueError(f"it has {len(content):,} bytes, and at most {_MAX_BYTES:,} are read")
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


def _is_text(value: Any) -> bool:
    return type(value) is str and len(value) <= 1 << 10 and value.isascii() and value.isprintable()


def _counts(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _is_attention(value: Any) -> bool:
    return type(value) is float and 0 <= value <= 1e18


def _is_segment(value: Any) -> bool:
    return type(value) is str and bool(SEGMENT.fullmatch(value))


def _rows(valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(valid, value))


_is_token, _is_size = _counts(0, MAX_TOKEN_ID), _counts(1, 1 << 16)
# Checks of fields by name; relations between fields are checked in `_record_of`.
_ORIGIN_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "model": _is_text,
    "level": _counts(1, 100),
    "adapter": _is_text,
    "codec": lambda value: isinstance(value, str) and (value == "raw" or value in CODECS),
    "chunk_tokens": _is_size,
    "dtype": lambda value: value in ("float32", "float16", "bfloat16", "int8"),
    "heads": lambda value: _rows(_counts(0, 1 << 16))(value) and 0 < len(value) <= 1 << 12,
    "head_width": lambda value: _is_size(value) and value % 4 == 0,
    "state_bytes": _counts(0, _MAX_STATE_BYTES),
}
_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "name": lambda value: type(value) is str,
    "app": lambda value: type(value) is str,
    "origin": lambda value: isinstance(value, dict),
    "tokens": _rows(_is_token),
    "source": _rows(_is_token),
    "bits": _rows(lambda value: type(value) is int),
    "mass": _rows(_is_attention),
    "seen": _rows(_is_attention),
    "files": _rows(lambda value: value == "" or _is_segment(value)),
    "checksums": lambda value: isinstance(value, dict) and all(map(_is_text, value.values())),
    "rows": lambda value: value == "" or _is_segment(value),
    "pinned": lambda value: type(value) is bool,
    "tokenizer": _is_text,
    "used": _counts(0, MAX_USED),
    "created_s": _counts(0, MAX_USED),
    "state_tokens": _counts(0, 1 << 53),
}


def _record_of(facts: Any, app: str, name: str) -> Record:
    """A record from any JSON value.

    Raises:
      ValueError: it is not a record of this context.
    """
    for part, fields in ((facts, _FIELDS), (facts["origin"], _ORIGIN_FIELDS)):
        _require("fields", isinstance(part, dict) and part.keys() == fields.keys())
        for field, valid in fields.items():
            _require(field, valid(part[field]))
    origin = Origin(**{**facts["origin"], "heads": tuple(facts["origin"]["heads"])})
    _require("state_bytes", not origin.state_bytes or origin.codec == "raw")
    _require("name", facts["name"] == name)
    _require("app", facts["app"] == app)
    lists = ("tokens", "source", "bits", "mass", "seen", "files")
    record = Record(**{**facts, "origin": origin, **{each: tuple(facts[each]) for each in lists}})
    count, tokens, states = len(record.bits), len(record.tokens), record.state_tokens
    _require("state_tokens", states <= tokens and (not states or bool(origin.state_bytes)))
    widths = ChunkFormat.named(origin.codec, origin.chunk_tokens).widths
    _require("bits", set(record.bits) <= {LOST, *widths, *((STATE,) if states else ())})
    if origin.state_bytes:
        _require("bits", count == (states // origin.chunk_tokens + 1 if states else 0))
        _require("bits", STATE not in record.bits[:-1] and record.bits[-1:] in ((), (LOST,), (STATE,)))
    else:
        _require("bits", count <= tokens // origin.chunk_tokens)
    for each in ("mass", "seen", "files"):
        _require(each, len(getattr(record, each)) == count)
    pairs = zip(record.bits, record.files, strict=True)
    _require("files", all((width == LOST) == (not file) for width, file in pairs))
    _require("rows", not record.rows or record.rows not in record.files)
    _require("checksums", record.checksums.keys() == record.own_files)
    return record


def _require(name: str, valid: bool) -> None:
    if not valid:
        raise ValueError(f"malformed {name}")


# The tokens of turns.


def turn_ids(
    tokenizer: Tokenizer,
    before: Sequence[int],
    prompt: str,
    instruction: str = "",
    *,
    now: datetime | None = None,
) -> list[int]:
    """The tokens that a user's turn adds to a context.

    Args:
      tokenizer: tokenizer of the model; its chat template, if any, writes the text between turns.
      before: the context's tokens, which end with an answer; empty before the first turn.
      prompt: the user's text.
      instruction: text before everything.
      now: time for templates.

    Raises:
      ConfigError: the prompt is empty, or an instruction comes after the first turn.
      TemplateError: the template is broken, or changes answers.
    """
    sourced = reads_sources(tokenizer)
    if not prompt.strip() and not (sourced and before):
        raise ConfigError("the prompt is empty; give it at least one word")
    chat = tokenizer.has_chat_template and not sourced
    if not before:
        form = "chat" if chat or instruction else "text"
        return prompt_ids(tokenizer, Prompt(user=prompt, system=instruction, form=form), now=now)
    if instruction:
        raise ConfigError("an instruction comes with the first prompt of a context; make a new context")
    if not chat:
        return tokenizer.encode(prompt, add_special_tokens=False)
    return _following_ids(tokenizer, before, [{"role": "user", "content": prompt}], now=now)


def conversation_turn_ids(
    tokenizer: Tokenizer,
    before: Sequence[int],
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    continue_final: bool | None = None,
    now: datetime | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> list[int]:
    """The tokens that messages add to a context.

    Args:
      tokenizer: tokenizer of a model with a chat template.
      before: see `turn_ids`.
      messages: JSON objects with a `role` and a `content`. Before the first turn any conversation; later
        results of tools, a user's message, or both in this order.
      tools: tools that the model may call, in OpenAI's format. They come with the first turn, as far as the
        template writes them before it; later turns may repeat them.
      continue_final: option of the first turn; see `Tokenizer.chat_text`.
      now: see `turn_ids`.
      template_options: see `Tokenizer.chat_text`.

    Raises:
      ConfigError: there is no chat template, the messages are not a turn, or a tool is not in the context.
      TemplateError: see `turn_ids`.
    """
    roles = [str(each.get("role")) for each in messages]
    named = ", ".join(roles)[:80] or "nobody"
    if reads_sources(tokenizer):
        if not before:
            return prompt_ids(tokenizer, source_prompt(messages, tools))
        text = messages[0].get("content") if roles == ["assistant"] else None
        if tools or not isinstance(text, str):
            raise ConfigError(
                "a context of an encoder-decoder has one source, its first turn's: send an assistant's "
                "message with what its answer goes on with, or make a new context for another source; got "
                f"messages of {named}{', and tools' if tools else ''}"
            )
        return tokenizer.encode(text, add_special_tokens=False)
    if not before:
        return tokenizer.encode_chat(
            messages,
            tools=tools,
            continue_final=continue_final,
            now=now,
            template_options=template_options,
        )
    results = roles[:-1] if roles[-1:] == ["user"] else roles
    if not roles or set(results) - {"tool"}:
        raise ConfigError(
            "a context has its instruction and earlier turns already: send a user's message, results of "
            f"tools, or these and then a user's message; got messages of {named}"
        )
    ids = _following_ids(tokenizer, before, messages, tools=tools, now=now, template_options=template_options)
    text = tokenizer.decode([*before, *ids], skip_special_tokens=False) if tools else ""
    for tool in tools:
        name = str(tool.get("function", tool).get("name"))
        if name not in text:
            raise ConfigError(
                f"the context does not know the tool {name!r:.80}: tools come with its first turn; make a "
                "new context for others"
            )
    return ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnTokens:
    """The tokens of a request in a context (see `Engine.request`).

    Attributes:
      prompt: the context's tokens and the turn's; for the first turn of an encoder-decoder its source.
      source: source of an encoder-decoder from the second turn on; else None.
      known: number of tokens of source and prompt that the context had before.
    """

    prompt: tuple[int, ...]
    source: tuple[int, ...] | None = None
    known: int = 0

    @classmethod
    def after(
        cls,
        record: Record,
        before: Sequence[int],
        turn: Sequence[int],
        tokenizer: Tokenizer,
        cfg: ModelConfig,
    ) -> "TurnTokens":
        """The tokens of a turn after the first tokens `before` of a context, whose model is `cfg`."""
        if cfg.encoder is None:
            return cls(prompt=(*before, *turn), known=len(before))
        if not before:
            return cls(prompt=tuple(turn))
        # Nothing follows an end token, with which the last answer may have ended.
        before = before[:-1] if before[-1] in tokenizer.eos_ids else before
        known = len(record.source) + len(before)
        return cls(prompt=(*before, *turn), source=record.source, known=known)

    @property
    def all_tokens(self) -> tuple[int, ...]:
        """All tokens, source first."""
        return (*(self.source or ()), *self.prompt)


def _following_ids(
    tokenizer: Tokenizer,
    before: Sequence[int],
    messages: Sequence[Mapping[str, Any]],
    **options: Unpack[ChatOptions],
) -> list[int]:
    """The tokens of messages that follow an answer."""
    turns = [{"role": "user", "content": PLACE}, {"role": "assistant", "content": PLACE}, *messages]
    text = tokenizer.chat_text(turns, **options)
    answer = text.text.find(PLACE, text.text.find(PLACE) + len(PLACE))
    if text.text.count(PLACE) < 2:
        raise TemplateError("the model's chat template does not repeat answers: give prompts as token ids")
    ids = tokenizer.encode(text.part(answer + len(PLACE)), add_special_tokens=False)
    # The template closes a turn with the token that ended the answer.
    return ids[1:] if ids[:1] == [before[-1]] and before[-1] in tokenizer.eos_ids else ids
