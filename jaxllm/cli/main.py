"""Runs the `jaxllm` command: lists all packages' commands.

A command's module is imported when the command is used (`jaxllm.cli.lazy`). Each package has the modules of
its commands.
"""

from collections.abc import Sequence

import click

from jaxllm.cli.lazy import LazyGroup, run_command
from jaxllm.version import __version__

# Headings of the help text, the commands below each, and their summaries: the first sentences of their help.
_SUMMARIES = {
    "Run a model": {
        "generate": "Continue a prompt with a model, streaming the text.",
        "chat": "Talk with a model in the terminal.",
        "demo": "Show a chat, its speed beside the memory's bandwidth, and a service that answers in time.",
        "serve": "Serve a model to the apps of this device.",
        "info": "Describe a bundle or a checkpoint, and this device.",
        "profile": "Measure the speed of every level of a model, for the service to plan with.",
        "contexts": "List, check and repair contexts that are stored on disk.",
    },
    "Find models": {
        "models": "List the models on this machine, by the names that --model takes.",
        "pull": "Download a model of the hub, or what its newest revision has changed.",
        "rm": "Remove a model that was pulled, and what was prepared of it.",
    },
    "Prepare and train models": {
        "prepare": "Write a Hugging Face folder or a GGUF file as one bundle file.",
        "elasticize": "Make an elastic bundle: levels of one model, and the tiny LM that plans.",
        "calibrate": "Measure a model on texts, and write a calibrated bundle.",
        "export": "Export a model as programs that run without our model code, or as a model for other "
        "engines.",
        "pretrain": "Train a small model from scratch, into a Hugging Face folder.",
        "lora": "Train a low-rank adapter of a model, into a folder in PEFT's layout.",
    },
    "Evaluate and compare": {
        "eval": "Measure how good a model is, on texts and on tasks.",
        "bench": "Measure this machine: one subcommand per claim.",
    },
    "Set up": {
        "keys": "Make, list and remove API keys of apps.",
        "completion": "Print a script that completes jaxllm's commands and options in a shell.",
    },
}
# Modules that do not have the name of their command.
_MODULES = {
    **dict.fromkeys(("pretrain", "lora", "elasticize"), "jaxllm.cli.train"),
    "eval": "jaxllm.cli.evaluate",
    "bench": "benchmarks.cli",
    "completion": "jaxllm.cli.keys",
    **dict.fromkeys(("pull", "rm"), "jaxllm.cli.models"),
}
SECTIONS = {
    heading: {
        name: (f"{_MODULES.get(name, f'jaxllm.cli.{name}')}:{name}_command", summary)
        for name, summary in section.items()
    }
    for heading, section in _SUMMARIES.items()
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
