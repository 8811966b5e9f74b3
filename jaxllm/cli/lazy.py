"""Imports commands when they are used, and JAX when they run: help and usage errors only need click. Turns
errors of a command into one line and an exit code."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from jaxllm.errors import JaxllmError

# Name of a command -> "module:attribute", and its summary: the first sentence of its help.
CommandList = Mapping[str, tuple[str, str]]


class LazyGroup(click.Group):
    """A group that lists its commands without importing them."""

    def __init__(self, *args: Any, sections: Mapping[str, CommandList], **kwargs: Any) -> None:
        """Makes the group.

        Args:
          *args: arguments of `click.Group`.
          sections: headings of the help text, and the commands below each.
          **kwargs: arguments of `click.Group`.
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
        """The command with this name, imported now."""
        if cmd_name not in self._targets:
            return None
        module, attribute = self._targets[cmd_name].split(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] != "benchmarks":
                raise
            raise click.ClickException(
                "`jaxllm bench` is part of the repository and not of the installed package; clone the "
                "repository of this version and run it there (pip install -e '.[bench]')"
            ) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands of each section."""
        longest = max(map(len, self._targets))
        for heading, section in self._sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(longest), summary) for name, (_, summary) in section.items()])


class EngineCommand(click.Command):
    """A command that computes: its function, not its module, imports what needs JAX."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        # Imported here: help and usage errors must not wait for it.
        from jaxllm.serving.host.jax_import import import_jax

        import_jax()
        return super().invoke(ctx)


def run_command(command: click.Command, name: str, argv: Sequence[str] | None = None) -> None:
    """Runs a command and exits: errors become one line on stderr, exit 1 (usage errors: 2).

    Args:
      command: a command with the option --debug.
      name: program name for its usage.
      argv: arguments; None for those of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = command.main(arguments, prog_name=name, standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except (JaxllmError, OSError) as error:
        if arguments[:1] == ["--debug"]:
            raise
        line = " ".join(str(error).split())
        if not isinstance(error, JaxllmError):
            # User errors are JaxllmErrors; an OSError is from our output, for example a full disk.
            where = "" if error.filename is None else f"{error.filename}: "
            line = f"{where}{error.strerror or error}"
        click.echo(f"error: {line}", err=True)
        sys.exit(1)
