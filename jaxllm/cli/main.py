"""Runs the `jaxllm` command: lists all packages' commands.

A command's module is imported when the command is used (`jaxllm.cli.lazy`). Each package has the modules of
its commands.
"""

from collections.abc import Sequence

import click

from jaxllm.cli.lazy import LazyGroup, run_command
from jaxllm.version import __version__

SECTIONS = {
    "Run a model": {
        "generate": (
            "jaxllm.cli.generate:generate_command",
            "Continue a prompt with a model, streaming the text.",
        ),
        "chat": ("jaxllm.cli.chat:chat_command", "Talk with a model in the terminal."),
        "demo": (
            "jaxllm.cli.demo:demo_command",
            "Ask a model a few questions of each task, and show its answers and its speed.",
        ),
        "serve": (
            "jaxllm.cli.serve:serve_command",
            "Serve a model to the apps of this device.",
        ),
        "info": (
            "jaxllm.cli.info:info_command",
            "Describe a bundle or a checkpoint, and this device.",
        ),
        "profile": (
            "jaxllm.cli.profile:profile_command",
            "Measure the speed of every level of a model, for the service to plan with.",
        ),
        "contexts": (
            "jaxllm.cli.contexts:contexts_command",
            "List, check and repair contexts that are stored on disk.",
        ),
    },
    "Prepare and train models": {
        "prepare": (
            "jaxllm.cli.prepare:prepare_command",
            "Write a Hugging Face folder or a GGUF file as one bundle file.",
        ),
        "elasticize": (
            "jaxllm.cli.train:elasticize_command",
            "Make an elastic bundle: levels of one model, and the tiny LM that plans.",
        ),
        "calibrate": (
            "jaxllm.cli.calibrate:calibrate_command",
            "Measure a model on texts, and write a calibrated bundle.",
        ),
        "export": (
            "jaxllm.cli.export:export_command",
            "Export a model as programs that run without our model code, or as a model for other engines.",
        ),
        "pretrain": (
            "jaxllm.cli.train:pretrain_command",
            "Train a small model from scratch, into a Hugging Face folder.",
        ),
        "lora": (
            "jaxllm.cli.train:lora_command",
            "Train a low-rank adapter of a model, into a folder in PEFT's layout.",
        ),
    },
    "Evaluate and compare": {
        "eval": (
            "jaxllm.cli.evaluate:eval_command",
            "Measure how good a model is, on texts and on tasks.",
        ),
        "bench": ("benchmarks.cli:bench_command", "Measure this machine: one subcommand per claim."),
    },
    "Set up": {
        "keys": ("jaxllm.cli.keys:keys_command", "Make, list and remove API keys of apps."),
        "completion": (
            "jaxllm.cli.keys:completion_command",
            "Print a script that completes jaxllm's commands and options in a shell.",
        ),
    },
}
COMMANDS = {name: entry for section in SECTIONS.values() for name, entry in section.items()}


@click.group(cls=LazyGroup, sections=SECTIONS, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error. Goes before the command.")
@click.version_option(__version__)
def cli(debug: bool) -> None:
    """One LLM for every app on a device: prepare models, run them, measure them.

    Without --model, commands use the packaged default model. `jaxllm COMMAND --help` has an example of each.
    """


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point: errors become one line on stderr, exit 1 (usage errors: 2)."""
    run_command(cli, "jaxllm", argv)


if __name__ == "__main__":
    main()
