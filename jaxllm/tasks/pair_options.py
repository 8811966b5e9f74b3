"""The command-line options of pairs of texts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Command = Callable[..., Any]
_FILE = click.Path(path_type=Path)


def pairs_options(use: str, *, several: bool = False) -> Callable[[Command], Command]:
    """Adds --pairs and --prefix to commands that accept encoder-decoders.

    Args:
      use: purpose of the pairs, such as "measure on".
      several: whether both may be repeated. Parameter `pairs` is then a tuple of (source, target), and
        `prefix` one of texts; else `pairs` is (source, target) and `prefix` a text, or each None.
    """
    again = " Repeatable." if several else ""
    each = ". Repeatable, one for each --pairs" if several else ""

    def decorate(command: Command) -> Command:
        for option in (
            click.option(
                "--prefix",
                metavar="TEXT",
                multiple=several,
                help=f"With --pairs: what tells the model the task{each}.  [default: the model's own prefix]",
            ),
            click.option(
                "--pairs",
                type=(_FILE, _FILE),
                metavar="SOURCE TARGET",
                multiple=several,
                help=f"For an encoder-decoder: two UTF-8 text files to {use}, whose lines of the same number "
                f"are a source and its target.{again}",
            ),
        ):
            command = option(command)
        return command

    return decorate
