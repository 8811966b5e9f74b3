"""`jaxllm info`: describes a bundle and the device, or a checkpoint, and checks that the bundle is whole."""

import collections
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import jaxllm
from serving.commands.console import print_json
from serving.commands.lazy import EngineCommand
from serving.commands.shared_options import json_option

if TYPE_CHECKING:
    from jaxllm.bundle import Bundle


class _InfoCommand(EngineCommand):
    """`jaxllm info`, which itself imports JAX where it measures that."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        if not ctx.params["memory"]:
            return super().invoke(ctx)
        if ctx.params["verify"]:
            raise click.UsageError("give --verify or --memory, not both")
        from serving.commands.memory import print_memory

        return print_memory(ctx.params["bundle"], as_json=ctx.params["as_json"])


@click.command("info", cls=_InfoCommand)
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Read the whole file and check every checksum.")
@click.option(
    "--memory", is_flag=True, help="Start the model, and write what holds memory then, in place of the rest."
)
@json_option
def info_command(bundle: Path | None, verify: bool, memory: bool, as_json: bool) -> None:
    """Describe a bundle and this device, or what could become one.

    Reads BUNDLE, a file or a packaged model's name (default: default), and writes a line for each fact: its
    size and shape, its levels and experts, and the kernels that run it here. Of a Hugging Face folder or a
    GGUF file: its family, what it supports, and the memory that it would take at each width.

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
    from jaxllm.errors import CheckpointError
    from jaxllm.kernels import native
    from jaxllm.models.parameters import parameter_count
    from serving.bundles import find_model
    from serving.commands.checkpoint_facts import checkpoint_facts, is_checkpoint

    path = find_model(bundle)
    if is_checkpoint(path):
        if verify:
            raise CheckpointError(f"{path} has no checksums to verify; prepare it, then verify the bundle")
        _show(checkpoint_facts(path), as_json)
        return
    chosen = native.kernels()
    with Bundle.open(path) as opened:
        if verify:
            opened.verify()
        facts = {
            "model": opened.layout.name,
            "weights": opened.layout.weights,
            "parameters": parameter_count(opened.cfg),
            "file_bytes": path.stat().st_size,
            "fingerprint": opened.fingerprint,
            "verified": verify,
            **_levels(opened),
            **_tasks(opened),
            **image_encoder_facts(opened),
            **_experts(opened),
            "config": opened.cfg.to_json(),
            "jaxllm": jaxllm.__version__,
            "jax": jax.__version__,
            "device": str(jax.devices()[0].device_kind),
            "kernels": chosen.name,
            "kernels_reason": chosen.reason,
            "kernels_available": list(chosen.choices),
            "kernel_threads": native.threads(),
        }
    _show(facts, as_json)


def _show(facts: dict[str, Any], as_json: bool) -> None:
    """Writes facts as JSON, or as a line for each."""
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
    """The widths of experts that are stored apart, and their calibration."""
    from jaxllm.bundle.experts import expert_facts
    from serving.weights.experts.store import ExpertStore

    if not bundle.layout.experts_apart:
        return {}
    store = ExpertStore(bundle)
    keys = itertools.product(range(len(store.layers)), range(store.experts))
    widths = collections.Counter(store[key].bits for key in keys)
    return {
        "expert_widths": {str(bits): widths[bits] for bits in store.widths},
        "calibration": expert_facts(bundle),
    }


def _tasks(bundle: "Bundle") -> dict[str, Any]:
    """The tasks of an encoder-decoder and their prefixes, if it names any."""
    tasks = bundle.tokenizer_files().tasks
    return {"tasks": dict(tasks)} if tasks else {}


def _levels(bundle: "Bundle") -> dict[str, Any]:
    """The levels of an elastic bundle."""
    from jaxllm.bundle.elastic import read_ladder
    from jaxllm.bundle.tiny_lm import read_tiny_lm

    ladder = read_ladder(bundle)
    if ladder is None:
        return {}
    return {
        "levels": list(ladder.levels),
        "anchors": list(ladder.anchors),
        "tiny_lm": read_tiny_lm(bundle) is not None,
    }
