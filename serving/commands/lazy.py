"""Imports commands when they are used, and JAX when they run: help and usage errors need click alone."""

import gc
import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import click

# Name of a command -> "module:attribute", and its summary: the first sentence of its help.
CommandList = Mapping[str, tuple[str, str]]

_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


class LazyGroup(click.Group):
    """A group that lists its commands without importing them."""

    def __init__(self, *args: Any, sections: Mapping[str, CommandList], **kwargs: Any) -> None:
        """Makes the group.

        Args:
          *args: of `click.Group`.
          sections: headings of the help text, and the commands below each.
          **kwargs: of `click.Group`.
        """
        super().__init__(*args, **kwargs)
        self._sections = sections
        self._targets = {
            name: target for section in sections.values() for name, (target, _) in section.items()
        }

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands."""
        return list(self._targets)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported here."""
        if cmd_name not in self._targets:
            return None
        module, attribute = self._targets[cmd_name].split(":")
        return getattr(importlib.import_module(module), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands of each section."""
        longest = max(map(len, self._targets))
        for heading, section in self._sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(longest), summary) for name, (_, summary) in section.items()])


class EngineCommand(click.Command):
    """A command that computes: its function imports what needs JAX, and its module does not."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        import_jax()
        return super().invoke(ctx)


def import_jax() -> None:
    """Imports JAX without two things that take a tenth of a start each.

    Importing JAX makes half a million objects that live as long as the process: the collector would walk
    them again and again. And NumPy's BLAS starts a thread per core, which all spin for work at first; what
    commands multiply in NumPy is small and never timed.
    """
    if "jax" in sys.modules:
        return
    collecting = gc.isenabled()
    gc.disable()
    few_threads = _BLAS_THREADS not in os.environ
    if few_threads:
        os.environ[_BLAS_THREADS] = "1"
    try:
        import jax  # noqa: F401

        gc.freeze()
    finally:
        if few_threads:
            del os.environ[_BLAS_THREADS]
        if collecting:
            gc.enable()
