"""Runs the `jaxllm` command: lists all packages' commands.

A command's module is imported when the command is used (`serving.commands.lazy`). Each package has the
modules of its commands.
"""

from collections.abc import Sequence

import click

import jaxllm
from serving.commands.errors import run_command
from serving.commands.lazy import LazyGroup

SECTIONS = {
    "Run a model": {
        "generate": (
            "serving.commands.generate:generate_command",
            "Continue a prompt with a model, streaming the text.",
        ),
        "chat": ("serving.commands.chat:chat_command", "Talk with a model in the terminal."),
        "demo": (
            "serving.commands.demo:demo_command",
            "Ask a model a few questions of each task, and show its answers and its speed.",
        ),
        "serve": (
            "serving.commands.serve:serve_command",
            "Serve a model to the apps of this device.",
        ),
        "info": (
            "serving.commands.info:info_command",
            "Describe a bundle and this device, or what could become one.",
        ),
        "profile": (
            "serving.commands.profile:profile_command",
            "Measure the speed of every level of a model, for the service to plan with.",
        ),
        "contexts": (
            "serving.commands.contexts:contexts_command",
            "List, check and repair contexts that are kept on disk.",
        ),
    },
    "Prepare and train models": {
        "prepare": (
            "serving.commands.prepare:prepare_command",
            "Write a Hugging Face folder or a GGUF file as one bundle file.",
        ),
        "elasticize": (
            "training.commands.elasticize:elasticize_command",
            "Make an elastic bundle: levels of one model, and the tiny LM that plans.",
        ),
        "quantize-experts": (
            "training.commands.quantize_experts:quantize_experts_command",
            "Find a width for each expert of a mixture, and write a bundle that runs in little memory.",
        ),
        "calibrate-prefill": (
            "training.commands.calibrate_prefill:calibrate_prefill_command",
            "Calibrate a model for integer prefill on a text, and write the bundle.",
        ),
        "calibrate-contexts": (
            "training.commands.calibrate_contexts:calibrate_contexts_command",
            "Choose how contexts of a model are stored, by measured errors, and write the bundle.",
        ),
        "calibrate-nested": (
            "training.commands.calibrate_nested:calibrate_nested_command",
            "Make the high planes of nested weights draft better, by a text, and write the bundle.",
        ),
        "export": (
            "export.commands.export:export_command",
            "Export a model as programs that run without our model code, or as a model for other engines.",
        ),
        "seq2seq": (
            "training.commands.seq2seq:seq2seq_command",
            "Train a small encoder-decoder from scratch, into a Hugging Face folder.",
        ),
        "seq2seq-eval": (
            "training.commands.seq2seq_eval:seq2seq_eval_command",
            "Answer a file greedily, and print how good the answers are as a JSON object.",
        ),
        "pretrain": (
            "training.commands.pretrain:pretrain_command",
            "Train a small model from scratch, into a Hugging Face folder.",
        ),
        "export-run": (
            "training.commands.export_run:export_run_command",
            "Write the best checkpoint of a run as a Hugging Face folder.",
        ),
        "lora": (
            "training.commands.lora:lora_command",
            "Train a low-rank adapter of a model, into a folder in PEFT's layout.",
        ),
    },
    "Evaluate and compare": {
        "eval": (
            "serving.commands.evaluate:eval_command",
            "Measure how good a model is, on texts and on tasks.",
        ),
        "bench": ("benchmarks.cli:bench_command", "Measure this machine: one subcommand per claim."),
        "trace": (
            "serving.commands.trace:trace_command",
            "Make request traces, and replay them on a service.",
        ),
    },
    "Set up": {
        "keys": ("serving.commands.keys:keys_command", "Make, list and remove API keys of apps."),
        "completion": (
            "serving.commands.completion:completion_command",
            "Print a script that completes jaxllm's commands and options in a shell.",
        ),
    },
}
COMMANDS = {name: entry for section in SECTIONS.values() for name, entry in section.items()}


@click.group(cls=LazyGroup, sections=SECTIONS, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error. Goes before the command.")
@click.version_option(jaxllm.__version__)
def cli(debug: bool) -> None:
    """One LLM for every app on a device: prepare models, run them, measure them.

    Without --model, commands use the model in the package. `jaxllm COMMAND --help` has an example of each.
    """


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point: errors become one line on stderr, exit 1 (usage errors: 2)."""
    run_command(cli, "jaxllm", argv)


if __name__ == "__main__":
    main()
