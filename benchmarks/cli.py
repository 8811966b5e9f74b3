"""`jaxllm bench NAME`: names the benchmarks. A benchmark's module is imported when it is used."""

import click

from jaxllm.cli.lazy import LazyGroup

# Name -> the room that has its command, and help.
_BENCHMARKS = {
    "engine": ("engine", "Measure load, build and run times, speed and memory beside other engines."),
    "elastic": ("elastic", "Measure the cost of a model's levels, and right answers in time."),
    "speculative": ("speculation", "Measure a model larger than memory, with drafts and without."),
    "contexts": (
        "contexts", "Measure switching between contexts of apps, and the quality of compressed ones.",
    ),
    "experts": ("experts", "Measure a mixture of experts larger than memory."),
    "prefill": ("int8_prefill", "Measure the speed and the loss of integer prefill."),
    "prepare": ("prepare", "Measure preparing a folder and GGUF files of the same weights."),
    "service": (
        "service", "Measure the service under load, beside ours without a technique and llama.cpp's server.",
    ),
    "export": ("export", "Measure exported programs beside the live engine."),
    "train": ("train", "Measure training and serving on one accelerator."),
}  # fmt: skip
SECTIONS = {
    "Benchmarks": {
        name: (f"benchmarks.{room}:{name}_command", text) for name, (room, text) in _BENCHMARKS.items()
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
