"""Reads the files of tasks: JSON, and JSON with one record per line."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jaxllm.errors import ConfigError
from jaxllm.files.input_files import open_regular, read_bytes

Record = Mapping[str, Any]
Made = TypeVar("Made")


class DataMissing(ConfigError):
    """A file of a task is missing."""


# Far above any record of the tasks' files.
MAX_LINE_BYTES = 1 << 24
MAX_FILE_BYTES = 1 << 28


def read_jsonl(path: Path, make: Callable[[Record], Iterable[Made]]) -> Iterator[Made]:
    """Yields the results of `make` for each record of a file with one JSON object per line, read lazily.

    Raises:
      DataMissing: there is no such file.
      ConfigError: the file cannot be read, a line is no JSON object, or `make` rejects it.
    """
    try:
        with open_regular(Path(path)) as file:
            number = 0
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
        raise ConfigError(f"{path} holds no JSON: {error}") from error


def _unreadable(path: Path, error: OSError) -> ConfigError:
    kind = DataMissing if isinstance(error, FileNotFoundError | NotADirectoryError) else ConfigError
    return kind(f"cannot read {path}: {error.strerror or error}")


def _made(path: Path, number: int, line: bytes, make: Callable[[Record], Iterable[Made]]) -> list[Made]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}, line {number} is no JSON: {error}") from error
    try:
        if not isinstance(record, dict):
            raise ConfigError(f"expected an object, got {record!r:.80}")
        return list(make(record))
    except ConfigError as error:
        raise ConfigError(f"{path}, line {number}: {error}") from error
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, StopIteration) as error:
        raise ConfigError(f"{path}, line {number} is not a record of this task: {error!r}") from error
