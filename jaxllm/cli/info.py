"""`jaxllm info`: describes a bundle and the device, or a checkpoint, and verifies bundles."""

import collections
import gc
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxllm.cli.console import print_json
from jaxllm.cli.lazy import EngineCommand
from jaxllm.cli.shared_options import json_option, path_argument
from jaxllm.serving.host.machine import ProcessMemory, give_back_memory, process_memory
from jaxllm.version import __version__

if TYPE_CHECKING:
    from jaxllm.bundle import Bundle


class _InfoCommand(EngineCommand):
    """`jaxllm info`; with --memory it measures the import of JAX."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        if not ctx.params["memory"]:
            return super().invoke(ctx)
        if ctx.params["verify"]:
            raise click.UsageError("give --verify or --memory, not both")

        return print_memory(ctx.params["bundle"], as_json=ctx.params["as_json"])


@click.command("info", cls=_InfoCommand)
@path_argument("bundle", required=False)
@click.option("--verify", is_flag=True, help="Read the whole file and check every checksum.")
@click.option(
    "--memory", is_flag=True, help="Start the model and write its memory use instead of other facts."
)
@json_option
def info_command(bundle: Path | None, verify: bool, memory: bool, as_json: bool) -> None:
    """Describe a bundle or a checkpoint, and this device.

    Reads BUNDLE, a file or a packaged model's name (default: default), and writes a line for each fact: its
    size and shape, levels and experts, and the kernels that run it here. For a Hugging Face folder or a GGUF
    file: its family, supported features, and its memory at each width.

    \b
    Example:
      jaxllm info model.jaxllm --verify
      jaxllm info model.jaxllm --memory
      jaxllm info path/to/folder
    """
    del memory  # See `_InfoCommand`.
    import jax

    from jaxllm.bundle import Bundle
    from jaxllm.bundle.images import image_encoder_facts
    from jaxllm.cli.checkpoint_facts import checkpoint_facts, is_checkpoint
    from jaxllm.errors import CheckpointError
    from jaxllm.host_settings import require_usable_jax
    from jaxllm.kernels import native
    from jaxllm.models.parameters import parameter_count
    from jaxllm.serving.ground.bundles import find_model

    path = find_model(bundle)
    if is_checkpoint(path):
        if verify:
            raise CheckpointError(f"{path} has no checksums to verify; prepare it, then verify the bundle")
        _show(checkpoint_facts(path), as_json)
        return
    require_usable_jax()
    chosen = native.kernels()
    with Bundle.open(path) as opened:
        if verify:
            opened.verify()
        files = opened.tokenizer_files()
        # Tasks of an encoder-decoder, and sampling parameters that the model's authors recommend.
        named = {"tasks": files.tasks, "sampling": files.sampling}
        facts = {
            "model": opened.layout.name,
            "weights": opened.layout.weights,
            "parameters": parameter_count(opened.cfg),
            "file_bytes": path.stat().st_size,
            "fingerprint": opened.fingerprint,
            "verified": verify,
            **_levels(opened),
            **{name: dict(each) for name, each in named.items() if each},
            **image_encoder_facts(opened),
            **_experts(opened),
            "config": opened.cfg.to_json(),
            "jaxllm": __version__,
            "jax": jax.__version__,
            "device": str(jax.devices()[0].device_kind),
            "kernels": chosen.name,
            "kernels_reason": chosen.reason,
            "kernels_available": list(chosen.choices),
            "kernels_built": list(chosen.built),
            "kernels_left_out": dict(chosen.left_out),
            "kernel_threads": native.threads(),
        }
    _show(facts, as_json)


def _show(facts: dict[str, Any], as_json: bool) -> None:
    """Writes facts as JSON or one per line."""
    if as_json:
        print_json(facts)
        return
    for part in ("rooms", "memory_bytes"):
        facts |= {f"{part}: {key}": value for key, value in facts.pop(part, {}).items()}
    facts |= facts.pop("config")
    width = max(map(len, facts))
    # Plain lines: columns would cut a fingerprint to the width of a terminal.
    for key, value in facts.items():
        click.echo(f"{key:<{width}}  {value}")


def _experts(bundle: "Bundle") -> dict[str, Any]:
    """The widths of separately stored experts, and their calibration."""
    from jaxllm.bundle.calibrations import expert_facts
    from jaxllm.serving.experts.store import ExpertStore

    if not bundle.layout.experts_apart:
        return {}
    store = ExpertStore(bundle)
    keys = itertools.product(range(len(store.layers)), range(store.experts))
    widths = collections.Counter(store[key].bits for key in keys)
    return {
        "expert_widths": {str(bits): widths[bits] for bits in sorted(widths)},
        "calibration": expert_facts(bundle),
    }


def _levels(bundle: "Bundle") -> dict[str, Any]:
    """The levels of an elastic bundle."""
    from jaxllm.bundle.levels import read_ladder
    from jaxllm.bundle.tiny_lm import read_tiny_lm

    ladder = read_ladder(bundle)
    if ladder is None:
        return {}
    return {
        "levels": list(ladder.levels),
        "anchors": list(ladder.anchors),
        "tiny_lm": read_tiny_lm(bundle) is not None,
    }


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
    """Growth of anonymous memory by phases of startup."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self._before = 0

    def end(self, name: str) -> ProcessMemory:
        """Ends a phase, after returning freed memory to the system."""
        gc.collect()
        give_back_memory()
        memory = process_memory()
        self.bytes[name], self._before = memory.anonymous - self._before, memory.anonymous
        return memory


def print_memory(model: Path | None, *, as_json: bool) -> None:
    """Opens a model, prepares all of its buckets, answers a prompt, and prints the memory use.

    Raises:
      ConfigError: the system does not report memory.
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
    """Memory use after starting with a model, in bytes; does the imports of a start, phase by phase.

    Raises:
      ConfigError, JaxllmError: see `print_memory`.
    """
    phases = _Phases()
    phases.end("python")
    from jaxllm.serving.host.jax_import import import_jax

    import_jax()
    import jax

    jax.devices()
    phases.end("jax")
    from jaxllm.serving.engine.engine import Engine
    from jaxllm.serving.engine.request import GenerationConfig, Session
    from jaxllm.serving.ground.bundles import open_model
    from jaxllm.serving.opening.loading import LoadedModel

    phases.end("engine")
    bundle = open_model(model)
    loaded = LoadedModel(bundle, read_ahead=False)
    phases.end("model")
    engine, session = Engine(loaded), Session()
    runner = loaded.runner(engine.level)
    runner.fill(runner.buckets_for())
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
        # Native caches commit pages as they fill.
        "cache_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(session.cache)),
        "peak_bytes": memory.peak,
        **loaded.facts(),
    }


def _megabytes(size: int) -> str:
    return f"{size / _MEGABYTE:8.1f} MB"
