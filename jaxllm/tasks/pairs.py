"""Pairs the lines of two texts: sources and their targets."""

from collections.abc import Callable, Sequence
from pathlib import Path

from jaxllm.errors import ConfigError


def paired_lines(source: Path, target: Path, read: Callable[[Path], Sequence[str]]) -> list[tuple[str, str]]:
    """Pairs the lines of two files by their numbers; pairs with an empty side are left out.

    Args:
      source, target: the files.
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
