"""Reads conversations, prompts with completions, and texts for tuning from JSON lines or parquet.

Each line, or row, is an object of one of these forms; of the first two only answers are learned:

    {"messages": [{"role": "system" | "user" | "assistant", "content": TEXT}, ...], "tools": [...]}
    {"prompt": TEXT, "completion": TEXT}     a text to continue, without a chat template
    {"prompt": [MESSAGE, ...], "completion": [MESSAGE, ...]}
    {"text": TEXT}                           all of it is learned

Each answer of a conversation becomes a document, after all messages before it; answers of `"weight": 0` are
not learned. All of a conversation's documents belong to one side of the split. `tools`, which a
conversation may have, are for the model's chat template. Other keys of a message are rejected, and so are
those of an object that would change what is learned; others (ids, sources) are ignored with a line in the
log.
"""

import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.tasks.example import TaskExample, text_field
from jaxllm.training.data.documents import (
    Document,
    Message,
    chat_document,
    conversation_document,
    text_document,
)
from jaxllm.training.data.sources import RemoteFile, open_bytes, open_text

ROLES = ("system", "user", "assistant")
_MESSAGE_KEYS = frozenset({"role", "content", "weight"})
# Keys of an object by which other trainers change what the model sees or learns.
_REFUSED_KEYS = frozenset(
    {
        "chat_template", "chat_template_kwargs", "documents", "enable_thinking", "function_call", "functions",
        "images", "parallel_tool_calls", "reasoning_content", "response_format", "system", "thinking",
        "tool_choice", "videos", "weight",
    }
)  # fmt: skip
_log = logging.getLogger("jaxllm")
_GLOB = frozenset("*?[")
OnBad = Callable[[str], None]
PARQUET = ".parquet"
# Number of rows in memory at once.
_PARQUET_ROWS = 1024
# Numbers of lines or rows, each with a function that parses it.
_Records = Iterator[tuple[int, Callable[[], Any]]]


def source_files(path: Path, suffixes: Sequence[str]) -> list[Path]:
    """Lists the files of a path: one file, those in a folder and its folders that end in `suffixes`, or
    those of a pattern with `*`, `?` or `[`; sorted, independent of the file system's order.

    Raises:
      ConfigError: there are none.
    """
    if path.is_dir():
        found = sorted(each for each in path.rglob("*") if each.suffix in suffixes and each.is_file())
        if not found:
            raise ConfigError(f"the folder {path} holds no file that ends in {' or '.join(suffixes)}")
        return found
    if _GLOB & set(str(path)) and not path.exists():
        pattern = path.relative_to(path.anchor) if path.anchor else path
        found = sorted(each for each in Path(path.anchor or ".").glob(str(pattern)) if each.is_file())
        if not found:
            raise ConfigError(f"no file fits the pattern {path}")
        return found
    return [path]


def read_chats(path: Path | RemoteFile, on_bad: OnBad | None = None) -> Iterator[Document]:
    """Reads the documents of a file of JSON lines, or of a `.parquet` file whose columns are the keys (see
    the module docstring); blank lines are skipped.

    Args:
      path: path of the file.
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
        for key in sorted(parsed.keys() - _read_keys(parsed) - reported):
            reported.add(key)
            _say_ignored(str(path), key)
        yield from documents


def _read_keys(record: Mapping[str, Any]) -> set[str]:
    """The keys of an object's form."""
    if "messages" in record:
        return {"messages", "tools"}
    return {"prompt", "completion"} if "prompt" in record else {"text"}


@functools.cache
def _say_ignored(path: str, key: str) -> None:
    """Once, though files are read several times."""
    _log.warning("%s: the key %.80r of its lines is ignored", path, key)


def _json_lines(path: Path | RemoteFile) -> _Records:
    try:
        with open_text(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, functools.partial(json.loads, line)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the file {path} as UTF-8: {error}") from error


def _parquet_rows(path: Path | RemoteFile) -> _Records:
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
        yield conversation_document(whole[:place], whole[place][1], origin)


def _conversation(messages: tuple[Message, ...], learnt: Sequence[bool], tools: str) -> Iterator[Document]:
    answers = [place for place in _answers(messages, learnt) if place]
    if not answers:
        raise ConfigError(
            "a conversation needs a message of the assistant after another, whose weight is not 0"
        )
    origin = json.dumps(messages)
    for place in answers:
        yield conversation_document(messages[:place], messages[place][1], origin, tools)


def _answers(messages: Sequence[Message], learnt: Sequence[bool]) -> list[int]:
    """Returns the positions of the messages that are learned."""
    return [place for place, (role, _) in enumerate(messages) if role == "assistant" and learnt[place]]


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
    for key in given.keys() - _MESSAGE_KEYS:
        if not _is_empty(given[key]):
            raise ConfigError(
                f"{key} of a message is not read, and may change what is learnt; write it into the content "
                "as the model writes it, or leave it out"
            )
    return role, text_field(given, "content")


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
