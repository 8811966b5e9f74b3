"""`jaxllm info`: describes a bundle and the device, or a checkpoint before conversion; verifies bundles."""

import collections
import dataclasses
import gc
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxllm.cli.console import print_json
from jaxllm.cli.shared_options import json_option, model_argument
from jaxllm.formats import WEIGHT_FORMATS, WeightFormat
from jaxllm.serving.host.allocator import STAGES, give_back_memory
from jaxllm.serving.host.process_memory import children_bytes, process_memory
from jaxllm.version import __version__

if TYPE_CHECKING:
    from jaxllm.bundle import Bundle
    from jaxllm.checkpoints.huggingface import Checkpoint
    from jaxllm.config import ModelConfig


@click.command("info")
@model_argument("bundle", required=False)
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
    if memory:
        # Measures the import of JAX.
        if verify:
            raise click.UsageError("give --verify or --memory, not both")
        _print_memory(bundle, as_json=as_json)
        return
    from jaxllm.serving.host.jax_import import import_jax

    import_jax()
    import jax

    from jaxllm.bundle import Bundle
    from jaxllm.bundle.images import image_encoder_facts
    from jaxllm.checkpoints.gguf_file import is_gguf
    from jaxllm.errors import CheckpointError
    from jaxllm.host_settings import require_usable_jax
    from jaxllm.kernels import native
    from jaxllm.models.parameters import parameter_count
    from jaxllm.serving.ground.bundles import find_model

    path = find_model(bundle)
    if path.is_dir() or is_gguf(path):
        if verify:
            raise CheckpointError(f"{path} has no checksums to verify; prepare it, then verify the bundle")
        _show(_checkpoint_facts(path), as_json)
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
            **_chosen_weights(opened),
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


def _chosen_weights(bundle: "Bundle") -> dict[str, Any]:
    """What `--weights auto` chose, and its loss."""
    part = bundle.load_part("chosen_weights")
    return {} if part is None else {"chosen_weights": part.facts}


_CONTEXTS_TOKENS = (2048, 8192)
_GROUP = 32


def _checkpoint_facts(path: Path) -> dict[str, Any]:
    """Facts of a Hugging Face folder or a GGUF file; reads only headers of weights, and a folder's first
    matrices."""
    from jaxllm.checkpoints.gguf_config import read_gguf_config
    from jaxllm.checkpoints.gguf_file import read_gguf
    from jaxllm.checkpoints.gguf_model import own_format
    from jaxllm.checkpoints.huggingface import Checkpoint
    from jaxllm.errors import CheckpointError
    from jaxllm.models.features import FEATURES, feature_refusal
    from jaxllm.models.parameters import parameter_count
    from jaxllm.prepare import model_name

    if path.is_dir():
        checkpoint = Checkpoint(path)
        quantization, cfg, own = checkpoint.quantization, checkpoint.cfg, checkpoint.weight_format
        stored = _floats(checkpoint) if quantization is None else quantization.method
    else:
        file = read_gguf(path)
        try:
            own = own_format(file)
        except CheckpointError as error:
            own = str(error)
        cfg, stored = read_gguf_config(file), ", ".join(sorted({each.kind for each in file.tensors.values()}))
    return {
        "model": model_name(path),
        "family": cfg.model_type,
        "parameters": parameter_count(cfg),
        "stored": stored,
        "weights": own,
        "rooms": {room: feature_refusal(cfg, room) or "yes" for room in FEATURES},
        "memory_bytes": {width: _memory(cfg, width) for width in WEIGHT_FORMATS},
        "config": dataclasses.asdict(cfg),
    }


def _floats(checkpoint: "Checkpoint") -> str:
    """Description of a folder of floats, by the first matrix of a layer."""
    import numpy as np

    from jaxllm.models.parameters import param_specs
    from jaxllm.quant.formats import on_grid

    specs = param_specs(checkpoint.cfg)
    matrix = next((value for name, value in checkpoint.params() if specs[name].role == "to_units"), None)
    if matrix is not None:
        rows = np.asarray(matrix, np.float32).reshape(-1, matrix.shape[-1])
        whole = rows[:, : rows.shape[1] // _GROUP * _GROUP]
        if whole.size and on_grid(whole.reshape(-1, _GROUP)):
            return "floats on a grid of 4 bits, which --weights int4 keeps"
    return "floats"


def _memory(cfg: "ModelConfig", width: WeightFormat) -> dict[str, int]:
    """Bytes of weights, of weights with caches and activations for each context length of the model, and
    values of `--memory` for the usual context: enough for resident weights, and the minimum for streamed
    ones."""
    from jaxllm.models.features import feature_refusal
    from jaxllm.models.parameters import param_specs
    from jaxllm.serving.ground.options import EngineOptions
    from jaxllm.serving.weights.memory_plan import SLOTS, fixed_bytes, outputs_bytes, whole_budget
    from jaxllm.serving.weights.resident_part import kept_rows_bytes
    from jaxllm.weight_choice import WeightPlan

    plan = WeightPlan(width)
    sizes = {name: plan.parameter_bytes(name, cfg) for name in param_specs(cfg)}
    weights, quantized = sum(sizes.values()), width not in ("f32", "bf16")
    found = {"weights": weights}
    for tokens in _CONTEXTS_TOKENS:
        if tokens <= cfg.window_tokens:
            options = EngineOptions(context_tokens=tokens).resolve(cfg, quantized=quantized)
            found[f"with {tokens} tokens"] = weights + fixed_bytes(cfg, options)
    fixed = fixed_bytes(cfg, EngineOptions().resolve(cfg, quantized=quantized))
    found["--memory for all"] = whole_budget(weights + fixed)
    # Of each layer; under an empty name those of no layer.
    layers, experts = collections.Counter[str](), collections.Counter[str]()
    for name, size in sizes.items():
        lead, inside, _ = name.partition("layers.")
        layers[lead + name.split(inside)[1].split(".")[0] if inside else ""] += size
        layer, apart, _ = name.partition(".experts.")
        experts[layer if apart else ""] += size
    if feature_refusal(cfg, "streamed weights") is None:
        del layers[""]
        slots = SLOTS * max(layers.values())
        found["least --memory"] = whole_budget(fixed + kept_rows_bytes(weights) + slots)
    if feature_refusal(cfg, "separate experts") is None:
        # Each expert is read when a token visits it: those that one visits at one layer.
        staying = experts.pop("") + outputs_bytes(cfg, EngineOptions().resolve(cfg))
        visited = max(experts.values()) * cfg.experts_per_token // cfg.experts
        found["least --memory, separate experts"] = whole_budget(fixed + staying + visited)
    return found


_MEGABYTE = 1e6
_WIDTH = 24
# Names of the stages of a start (see `jaxllm.serving.host.allocator.Stages`).
_NAMES = {
    "python": "Python and this command",
    "jax": "JAX and XLA",
    "modules": "the engine's modules",
    "weights": "weight tables",
    "tokenizer": "tokenizer",
    "buckets": "compiled buckets",
    "answer": "a cache, first runs",
}


def _print_memory(model: Path | None, *, as_json: bool) -> None:
    """Opens a model as the service does, answers a prompt, and prints the memory use."""
    facts = _memory_facts(model)
    if as_json:
        print_json(facts)
        return
    for part in ("anonymous", "pages"):
        for name, size in facts[part].items():
            click.echo(f"{_NAMES.get(name, name.replace('_', ' ')):<{_WIDTH}}  {_megabytes(size)}")
        if part == "anonymous":
            click.echo(f"{'together':<{_WIDTH}}  {_megabytes(facts['anonymous_bytes'])}")
            click.echo("of these pages:")
    for name in ("weights_bytes", "libraries_bytes", "resident_bytes", "peak_bytes", "children_bytes"):
        click.echo(f"{name.removesuffix('_bytes'):<{_WIDTH}}  {_megabytes(facts[name])}")
    click.echo(f"{'a cache, when full':<{_WIDTH}}  {_megabytes(facts['cache_bytes'])}")
    buckets = f"{facts['loaded_buckets']} from disk, {facts['compiled_buckets']} compiled"
    click.echo(f"{'buckets':<{_WIDTH}}  {buckets}")


def _memory_facts(model: Path | None) -> dict[str, Any]:
    """Memory use after starting with a model, in bytes; does the imports of a start, stage by stage."""
    # Fails early where the system does not report it.
    process_memory()
    from jaxllm.serving.host.jax_import import import_jax

    import_jax()
    import jax

    from jaxllm.serving.engine.request import GenerationConfig, Session
    from jaxllm.serving.ground.options import EngineOptions
    from jaxllm.serving.opening.engine import Engine

    engine, session = Engine.open(model, options=EngineOptions(spare_memory=True)), Session()
    loaded = engine.model
    config = GenerationConfig(max_tokens=2, ignore_eos=True)
    engine.stream([0], config, session=session).result()
    gc.collect()
    give_back_memory()
    memory = process_memory()
    # All else is of the answer, less what has been freed since each stage ended.
    grown = dict(STAGES.grown)
    grown["answer"] = memory.anonymous - sum(grown.values())
    weights = memory.files.get(str(loaded.bundle.path.resolve()), 0)
    return {
        "model": loaded.name,
        "anonymous": {name: grown.get(name, 0) for name in _NAMES},
        "anonymous_bytes": memory.anonymous,
        "pages": dict(memory.kinds),
        "weights_bytes": weights,
        "libraries_bytes": sum(memory.files.values()) - weights,
        "resident_bytes": memory.resident,
        "children_bytes": children_bytes(),
        # Native caches commit pages as they fill.
        "cache_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(session.cache)),
        "peak_bytes": memory.peak,
        **loaded.facts(),
    }


def _megabytes(size: int) -> str:
    return f"{size / _MEGABYTE:8.1f} MB"
