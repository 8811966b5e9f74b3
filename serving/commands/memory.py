"""Measures what holds memory after a start: `jaxllm info --memory`."""

import gc
from pathlib import Path
from typing import Any

import click

from serving.commands.console import print_json
from serving.host.machine import give_back_memory
from serving.host.process_memory import ProcessMemory, process_memory

_MEGABYTE = 1e6
_WIDTH = 24
_NAMES = {
    "python": "Python and this command",
    "jax": "JAX and XLA",
    "engine": "the engine's modules",
    "model": "tokenizer, weight tables",
    "buckets": "compiled buckets",
    "other": "a cache, first runs",
}


class _Phases:
    """The growth of anonymous memory by phases of a start."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self._before = 0

    def end(self, name: str) -> ProcessMemory:
        """Ends a phase; memory that it freed is given back before."""
        gc.collect()
        give_back_memory()
        memory = process_memory()
        self.bytes[name], self._before = memory.anonymous - self._before, memory.anonymous
        return memory


def print_memory(model: Path | None, *, as_json: bool) -> None:
    """Opens a model, gets all of its buckets ready, answers a prompt, and prints what holds memory.

    Raises:
      ConfigError: the system does not tell.
      JaxllmError: the model cannot be opened.
    """
    facts = memory_facts(model)
    if as_json:
        print_json(facts)
        return
    for name, size in facts["anonymous"].items():
        click.echo(f"{_NAMES[name]:<{_WIDTH}}  {_megabytes(size)}")
    for name in ("anonymous_bytes", "weights_bytes", "libraries_bytes", "resident_bytes", "peak_bytes"):
        click.echo(f"{name.removesuffix('_bytes'):<{_WIDTH}}  {_megabytes(facts[name])}")
    click.echo(f"{'a cache, when full':<{_WIDTH}}  {_megabytes(facts['cache_bytes'])}")
    buckets = f"{facts['loaded_buckets']} from disk, {facts['compiled_buckets']} compiled"
    click.echo(f"{'buckets':<{_WIDTH}}  {buckets}")
    if facts["compiled_buckets"]:
        click.echo("The compiler's memory is included; run it again for a start from disk.")


def memory_facts(model: Path | None) -> dict[str, Any]:
    """What holds memory after a start with a model, in bytes; it imports what a start does, phase by phase.

    Raises:
      ConfigError, JaxllmError: see `print_memory`.
    """
    phases = _Phases()
    phases.end("python")
    from serving.host.jax_import import import_jax

    import_jax()
    import jax

    jax.devices()
    phases.end("jax")
    from serving.bundles import open_model
    from serving.engine import Engine
    from serving.loading import LoadedModel
    from serving.request import GenerationConfig, Session

    phases.end("engine")
    bundle = open_model(model)
    loaded = LoadedModel(bundle, read_ahead=False)
    phases.end("model")
    engine, session = Engine(loaded), Session()
    runner = loaded.runner(engine.level)
    runner.fill(runner.all_buckets())
    phases.end("buckets")
    runner.rehearse()
    config = GenerationConfig(max_tokens=2, ignore_eos=True)
    engine.stream([0], config, session=session).result()
    memory = phases.end("other")
    weights = memory.files.get(str(bundle.path.resolve()), 0)
    return {
        "model": loaded.name,
        "anonymous": {name: phases.bytes[name] for name in _NAMES},
        "anonymous_bytes": memory.anonymous,
        "weights_bytes": weights,
        "libraries_bytes": sum(memory.files.values()) - weights,
        "resident_bytes": memory.resident,
        # Native caches take memory as they fill.
        "cache_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(session.cache)),
        "peak_bytes": memory.peak,
        **loaded.facts(),
    }


def _megabytes(size: int) -> str:
    return f"{size / _MEGABYTE:8.1f} MB"
