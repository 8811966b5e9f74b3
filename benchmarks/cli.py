"""`jaxllm bench NAME`: names the benchmarks. A benchmark's module is imported when it is used."""

import click

from jaxllm.cli.lazy import LazyGroup

SECTIONS = {
    "Benchmarks": {
        "engine": (
            "benchmarks.commands:engine_command",
            "Measure load, build and run times, speed and memory beside other engines.",
        ),
        "elastic": (
            "benchmarks.commands:elastic_command",
            "Measure the cost of a model's levels, and right answers in time.",
        ),
        "speculative": (
            "benchmarks.commands:speculative_command",
            "Measure a model larger than memory, with drafts and without.",
        ),
        "contexts": (
            "benchmarks.commands:contexts_command",
            "Measure switching between contexts of apps, and the quality of compressed ones.",
        ),
        "experts": (
            "benchmarks.commands:experts_command",
            "Measure a mixture of experts larger than memory.",
        ),
        "prefill": (
            "benchmarks.commands:prefill_command",
            "Measure the speed and the loss of integer prefill.",
        ),
        "prepare": (
            "benchmarks.commands:prepare_command",
            "Measure preparing a folder and GGUF files of the same weights.",
        ),
        "service": (
            "benchmarks.commands:service_command",
            "Measure the service under load, beside ours without a technique and llama.cpp's server.",
        ),
        "export": (
            "benchmarks.commands:export_command",
            "Measure exported programs beside the live engine.",
        ),
        "train": (
            "benchmarks.train:train_command",
            "Measure training and serving on one accelerator.",
        ),
    },
    "Inputs": {
        "trace": (
            "benchmarks.trace_command:trace_command",
            "Make request traces, and replay them on a service.",
        ),
    },
}


@click.group("bench", cls=LazyGroup, sections=SECTIONS)
def bench_command() -> None:
    """Measure this machine: one subcommand per claim.

    Without options each runs about a minute on two cores, on packaged models and samples; --full takes the
    published sizes. Peers that are not installed are named and left out.
    """
