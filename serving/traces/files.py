"""Reads and writes traces: one JSON object a line, read with limits and written whole or not at all."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jaxllm.errors import ConfigError
from jaxllm.files.atomic import atomic_file
from jaxllm.files.input_files import open_regular

Entry = TypeVar("Entry")
MAX_ENTRIES = 1_000_000
_MAX_LINE_BYTES = 1 << 20


def write_lines(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Writes a trace.

    Raises:
      ConfigError: it cannot be written.
    """
    try:
        with atomic_file(path) as file:
            for each in entries:
                file.write(json.dumps(each, ensure_ascii=False).encode() + b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: the trace cannot be written ({error.strerror})") from error


def read_lines(path: Path, parse: Callable[[Any], Entry]) -> list[Entry]:
    """Reads a trace, each line by `parse`, which raises ValueError or ConfigError for a malformed line.

    Raises:
      ConfigError: it cannot be read, is malformed, empty or too long.
    """
    entries: list[Entry] = []
    try:
        with open_regular(Path(path)) as file:
            while line := file.readline(_MAX_LINE_BYTES + 1):
                if len(line) > _MAX_LINE_BYTES or len(entries) == MAX_ENTRIES:
                    raise ConfigError("the line is too long, or there are too many")
                entries.append(parse(json.loads(line)))
    except OSError as error:
        raise ConfigError(f"{path}: the trace cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError, ConfigError) as error:
        raise ConfigError(f"{path}, line {len(entries) + 1}: {error!s:.200}") from error
    if not entries:
        raise ConfigError(f"{path}: the trace has no request")
    return entries
