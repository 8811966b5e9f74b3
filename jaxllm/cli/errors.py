"""Runs a command, and turns its errors into one line and an exit code."""

import sys
from collections.abc import Sequence

import click

from jaxllm.errors import JaxllmError


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
        click.echo(f"error: {_one_line(error)}", err=True)
        sys.exit(1)


def _one_line(error: JaxllmError | OSError) -> str:
    if isinstance(error, JaxllmError):
        return " ".join(str(error).split())
    # User errors are JaxllmErrors; an OSError is from our output, for example a full disk.
    where = "" if error.filename is None else f"{error.filename}: "
    return f"{where}{error.strerror or error}"
