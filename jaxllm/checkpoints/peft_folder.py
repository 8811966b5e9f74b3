"""Reads and writes low-rank adapters in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`.

PEFT calls the factor on the input's side of a linear map A `[r, in]`, and the one on the output's side B
`[out, r]`. Ours are `left`, on the units' side, and `right`, on the model width's side. If the checkpoint has
several of our matrices in one tensor (Phi-3's q, k and v), their adapters are one adapter of PEFT with the
sum of their ranks.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxllm.checkpoints.safetensors_folder import FLOAT_TYPES, some, write_checkpoint
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files.input_files import read_json
from jaxllm.models.architectures import architecture
from jaxllm.models.lora import (
    MAX_RANK,
    TARGETS,
    Adapter,
    LoraConfig,
    adapter_shapes,
    parameters_of,
    target_of,
)
from jaxllm.models.parameters import ParamSpec, param_specs
from jaxllm.models.translate import Tensor, swap_pairs

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_BASE = "base_model.model."
# Settings that change the mathematics -> the values of plain LoRA.
_PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
}


@dataclasses.dataclass(frozen=True)
class _Module:
    """One linear map of the checkpoint, and our parameters in it."""

    name: str
    tensor: Tensor
    # Parameter -> its first and last + 1 row among the tensor's units.
    rows: Mapping[str, tuple[int, int]]
    units: int
    width: int
    by_units: bool


def write_adapter(
    folder: Path, cfg: ModelConfig, lora: LoraConfig, adapter: Adapter, *, base: str | None = None
) -> None:
    """Writes a folder that PEFT's `PeftModel.from_pretrained` loads onto the same model.

    Args:
      folder: made if missing; each of its two files is replaced whole or not at all.
      cfg: the model.
      lora: the adapter's config.
      adapter: see `jaxllm.models.lora`.
      base: name or path of the model, for `base_model_name_or_path`.

    Raises:
      ConfigError: the adapter does not belong to the model.
    """
    names = parameters_of(adapter)
    if not lora.rank:
        raise ConfigError("an adapter of rank 0 changes nothing, and PEFT cannot express it")
    written, patterns, tensors = set(), {}, {}
    for module in _modules(cfg):
        own = [name for name in module.rows if name in names]
        if not own:
            continue
        written.update(own)
        left, right = _joined(module, {name: _factors(cfg, module, adapter, name) for name in own})
        if right.shape[0] != lora.rank:
            relative = _relative(module.name)
            # PEFT divides each module's alpha by its own rank.
            factor = (right.shape[0] / max(lora.rank, 1)) ** (0.5 if lora.rank_stabilized else 1)
            patterns[relative] = (right.shape[0], lora.alpha * factor)
        if module.tensor.interleaved:
            left = swap_pairs(left, cfg.head_dim, cfg.head_dim // 2)
        a, b = (left.T, right.T) if module.by_units else (right, left)
        for part, value in (("lora_A", a), ("lora_B", b)):
            value = np.ascontiguousarray(value, np.float32)
            key = f"{_BASE}{module.name}.{part}.weight"
            tensors[key] = (value.dtype, value.shape, lambda value=value: value)
    if missing := set(names) - written:
        raise ConfigError(
            f"the adapter changes {some(missing)}, which a {cfg.model_type} model does not have"
        )
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if cfg.encoder is None else "SEQ_2_SEQ_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rank_stabilized,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": _conv1d(cfg),
        "inference_mode": True,
        "target_modules": sorted(
            {_relative(key.removeprefix(_BASE)[: -len(".lora_A.weight")]) for key in tensors}
        ),
        "rank_pattern": {name: rank for name, (rank, _) in patterns.items()},
        "alpha_pattern": {name: alpha for name, (_, alpha) in patterns.items()},
    }
    folder = Path(folder)
    write_checkpoint(folder / CONFIG_FILE, config, folder / WEIGHTS_FILE, tensors)


def read_adapter(folder: Path, cfg: ModelConfig) -> tuple[LoraConfig, dict[str, np.ndarray]]:
    """Reads an adapter of a model.

    Returns:
      Its config, and its arrays (see `jaxllm.models.lora`) in float32. If a module has a rank or alpha of its
      own, `left` is multiplied by its scaling over the config's.

    Raises:
      CheckpointError: the files are missing, corrupt, or belong to another model.
      ConfigError: the adapter is no plain LoRA.
    """
    folder = Path(folder)
    config = read_json(folder / CONFIG_FILE, "give a folder that PEFT's save_pretrained wrote")
    for key, plain in _PLAIN.items():
        if config.get(key, plain[0]) not in plain:
            raise ConfigError(
                f"{folder / CONFIG_FILE} has {key} {config[key]!r:.80}; "
                f"jaxllm reads plain LoRA ({plain[0]!r})"
            )
    lora = _read_config(folder, config)
    stored = _read_tensors(folder)
    parts: dict[str, dict[int | None, tuple[np.ndarray, np.ndarray]]] = {}
    for module in _modules(cfg):
        keys = [f"{_BASE}{module.name}.{part}.weight" for part in ("lora_A", "lora_B")]
        if not any(key in stored for key in keys):
            continue
        if not all(key in stored for key in keys):
            raise CheckpointError(f"{folder / WEIGHTS_FILE} lacks one of {keys[0]} and {keys[1]}")
        a, b = (stored.pop(key).astype(np.float32) for key in keys)
        left, right = (a.T, b.T) if module.by_units else (b, a)
        if left.shape != (module.units, right.shape[0]) or right.shape[1] != module.width:
            raise CheckpointError(
                f"{keys[0]} {list(a.shape)} and {keys[1]} {list(b.shape)} of {folder} do not fit a map of "
                f"{module.units} units of width {module.width}; the adapter belongs to another model"
            )
        if not (np.isfinite(left).all() and np.isfinite(right).all()):
            raise CheckpointError(f"{keys[0]} or {keys[1]} of {folder} holds numbers that are not finite")
        with np.errstate(over="ignore", invalid="ignore"):
            left = left * np.float32(_own_scaling(config, module.name, right.shape[0], lora))
        if not np.isfinite(left).all():
            raise CheckpointError(f"{keys[0]} of {folder} is scaled beyond what floats hold")
        if module.tensor.interleaved:
            left = swap_pairs(left, cfg.head_dim, 2)
        for name, (first, last) in module.rows.items():
            parts.setdefault(name, {})[module.tensor.expert] = (left[first:last], right)
    if stored:
        raise CheckpointError(
            f"{folder / WEIGHTS_FILE} holds {some(stored)}, which a {cfg.model_type} model lacks"
        )
    if not parts:
        raise CheckpointError(f"{folder / WEIGHTS_FILE} holds no change to any matrix of this model")
    adapter: dict[str, np.ndarray] = {}
    for name, pieces in parts.items():
        adapter[f"{name}.left"], adapter[f"{name}.right"] = _stacked(cfg, name, pieces)
    targets = tuple(each for each in TARGETS if any(target_of(name) == each for name in parts))
    return dataclasses.replace(lora, targets=targets), adapter


def _modules(cfg: ModelConfig) -> Iterator[_Module]:
    family, specs = architecture(cfg.model_type), param_specs(cfg)
    for tensor in family.tensors(cfg):
        if target_of(tensor.params[0]) not in TARGETS or not tensor.name.endswith(".weight"):
            continue
        prefix = family.prefixes[0] if tensor.in_body else ""
        rows, at = {}, tensor.skip_rows
        for name in tensor.params:
            count = _units(specs[name], tensor)
            rows[name] = (at, at + count)
            at += count
        spec = specs[tensor.params[0]]
        name = prefix + tensor.name.removesuffix(".weight")
        yield _Module(name, tensor, rows, at, spec.shape[-1], spec.role == "from_units")


def _units(spec: ParamSpec, tensor: Tensor) -> int:
    leading = spec.shape[:-1] if tensor.expert is None else spec.shape[1:-1]
    return int(np.prod(leading))


def _factors(cfg: ModelConfig, module: _Module, adapter: Adapter, name: str) -> tuple[np.ndarray, np.ndarray]:
    """`left` `[units, r]` and `right` `[r, D]` of a parameter's part in a module."""
    left, right = (np.asarray(adapter[f"{name}.{part}"], np.float32) for part in ("left", "right"))
    wanted = adapter_shapes(cfg, name, right.shape[-2])
    if (left.shape, right.shape) != wanted:
        raise ConfigError(
            f"the adapter's change to {name} is {list(left.shape)} times {list(right.shape)}, but the model "
            f"needs {list(wanted[0])} times {list(wanted[1])}"
        )
    if module.tensor.expert is not None:
        left, right = left[module.tensor.expert], right[module.tensor.expert]
    return left.reshape(-1, left.shape[-1]), right


def _joined(
    module: _Module, factors: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """One pair of factors for all parameters of a module: the sum of their ranks."""
    rights = [right for _, right in factors.values()]
    shared = all(np.array_equal(right, rights[0]) for right in rights)
    right = rights[0] if shared else np.concatenate(rights)
    left = np.zeros((module.units, right.shape[0]), np.float32)
    at = 0
    for name, (own, own_right) in factors.items():
        first, last = module.rows[name]
        left[first:last, at : at + own_right.shape[0]] = own
        at += 0 if shared else own_right.shape[0]
    return left, right


def _stacked(
    cfg: ModelConfig, name: str, pieces: Mapping[int | None, tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    rank = max(right.shape[0] for _, right in pieces.values())
    shapes = adapter_shapes(cfg, name, rank)
    if None in pieces:
        left, right = pieces[None]
        return left.reshape(shapes[0]), right.copy()
    left, right = (np.zeros(shape, np.float32) for shape in shapes)
    for expert, (own_left, own_right) in pieces.items():
        left[expert, ..., : own_left.shape[1]] = own_left
        right[expert, : own_right.shape[0]] = own_right
    return left, right


def _read_config(folder: Path, config: Mapping[str, Any]) -> LoraConfig:
    try:
        return LoraConfig(
            rank=config["r"],
            alpha=config["lora_alpha"],
            rank_stabilized=bool(config.get("use_rslora", False)),
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{folder / CONFIG_FILE} lacks r or lora_alpha: {error!r:.200}") from error


def _own_scaling(config: Mapping[str, Any], module: str, rank: int, lora: LoraConfig) -> float:
    """A module's scaling divided by the config's."""
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise ConfigError(f"alpha_pattern of an adapter must be an object, got {patterns!r:.80}")
    alpha = next(
        (value for key, value in patterns.items() if module == key or module.endswith(f".{key}")), lora.alpha
    )
    own = LoraConfig(rank=rank, alpha=alpha, rank_stabilized=lora.rank_stabilized).scaling
    return own / lora.scaling if lora.scaling else 0.0


def _read_tensors(folder: Path) -> dict[str, np.ndarray]:
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; jaxllm reads adapters as safetensors, never as pickles")
    try:
        tensors = {}
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118
                described = file.get_slice(name)
                shape = described.get_shape()
                if (
                    described.get_dtype() not in FLOAT_TYPES.values()
                    or len(shape) != 2
                    or not 1 <= min(shape) <= MAX_RANK
                ):
                    raise CheckpointError(
                        f"{name} of {path} is no factor of a low-rank change: {list(shape)}"
                    )
                tensors[name] = file.get_tensor(name)
        return tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is truncated or corrupt ({error}); write or download it again"
        ) from error


def _relative(module: str) -> str:
    """A module's name within its layer, which PEFT matches as a suffix."""
    parts = module.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdecimal()), -1)
    return ".".join(parts[number + 1 :])


def _conv1d(cfg: ModelConfig) -> bool:
    """Whether the checkpoint stores maps as `[in, out]` (GPT-2), which PEFT's config must say."""
    return any(not module.by_units and module.tensor.transposed for module in _modules(cfg))
