"""Describes a checkpoint before conversion: its family, supported features and memory."""

import collections
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.checkpoints.gguf_file import is_gguf
from jaxllm.config import ModelConfig
from jaxllm.formats import WEIGHT_FORMATS, WeightFormat
from jaxllm.models.features import ROOMS, room_refusal
from jaxllm.models.parameters import ParamSpec, param_specs, parameter_count

if TYPE_CHECKING:
    from jaxllm.checkpoints.huggingface import Checkpoint

CONTEXTS_TOKENS = (2048, 8192)
_FLOAT_BYTES = {"f32": 4, "bf16": 2}
_GROUP = 32


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a Hugging Face folder or a GGUF file."""
    return path.is_dir() or is_gguf(path)


def checkpoint_facts(path: Path) -> dict[str, Any]:
    """Facts of a Hugging Face folder or a GGUF file; reads only headers of weights, and a folder's first
    matrices.

    Raises:
      CheckpointError, ConfigError: the checkpoint is missing, malformed or not supported.
    """
    cfg, own, stored = _read(path)
    return {
        "model": path.stem if path.is_file() else path.resolve().name,
        "family": cfg.model_type,
        "parameters": parameter_count(cfg),
        "stored": stored,
        "weights": own,
        "rooms": {room: room_refusal(cfg, room) or "yes" for room in ROOMS},
        "memory_bytes": {width: _memory(cfg, width) for width in WEIGHT_FORMATS},
        "config": dataclasses.asdict(cfg),
    }


def _read(path: Path) -> tuple[ModelConfig, WeightFormat | str, str]:
    """The config, the default format of `prepare`, and the format of the checkpoint."""
    if path.is_dir():
        from jaxllm.checkpoints.huggingface import Checkpoint

        checkpoint = Checkpoint(path)
        quantization = checkpoint.quantization
        stored = _floats(checkpoint) if quantization is None else quantization.method
        return checkpoint.cfg, checkpoint.weight_format, stored
    from jaxllm.checkpoints.gguf_config import read_gguf_config
    from jaxllm.checkpoints.gguf_file import read_gguf
    from jaxllm.checkpoints.gguf_model import own_format
    from jaxllm.errors import CheckpointError

    file = read_gguf(path)
    kinds = sorted({each.kind for each in file.tensors.values()})
    try:
        own = own_format(file)
    except CheckpointError as error:
        own = str(error)
    return read_gguf_config(file), own, ", ".join(kinds)


def _floats(checkpoint: "Checkpoint") -> str:
    """Description of a folder of floats, by the first matrix of a layer."""
    from jaxllm.quant.formats import on_grid

    specs = param_specs(checkpoint.cfg)
    for name, value in checkpoint.params():
        if specs[name].role == "to_units":
            rows = np.asarray(value, np.float32).reshape(-1, value.shape[-1])
            whole = rows[:, : rows.shape[1] // _GROUP * _GROUP]
            if whole.size and on_grid(whole.reshape(-1, _GROUP)):
                return "floats on a grid of 4 bits, which --weights int4 keeps"
            break
    return "floats"


def _memory(cfg: ModelConfig, width: WeightFormat) -> dict[str, int]:
    """Bytes of weights, of weights with caches and activations for each context length of the model, and
    values of `--memory` for the usual context: enough for resident weights, and the minimum for streamed
    ones."""
    from jaxllm.serving.ground.options import EngineOptions
    from jaxllm.serving.weights.memory_plan import SLOTS, fixed_bytes, whole_budget
    from jaxllm.serving.weights.streamed import kept_rows_bytes

    sizes = {name: _bytes(spec, width) for name, spec in param_specs(cfg).items()}
    weights = sum(sizes.values())
    found = {"weights": weights}
    for tokens in CONTEXTS_TOKENS:
        if tokens <= cfg.window_tokens:
            options = EngineOptions(context_tokens=tokens).resolve(cfg, quantized=width not in _FLOAT_BYTES)
            found[f"with {tokens} tokens"] = weights + fixed_bytes(cfg, options)
    fixed = fixed_bytes(cfg, EngineOptions().resolve(cfg, quantized=width not in _FLOAT_BYTES))
    found["--memory for all"] = whole_budget(weights + fixed)
    if room_refusal(cfg, "streamed weights") is None:
        layers: collections.Counter[str] = collections.Counter()
        for name, size in sizes.items():
            lead, inside, _ = name.partition("layers.")
            layers[lead + name.split(inside)[1].split(".")[0] if inside else ""] += size
        del layers[""]
        slots = SLOTS * max(layers.values())
        found["least --memory"] = whole_budget(fixed + kept_rows_bytes(weights) + slots)
    if room_refusal(cfg, "experts apart") is None:
        found["least --memory, experts apart"] = _least_with_experts_apart(cfg, sizes, fixed)
    return found


def _least_with_experts_apart(cfg: ModelConfig, sizes: Mapping[str, int], fixed: int) -> int:
    """The minimum `--memory` if each expert is read when a token visits it: it includes the experts that a
    token visits at one layer. `sizes` are bytes of each parameter, `fixed` of everything but weights."""
    from jaxllm.serving.ground.options import EngineOptions
    from jaxllm.serving.weights.memory_plan import outputs_bytes, whole_budget

    layers: collections.Counter[str] = collections.Counter()
    for name, size in sizes.items():
        layer, apart, _ = name.partition(".experts.")
        layers[layer if apart else ""] += size
    staying = layers.pop("")
    visited = max(layers.values()) * cfg.experts_per_token // cfg.experts
    return whole_budget(fixed + outputs_bytes(cfg, EngineOptions().resolve(cfg)) + staying + visited)


def _bytes(spec: ParamSpec, width: WeightFormat) -> int:
    """Bytes of a parameter in a format, without padding."""
    count = math.prod(spec.shape)
    if spec.role == "vector":
        return 4 * count
    if width in _FLOAT_BYTES:
        return _FLOAT_BYTES[width] * count
    if width in ("int8", "int8-nested") or (width in ("int4", "int4-min") and spec.role == "embed"):
        return count
    # Two numbers per byte, and for each 32 a scale (and a minimum) of two bytes.
    return count // 2 + count // (8 if width == "int4-min" else 16)
