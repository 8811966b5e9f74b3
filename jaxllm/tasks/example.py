"""A question of a task with its right answer, and the files that questions are read from."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from jaxllm.errors import ConfigError
from jaxllm.files.input_files import open_regular, read_bytes
from jaxllm.text.prompts import Prompt

Split = Literal["train", "valid"]
Record = Mapping[str, Any]
Made = TypeVar("Made")

# Far above any record of the tasks' files.
MAX_LINE_BYTES = 1 << 24
MAX_FILE_BYTES = 1 << 28


class DataMissing(ConfigError):
    """A file of a task is missing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskExample(Prompt):
    """A question with its right answer.

    Attributes:
      answer: the right answer: one of `options` if there are any.
      options: possible answers; the model's answer is the most likely. Empty for free text.
      references: further right answers of a free answer, for scores over several references.
    """

    answer: str
    options: tuple[str, ...] = ()
    references: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.options and self.answer not in self.options:
            raise ConfigError(
                f"the answer {self.answer!r:.80} is not among the options {self.options!r:.200}"
            )


def held_out(key: str, share: float) -> bool:
    """Whether the example named `key` belongs to the held-out `share`. It depends only on `key`, so that
    the order of a file's lines has no influence, and copies are never in both splits."""
    return pseudo_random(key) < share


def pseudo_random(key: str) -> float:
    """Returns a number in [0, 1) that depends only on `key`, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "big") / 2**56


def shuffled(values: Sequence[str], key: str) -> list[str]:
    """Returns `values` in an order that depends only on `key` and each value."""
    return sorted(values, key=lambda value: pseudo_random(f"{key}\0{value}"))


def text_field(record: Mapping[str, object], name: str) -> str:
    """Returns the text under `name` of a record.

    Raises:
      ConfigError: there is no text, or it is not valid Unicode.
    """
    value = record.get(name)
    if not isinstance(value, str):
        raise ConfigError(f"a record needs text under {name!r}, got {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the text under {name!r} has a lone surrogate: {error}") from error
    return value


def read_jsonl(path: Path, make: Callable[[Record], Iterable[Made]]) -> Iterator[Made]:
    """Yields the results of `make` for each record of a file with one JSON object per line, read lazily.

    Raises:
      DataMissing: there is no such file.
      ConfigError: the file cannot be read, a line is not a JSON object, or `make` rejects it.
    """
    number = 0
    try:
        with open_regular(Path(path)) as file:
            while line := file.readline(MAX_LINE_BYTES):
                number += 1
                if line.strip():
                    yield from _made(path, number, line, make)
    except OSError as error:
        raise _unreadable(path, error) from error


def read_json(path: Path) -> Any:
    """Reads the JSON value in a file.

    Raises:
      DataMissing: there is no such file.
      ConfigError: the file cannot be read or is not JSON.
    """
    try:
        return json.loads(read_bytes(Path(path), MAX_FILE_BYTES))
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error


def paired_lines(source: Path, target: Path, read: Callable[[Path], Sequence[str]]) -> list[tuple[str, str]]:
    """Pairs the lines of two files by their numbers; pairs with an empty side are left out.

    Args:
      read: function that reads the lines of a file, stripped.

    Raises:
      ConfigError: their numbers of lines differ.
    """
    sources, targets = read(source), read(target)
    if len(sources) != len(targets):
        raise ConfigError(
            f"{source} has {len(sources):,} lines and {target} {len(targets):,}: lines of the same number "
            "must be a pair"
        )
    return [pair for pair in zip(sources, targets, strict=True) if all(pair)]


def _unreadable(path: Path, error: OSError) -> ConfigError:
    kind = DataMissing if isinstance(error, FileNotFoundError | NotADirectoryError) else ConfigError
    return kind(f"cannot read {path}: {error.strerror or error}")


def _made(path: Path, number: int, line: bytes, make: Callable[[Record], Iterable[Made]]) -> list[Made]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}, line {number} is not JSON: {error}") from error
    try:
        if not isinstance(record, dict):
            raise ConfigError(f"expected an object, got {record!r:.80}")
        return list(make(record))
    except ConfigError as error:
        raise ConfigError(f"{path}, line {number}: {error}") from error
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, StopIteration) as error:
        raise ConfigError(f"{path}, line {number} is not a record of this task: {error!r}") from error
