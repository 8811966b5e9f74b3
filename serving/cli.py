"""The `jaxllm` command. Each subcommand lives in a module of its own, imported when it is used."""

import importlib
import sys
from collections.abc import Sequence

import click

import jaxllm
from jaxllm.errors import JaxllmError

# Subcommand -> "module:attribute". The room that owns a command owns its module.
COMMANDS = {
    "generate": "serving.commands.generate:generate_command",
    "chat": "serving.commands.chat:chat_command",
    "demo": "serving.commands.demo:demo_command",
    "prepare": "serving.commands.prepare:prepare_command",
    "info": "serving.commands.info:info_command",
    "eval": "serving.commands.evaluate:eval_command",
    "bench": "benchmarks.cli:bench_command",
    "pretrain": "training.cli:pretrain_command",
}


class LazyGroup(click.Group):
    """A group that imports a subcommand's module only when that subcommand runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all subcommands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand of that name."""
        target = COMMANDS.get(cmd_name)
        if target is None:
            return None
        module, attribute = target.split(":")
        return getattr(importlib.import_module(module), attribute)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error (goes before the subcommand).")
@click.version_option(jaxllm.__version__)
def cli(debug: bool) -> None:
    """One LLM for every app on a device: prepare models, run them, measure them."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point: errors become one line on stderr, exit 1 (usage errors: 2)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = cli.main(arguments, prog_name="jaxllm", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except JaxllmError as error:
        if arguments[0] == "--debug":
            raise
        click.echo(f"error: {' '.join(str(error).split())}", err=True)
        sys.exit(1)
    except OSError as error:
        # What a user can cause is a JaxllmError; this is our own output, say to a full disk.
        if arguments[0] == "--debug":
            raise
        click.echo(f"error: {error.strerror or error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
