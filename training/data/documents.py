"""Reads documents to train on, plain texts and chats, and splits them into training and held-out sets.

A document is a sequence of pieces, each a text or a special token; the first few are the prompt. Two rules
make runs reproducible:

- only the content that a document was made from decides whether it is trained on or held out: copies of a
  text and its other forms (a story, and the request to tell it) are never on both sides, and the order of
  the files does not matter;
- a special token's name inside a text stays text.

Conversations, prompts with completions, and texts for tuning come from JSON lines or parquet. Each line, or
row, is an object of one of these forms; of the first two only answers are learned:

    {"messages": [{"role": "system" | "user" | "assistant" | "tool", "content": TEXT}, ...], "tools": [...]}
    {"prompt": TEXT, "completion": TEXT}     a text to continue, without a chat template
    {"prompt": [MESSAGE, ...], "completion": [MESSAGE, ...]}
    {"text": TEXT}                           all of it is learned

Each answer of a conversation becomes a document, after all messages before it; answers of `"weight": 0` are
not learned. All of a conversation's documents belong to one side of the split. `tools`, which a
conversation may have, are for the model's chat template, and so are an assistant's `tool_calls` and
`reasoning_content`, and a result's `name` and `tool_call_id`, as in OpenAI's format. Other keys of a message
are rejected, and so are those of an object that would change what is learned; others (ids, sources) are
ignored with a line in the log.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import xxhash

from jaxllm.elastic.slo import marks
from jaxllm.errors import ConfigError
from jaxllm.tasks.example import TaskExample, pseudo_random, text_field
from jaxllm.text.droppable import free_spans
from jaxllm.training.data.sources import open_bytes, open_text

# The special tokens come first, with the same ids in every vocabulary: the ends of documents and turns, the
# roles of a chat, and the marks that write a latency objective into a prompt (`jaxllm.elastic.slo`):
# `<|ttft:40|>` requests a time to first token of 40 % of the whole model's.
END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
END_OF_TURN = "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, PAD, SYSTEM, USER, ASSISTANT, END_OF_TURN, *marks())

# How a chat is written with these tokens.
ROLE_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def model_digest(config: Any, *params: Mapping[str, Any]) -> str:
    """Returns a hexadecimal digest of a model and its extra arrays.

    Args:
      config: frozen dataclass, or JSON of such.
      params: dicts of arrays by name, in any format of weights.
    """
    digest = xxhash.xxh3_128(json.dumps(config, sort_keys=True, default=dataclasses.asdict).encode())
    for each in params:
        for name in sorted(each):
            digest.update(name.encode())
            for part in jax.tree.leaves(each[name]):
                digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def digesting(
    tensors: Iterable[tuple[str, np.ndarray]], digests: dict[str, str]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors unchanged, and puts their digests into `digests` by name."""
    for name, value in tensors:
        whole = np.ascontiguousarray(value)
        digests[name] = xxhash.xxh3_128_hexdigest(whole.reshape(-1).view(np.uint8).data)
        yield name, value


class Message(NamedTuple):
    """A message of a conversation.

    Attributes:
      more: keys for the model's chat template, as JSON; empty for none.
    """

    role: str
    content: str
    more: str = ""

    def plain(self) -> dict[str, Any]:
        """The message for a chat template."""
        return {"role": self.role, "content": self.content, **json.loads(self.more or "{}")}


# A document without an end would have to fit in memory.
MAX_DOCUMENT_CHARACTERS = 1 << 26
_READ_CHARACTERS = 1 << 20


@dataclasses.dataclass(frozen=True)
class Special:
    """A special token, as opposed to a text with the same characters."""

    token: str


@dataclasses.dataclass(frozen=True)
class Document:
    """Document: source of one row of tokens.

    Attributes:
      pieces: texts and special tokens, in order.
      prompt_pieces: number of pieces of the prompt; the others are the answer.
      example: question that the document was made from, for models with a chat template of their own.
      origin: text that the document was made from, if other documents may be made from it, too.
      messages: messages of a conversation of any length; the last one is the answer.
      tools: tools that the conversation may call, as JSON; empty for none.
    """

    pieces: tuple[str | Special, ...]
    prompt_pieces: int = 0
    example: TaskExample | None = None
    origin: str | None = None
    messages: tuple[Message, ...] = ()
    tools: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """The text pieces."""
        return tuple(piece for piece in self.pieces if isinstance(piece, str))

    def digest(self) -> bytes:
        """Names its content: 16 bytes."""
        if not self.prompt_pieces and len(self.texts) == 1:
            return _digest(self.texts[0])
        more = [each.more for each in self.messages if each.more]
        return _digest(repr((self.pieces, self.prompt_pieces, *([self.tools] if self.tools else []), *more)))

    def origin_digest(self) -> bytes:
        """Digest of the origin, in 16 bytes: the same for all forms of one text."""
        return self.digest() if self.origin is None else _digest(self.origin)


def text_document(text: str) -> Document:
    """Returns a plain text that is learned completely."""
    return Document((text, Special(END_OF_TEXT)))


def chat_document(example: TaskExample, origin: str | None = None) -> Document:
    """A question and its answer as `ROLE_TEMPLATE` writes them, or as one text."""
    if example.form == "text":
        pieces = (example.user, example.answer, Special(END_OF_TEXT))
        return Document(pieces, prompt_pieces=1, example=example, origin=origin)
    end = Special(END_OF_TURN)
    system = (Special(SYSTEM), example.system, end) if example.system else ()
    prompt = (*system, Special(USER), example.user, end, Special(ASSISTANT))
    pieces = (*prompt, example.answer, end)
    return Document(pieces, prompt_pieces=len(prompt), example=example, origin=origin)


def conversation_document(messages: tuple[Message, ...], origin: str, tools: str = "") -> Document:
    """An answer, the last message, after those before it, as `ROLE_TEMPLATE` writes them; that has no place
    for tools and their results."""
    tokens = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": USER}
    end = Special(END_OF_TURN)
    turns = [part for each in messages for part in (Special(tokens[each.role]), each.content, end)]
    return Document(tuple(turns), len(turns) - 2, origin=origin, messages=messages, tools=tools)


def read_texts(path: Path | str) -> Iterator[str]:
    """Yields the texts of a UTF-8 file, in order, stripped, without empty ones, while it is read.

    A file that contains `<|endoftext|>` is split there; any other at its blank lines, so one without blank
    lines is one text.

    Raises:
      ConfigError: the file cannot be read as UTF-8.
    """
    try:
        with open_text(path) as file:
            marked = any(END_OF_TEXT in part for part in _overlapping(file.read))
            file.seek(0)
            yield from _marked_texts(file.read) if marked else _paragraphs(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the text file {path} as UTF-8: {error}") from error


def held_out_digests(digests: Iterable[bytes], share: float) -> frozenset[bytes]:
    """Returns digests of the held-out documents: the smallest `share` of the distinct ones, rounded up.

    Raises:
      ConfigError: there are fewer than two distinct documents.
    """
    distinct = sorted(set(digests))
    if len(distinct) < 2:
        raise ConfigError(
            "training needs at least two distinct documents, one of them held out, got "
            f"{len(distinct)}; separate documents by {END_OF_TEXT} or by blank lines"
        )
    return frozenset(distinct[: min(math.ceil(len(distinct) * share), len(distinct) - 1)])


def documents_digest(digests: Iterable[bytes]) -> str:
    """A hexadecimal name for a sequence of documents."""
    return hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()


def _digest(content: str) -> bytes:
    return hashlib.blake2b(content.encode(), digest_size=16).digest()


def _overlapping(read: Callable[[int], str]) -> Iterator[str]:
    """Reads a file in parts, each with the end of the previous one, so that no marker is cut in two."""
    tail = ""
    while part := read(_READ_CHARACTERS):
        tail += part
        yield tail
        tail = tail[-len(END_OF_TEXT) :]


def _marked_texts(read: Callable[[int], str]) -> Iterator[str]:
    rest = ""
    while part := read(_READ_CHARACTERS):
        *whole, rest = (rest + part).split(END_OF_TEXT)
        yield from _stripped(whole)
        _require_bounded(rest)
    yield from _stripped([rest])


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    kept: list[str] = []
    size = 0
    for line in lines:
        # A blank line may contain spaces.
        if line.strip():
            kept.append(line)
            size += len(line)
            if size > MAX_DOCUMENT_CHARACTERS:
                _require_bounded("".join(kept))
        elif kept:
            yield "".join(kept).strip()
            kept, size = [], 0
    yield from _stripped(["".join(kept)])


def _stripped(texts: Sequence[str]) -> Iterator[str]:
    return (text.strip() for text in texts if text.strip())


def _require_bounded(text: str) -> None:
    if len(text) > MAX_DOCUMENT_CHARACTERS:
        raise ConfigError(
            f"a document has more than {MAX_DOCUMENT_CHARACTERS:,} characters; separate documents by "
            f"{END_OF_TEXT} or by blank lines"
        )


# Minimum share of the droppable words that stays, as in the shortest prompt that a service makes.
LEAST_SHARE = 0.2
# White space belongs to the word after it, as in `jaxllm.elastic.compression`.
_WORD = re.compile(r"\s*\S+")


def shortened_document(document: Document, share: float) -> Document:
    """Returns a document; a `share` of the questions with options lose words.

    The choice of questions and words follows from the question only.

    Args:
      document: document of an example; any other is returned unchanged.
      share: share in [0, 1] of the questions that lose words.
    """
    example = document.example
    if example is None or not example.options or pseudo_random(f"shortened\0{example.user}") >= share:
        return document
    kept = LEAST_SHARE + (1 - LEAST_SHARE) * pseudo_random(f"kept\0{example.user}")
    return chat_document(with_fewer_words(example, kept), origin=document.origin)


def with_fewer_words(example: TaskExample, share: float) -> TaskExample:
    """Returns a question with about a `share` of its droppable words (see `free_spans`), sampled at random.

    At least one word of the user's text stays.
    """
    user = example.user
    spans = free_spans(user, goes_on=example.form == "text")
    words = [found.span() for first, last in spans for found in _WORD.finditer(user, first, last)]
    draws = [pseudo_random(f"{place}\0{user}") for place in range(len(words))]
    gone = [word for word, draw in zip(words, draws, strict=True) if draw >= share]
    left = _without(user, gone)
    if not left.strip():
        luckiest = words[draws.index(min(draws))]
        left = _without(user, [word for word in gone if word != luckiest])
    return dataclasses.replace(example, user=left)


def _without(text: str, spans: list[tuple[int, int]]) -> str:
    """A text without some characters, `[first, last)` each, ascending."""
    edges = [0, *(place for span in spans for place in span), len(text)]
    return "".join(text[first:last] for first, last in zip(edges[::2], edges[1::2], strict=True))


ROLES = ("system", "user", "assistant", "tool")
_MESSAGE_KEYS = frozenset({"role", "content", "weight"})
# Keys for chat templates, by role.
_MORE_KEYS = {"assistant": ("tool_calls", "reasoning_content"), "tool": ("name", "tool_call_id")}
# Keys of an object by which other trainers change what the model sees or learns.
_REFUSED_KEYS = frozenset(
    {
        "chat_template", "chat_template_kwargs", "documents", "enable_thinking", "function_call", "functions",
        "images", "parallel_tool_calls", "reasoning_content", "response_format", "system", "thinking",
        "tool_choice", "videos", "weight",
    }
)  # fmt: skip
_log = logging.getLogger("jaxllm")
OnBad = Callable[[str], None]
PARQUET = ".parquet"
# Number of rows in memory at once.
_PARQUET_ROWS = 1024
# Numbers of lines or rows, each with a function that parses it.
_Records = Iterator[tuple[int, Callable[[], Any]]]


def read_chats(path: Path | str, on_bad: OnBad | None = None) -> Iterator[Document]:
    """Reads the documents of a file of JSON lines, or of a `.parquet` file whose columns are the keys (see
    the module docstring); blank lines are skipped.

    Args:
      on_bad: callback for the error of a malformed line, which is then left out; None raises instead.

    Raises:
      ConfigError: the file cannot be read, or a line is malformed: the message has its number, from 1.
    """
    if str(path).endswith(PARQUET):
        kind, records = "row", _parquet_rows(path)
    else:
        kind, records = "line", _json_lines(path)
    reported: set[str] = set()
    for number, record in records:
        try:
            parsed = record()
            documents = list(documents_of(parsed))
        except (ValueError, RecursionError, ConfigError) as error:
            wrong = f"{path}, {kind} {number}: {error}"
            if on_bad is None:
                raise ConfigError(
                    f"{wrong}; mend the {kind}, or leave such lines out (--skip-bad)"
                ) from error
            on_bad(wrong)
            continue
        read = {"messages", "tools"} if "messages" in parsed else {"prompt", "completion"}
        if not read & parsed.keys():
            read = {"text"}
        for key in sorted(parsed.keys() - read - reported):
            reported.add(key)
            _say_ignored(str(path), key)
        yield from documents


@functools.cache
def _say_ignored(path: str, key: str) -> None:
    """Once, though files are read several times."""
    _log.warning("%s: the key %.80r of its lines is ignored", path, key)


def _json_lines(path: Path | str) -> _Records:
    try:
        with open_text(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, functools.partial(json.loads, line)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the file {path} as UTF-8: {error}") from error


def _parquet_rows(path: Path | str) -> _Records:
    try:
        import pyarrow  # pyright: ignore[reportMissingImports]
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(f"cannot read {path}: `pip install 'jaxllm[data]'` first") from error
    number = 0
    try:
        with open_bytes(path) as file, pyarrow.parquet.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(_PARQUET_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    # A row has all columns; those of other forms are empty.
                    record = {name: value for name, value in row.items() if value is not None}
                    yield number, functools.partial(dict, record)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"cannot read the file {path} as parquet: {error}") from error


def documents_of(record: Any) -> Iterator[Document]:
    """The documents of one parsed line.

    Raises:
      ConfigError: it has none of the forms.
    """
    if not isinstance(record, Mapping):
        raise ConfigError(f"a line must be an object, got {record!r:.80}")
    if refused := sorted(key for key in _REFUSED_KEYS & record.keys() if not _is_empty(record[key])):
        raise ConfigError(
            f"{', '.join(refused)} of an object would change what is learnt, and is not read here; say it by "
            "the messages, or leave it out"
        )
    tools = _tools(record)
    if "messages" in record:
        yield from _conversation(*_messages(record, "messages"), tools)
    elif tools:
        raise ConfigError("tools are of messages; give the conversation as messages")
    elif "prompt" in record or "completion" in record:
        yield from _completion(record)
    elif "text" in record:
        yield text_document(_not_empty(text_field(record, "text"), "text"))
    else:
        raise ConfigError(
            f"an object needs messages, prompt and completion, or text; got {list(record)!r:.120}"
        )


def _completion(record: Mapping[str, Any]) -> Iterator[Document]:
    if isinstance(record.get("prompt"), str):
        prompt, completion = (text_field(record, name) for name in ("prompt", "completion"))
        _not_empty(completion, "completion")
        yield chat_document(TaskExample(user=_not_empty(prompt, "prompt"), answer=completion, form="text"))
        return
    (prompt, _), (completion, learnt) = (_messages(record, name) for name in ("prompt", "completion"))
    origin = json.dumps([prompt, completion])
    whole = (*prompt, *completion)
    answers = [len(prompt) + place for place in _answers(completion, learnt)]
    if not answers:
        raise ConfigError("a completion needs a message of the assistant whose weight is not 0")
    for place in answers:
        yield conversation_document(whole[: place + 1], origin)


def _conversation(messages: tuple[Message, ...], learnt: Sequence[bool], tools: str) -> Iterator[Document]:
    answers = [place for place in _answers(messages, learnt) if place]
    if not answers:
        raise ConfigError(
            "a conversation needs a message of the assistant after another, whose weight is not 0"
        )
    origin = json.dumps(messages)
    for place in answers:
        yield conversation_document(messages[: place + 1], origin, tools)


def _answers(messages: Sequence[Message], learnt: Sequence[bool]) -> list[int]:
    """Returns the positions of the messages that are learned."""
    return [place for place, each in enumerate(messages) if each.role == "assistant" and learnt[place]]


def _messages(record: Mapping[str, Any], name: str) -> tuple[tuple[Message, ...], list[bool]]:
    """The messages, and whether each is learnt if it is an answer."""
    given = record.get(name)
    if not isinstance(given, list) or not given:
        raise ConfigError(f"{name} must be a list of messages, got {given!r:.80}")
    return tuple(_message(each) for each in given), [each.get("weight") != 0 for each in given]


def _message(given: Any) -> Message:
    if not isinstance(given, Mapping) or given.get("role") not in ROLES:
        raise ConfigError(f"a message needs a role of {', '.join(ROLES)} and a content, got {given!r:.80}")
    role, weight = str(given["role"]), given.get("weight")
    if weight is not None and (role != "assistant" or weight not in (0, 1)):
        raise ConfigError(f"the weight of an assistant's message is 0 or 1, got {weight!r:.80} of {role}")
    more = {key: given[key] for key in _MORE_KEYS.get(role, ()) if not _is_empty(given.get(key))}
    for key in given.keys() - _MESSAGE_KEYS - more.keys():
        if not _is_empty(given[key]):
            raise ConfigError(
                f"{key} of a message is not read, and may change what is learnt; write it into the content "
                "as the model writes it, or leave it out"
            )
    if "tool_calls" in more:
        more["tool_calls"] = _calls(more["tool_calls"])
        given = {**given, "content": given.get("content") or ""}
    return Message(role, text_field(given, "content"), json.dumps(more) if more else "")


def _calls(given: Any) -> list[dict[str, Any]]:
    """Calls as chat templates read them: arguments as an object."""
    calls = []
    for each in given if isinstance(given, list) else [given]:
        function = each.get("function") if isinstance(each, Mapping) else None
        name, arguments = (function.get(key) for key in ("name", "arguments")) if function else ("", "")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        if not isinstance(name, str) or not name or not isinstance(arguments, Mapping):
            raise ConfigError(
                'tool_calls are a list of {"type": "function", "function": {"name": NAME, "arguments": '
                f"OBJECT}}}}, got {each!r:.80}"
            )
        calls.append({**each, "type": "function", "function": {"name": name, "arguments": arguments}})
    return calls


def _tools(record: Mapping[str, Any]) -> str:
    tools = record.get("tools")
    if _is_empty(tools):
        return ""
    if not isinstance(tools, list) or not all(isinstance(each, Mapping) for each in tools):
        raise ConfigError(f"tools must be a list of objects, got {tools!r:.80}")
    return json.dumps(tools)


def _is_empty(value: Any) -> bool:
    """Whether a key has no value; 0 and false may mean something."""
    return value is None or value in ("", [], {})


def _not_empty(text: str, name: str) -> str:
    if not text:
        raise ConfigError(f"{name} is empty")
    return text
