"""`jaxllm bench NAME`."""

import click

from benchmarks.commands.contexts import contexts_command
from benchmarks.commands.elastic import elastic_command
from benchmarks.commands.engine import engine_command
from benchmarks.commands.experts import experts_command
from benchmarks.commands.export import export_command
from benchmarks.commands.prefill import prefill_command
from benchmarks.commands.speculative import speculative_command


@click.group("bench")
def bench_command() -> None:
    """Measure this machine: one subcommand per claim."""


for each in (
    engine_command,
    elastic_command,
    speculative_command,
    contexts_command,
    experts_command,
    prefill_command,
    export_command,
):
    bench_command.add_command(each)
