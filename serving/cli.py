"""The `jaxllm` command. Each subcommand lives in a module of its own, imported when it is used."""

import gc
import importlib
import os
import sys
from collections.abc import Sequence

import click

import jaxllm
from jaxllm.errors import JaxllmError

# Subcommand -> "module:attribute", and the first sentence of its help, so that listing the commands imports
# none of them. The room that owns a command owns its module.
COMMANDS = {
    "generate": (
        "serving.commands.generate:generate_command",
        "Continue a prompt with a model, streaming the text.",
    ),
    "chat": (
        "serving.commands.chat:chat_command",
        "Talk with a model; only what is new is fed to it each turn.",
    ),
    "demo": (
        "serving.commands.demo:demo_command",
        "Ask a model a few questions of each task: its answers, right or wrong, and its speed.",
    ),
    "prepare": (
        "serving.commands.prepare:prepare_command",
        "Write the model in a Hugging Face FOLDER as one bundle file.",
    ),
    "info": (
        "serving.commands.info:info_command",
        "Describe a BUNDLE (default: the packaged model) and the device.",
    ),
    "profile": (
        "serving.commands.profile:profile_command",
        "Measure every level of BUNDLE (default: the packaged model), and keep the times for the service.",
    ),
    "export": (
        "export.cli:export_command",
        "Write the model in BUNDLE as programs that run without our model code.",
    ),
    "trace": ("serving.commands.trace:trace_command", "Make request traces, and replay them on a service."),
    "contexts": (
        "serving.commands.contexts:contexts_command",
        "Look into a folder of contexts that outlive calls, and check it.",
    ),
    "eval": (
        "serving.commands.evaluate:eval_command",
        "Measure a model: perplexity of a text, right answers to tasks, or both.",
    ),
    "bench": ("benchmarks.cli:bench_command", "Measure this machine: one subcommand per claim."),
    "pretrain": (
        "training.cli:pretrain_command",
        "Train a small model from nothing, into a Hugging Face folder (RUN/hf).",
    ),
    "elasticize": (
        "training.elasticize_cli:elasticize_command",
        "Make an elastic bundle of the Hugging Face folder MODEL.",
    ),
    "calibrate": (
        "training.calibrate_cli:calibrate_command",
        "Make a bundle of the mixture of experts MODEL, to run it in little memory.",
    ),
    "lora": (
        "training.lora_cli:lora_command",
        "Train a low-rank adapter of a model, into a folder in PEFT's layout (RUN/adapter).",
    ),
}


_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


class LazyGroup(click.Group):
    """A group that imports a subcommand's module only when that subcommand runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all subcommands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand of that name."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name][0].split(":")
        if module not in sys.modules:
            _import_for_good(module)
        return getattr(sys.modules[module], attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of subcommands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_) for name, (_, help_) in COMMANDS.items()])


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
        where = "" if error.filename is None else f"{error.filename}: "
        click.echo(f"error: {where}{error.strerror or error}", err=True)
        sys.exit(1)


def _import_for_good(module: str) -> None:
    """Imports a module and all that it needs, without two things that take a tenth of a start each.

    Importing JAX makes half a million objects that live as long as the process: the collector would walk
    them again and again. And NumPy's BLAS starts a thread per core, which all spin for work at first; no
    command of this room has any for it.
    """
    collecting = gc.isenabled()
    gc.disable()
    few_threads = module.startswith("serving.") and _BLAS_THREADS not in os.environ
    if few_threads:
        os.environ[_BLAS_THREADS] = "1"
    try:
        importlib.import_module(module)
        gc.freeze()
    finally:
        if few_threads:
            del os.environ[_BLAS_THREADS]
        if collecting:
            gc.enable()


if __name__ == "__main__":
    main()
