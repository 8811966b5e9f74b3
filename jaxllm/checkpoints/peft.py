"""Reads and writes low-rank adapters in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`.

The config is read by an allow-list: every key is understood, inert, or refused by name. Keys that select
modules, ranks and alphas are regular expressions or suffixes of module names, matched as PEFT matches them.

PEFT calls the factor on the input's side of a linear map A `[r, in]`, and the one on the output's side B
`[out, r]`. Ours are `left`, on the units' side, and `right`, on the model width's side. If the checkpoint
has several of our matrices in one tensor (Phi-3's q, k and v), their adapters are one adapter of PEFT with
the sum of their ranks.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.checkpoints.safetensors_folder import FLOATS, SafetensorsFolder, some, write_checkpoint
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files.input_files import read_json
from jaxllm.models.architectures import architecture
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.lora import (
    MAX_RANK,
    TARGETS,
    Adapter,
    LoraConfig,
    adapter_shapes,
    parameters_of,
    target_of,
)
from jaxllm.models.parameters import param_specs
from jaxllm.models.translate import Tensor, swap_pairs
from jaxllm.text.child_process import first_matches, match_here

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_BASE = "base_model.model."

# Keys without effect on a trained adapter.
INERT_KEYS = frozenset(
    {
        # Book-keeping.
        "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision",
        "runtime_config", "task_type",
        # Only training reads it.
        "lora_dropout",
        # For initial values: `init_lora_weights` defines whether these change the base's weights.
        "corda_config", "eva_config", "lora_ga_config", "loftq_config",
        # PEFT sets it by the module, regardless of the value. The factors are stored in the same way.
        "fan_in_fan_out",
        # For layers that transformers' models do not have.
        "megatron_config", "megatron_core",
        # For the embedding, whose factors are refused as tensors.
        "ensure_weight_tying",
        # Without `use_qalora`.
        "qalora_group_size",
    }
)  # fmt: skip
# Settings that change the arithmetic -> their values for plain LoRA.
PLAIN_VALUES: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "use_bdlora": (None, False),
    "velora_config": (None,),
}
# Initial values that leave the base's weights unchanged.
PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
READ_KEYS = frozenset(
    {
        "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights",
        "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    }
)  # fmt: skip

_MERGE = (
    "where PEFT can, merge it into its base (merge_and_unload, save_pretrained) and take the merged model"
)


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """One adapter's config.

    Attributes:
      lora: rank and scaling by default; its targets are not those of the adapter.
      ranks: pattern -> rank of matching modules; the first match counts.
      alphas: the same for alpha.
      targets: adapted modules, as a regular expression or as names and their endings; None for all.
      excluded: modules that are not adapted, in the same format.
      layers: numbers of the adapted layers; None for all.
      layer_lists: expressions for the name of the list of layers; none for any.
    """

    lora: LoraConfig
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    targets: str | tuple[str, ...] | None
    excluded: str | tuple[str, ...]
    layers: tuple[int, ...] | None
    layer_lists: tuple[str, ...]

    def of_modules(self, modules: Sequence[str]) -> dict[str, LoraConfig]:
        """Rank and scaling of each of some modules of the adapted checkpoint.

        Raises:
          ConfigError: an expression is malformed, or its match takes too long.
        """
        excluded = set(_selected(self.excluded, modules))
        adapted = [module for module in modules if module not in excluded]
        if self.targets is not None:
            adapted = _selected(self.targets, adapted)
        if self.layers is not None and isinstance(self.targets, tuple):
            number = r"\.(?P<idx>\d+)\."
            if self.layer_lists:
                found = first_matches(self.layer_lists, adapted, before=r"(?:^|.*?\.)", after=number)
            else:
                found = match_here([rf".*?\.[^.]*{number}"], adapted)
            adapted = [
                module
                for module, match in zip(adapted, found, strict=True)
                # The last group is ours.
                if match is not None and int(match[1][-1] or 0) in self.layers
            ]
        ranks, alphas = _by_pattern(self.ranks, adapted), _by_pattern(self.alphas, adapted)
        return {
            module: dataclasses.replace(
                self.lora, rank=ranks.get(module, self.lora.rank), alpha=alphas.get(module, self.lora.alpha)
            )
            for module in adapted
        }


def find_adapter(folder: str | Path) -> Path:
    """The folder of an adapter: a packaged one by its name, unless a folder has that name."""
    packaged = Path(__file__).parents[1] / "assets" / f"{Path(folder).name}_adapter"
    return Path(folder) if Path(folder).exists() or not packaged.is_dir() else packaged


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Reads the config in a folder.

    Raises:
      CheckpointError: there is no config, or it is not a JSON object.
      ConfigError: a key is unknown or malformed, or the adapter is not plain LoRA.
    """
    path = folder / CONFIG_FILE
    config = read_json(path, "give a folder that PEFT's save_pretrained wrote")
    reader = ConfigReader(config, f"{path}: ")
    for key, allowed in PLAIN_VALUES.items():
        reader.only(key, allowed, f"jaxllm reads plain LoRA; {_MERGE}")
    for key in config.keys() - READ_KEYS - INERT_KEYS - PLAIN_VALUES.keys():
        value = config[key]
        if value is not None and value is not False:
            raise ConfigError(
                f"{path} has the unknown key {key!r:.80} (value {value!r:.80}), which may change what the "
                f"adapter computes: {_MERGE}"
            )
    init = config.get("init_lora_weights", True)
    if not any(init is each or (isinstance(init, str) and init.lower() == each) for each in PLAIN_INITS):
        raise ConfigError(
            f"{path} has init_lora_weights {init!r:.80}, which is not known to leave the base model's "
            "weights as they are: its factors may belong to other weights. Have PEFT convert it "
            f"(path_initial_model_for_weight_conversion of save_pretrained), or, {_MERGE}"
        )

    def names(key: str) -> str | tuple[str, ...] | None:
        return reader.text(key, "") if isinstance(config.get(key), str) else reader.texts(key)

    try:
        lora = LoraConfig(
            rank=config["r"], alpha=config["lora_alpha"], rank_stabilized=reader.flag("use_rslora", False)
        )
    except KeyError as error:
        raise ConfigError(f"{path} lacks {error}; give a config that PEFT wrote") from error
    if not lora.rank:
        raise ConfigError(f"{path} has r 0; an adapter of PEFT has a rank of at least 1")
    targets, lists, layers = names("target_modules"), names("layers_pattern"), "layers_to_transform"
    return AdapterConfig(
        lora=lora,
        ranks=_read_pattern(config, "rank_pattern"),
        alphas=_read_pattern(config, "alpha_pattern"),
        # "all-linear" is every linear map: the tensors define which.
        targets=None if isinstance(targets, str) and targets.lower() == "all-linear" else targets,
        excluded=names("exclude_modules") or (),
        layers=(config[layers],) if type(config.get(layers)) is int else reader.integers(layers) or None,
        layer_lists=(lists,) if isinstance(lists, str) and lists else tuple(lists or ()),
    )


def _read_pattern(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise ConfigError(f"{key} of an adapter must be an object, got {patterns!r:.80}")
    for name, value in patterns.items():
        # The config of a layer checks the value, whether or not a module has it.
        made = LoraConfig(rank=value) if key == "rank_pattern" else LoraConfig(alpha=value)
        if not made.rank:
            raise ConfigError(
                f"rank_pattern of an adapter has rank 0 for {name!r:.80}; it must be at least 1"
            )
    return patterns


def _by_pattern(values: Mapping[str, Any], modules: Sequence[str]) -> dict[str, Any]:
    """Module -> the value of the first matching pattern, like PEFT's `get_pattern_key`."""
    keys = list(values)
    found = first_matches(keys, modules, before=r"(.*\.)?(", after=")$")
    return {
        module: values[keys[match[0]]]
        for module, match in zip(modules, found, strict=True)
        if match is not None
    }


def _selected(names: str | tuple[str, ...], modules: Sequence[str]) -> list[str]:
    """The modules selected by an expression, or by names and their endings (`check_target_module_exists`)."""
    if not isinstance(names, str):
        endings = tuple(f".{each}" for each in names)
        return [module for module in modules if module in names or module.endswith(endings)]
    if not names:
        return []
    found = first_matches([names], modules, full=True)
    return [module for module, match in zip(modules, found, strict=True) if match is not None]


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
      folder: folder, created if missing; each of its two files is replaced atomically.
      adapter: see `jaxllm.models.lora`.
      base: name or path of the model, for `base_model_name_or_path`.

    Raises:
      ConfigError: the adapter is not for the model.
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
            # PEFT divides each module's alpha by its own rank.
            factor = (right.shape[0] / lora.rank) ** (0.5 if lora.rank_stabilized else 1)
            # By the full name: the same map of another layer may have another rank.
            patterns[module.name] = (right.shape[0], lora.alpha * factor)
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
    changed = {key.removeprefix(_BASE)[: -len(".lora_A.weight")] for key in tensors}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if cfg.encoder is None else "SEQ_2_SEQ_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rank_stabilized,
        "lora_dropout": 0.0,
        "bias": "none",
        # Whether the checkpoint stores maps as `[in, out]` (GPT-2).
        "fan_in_fan_out": any(not each.by_units and each.tensor.transposed for each in _modules(cfg)),
        "inference_mode": True,
        # Names within the layer, which PEFT matches as suffixes.
        "target_modules": sorted({re.split(r"\.\d+\.", name, maxsplit=1)[-1] for name in changed}),
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
      ConfigError: the adapter is not plain LoRA, or its config cannot be read.
    """
    folder = find_adapter(folder)
    config = read_adapter_config(folder)
    lora = config.lora
    if not lora.scaling:
        # Patterns may have other scalings, which are relative to the config's: 1.
        lora = dataclasses.replace(lora, alpha=lora.rank, rank_stabilized=False)
    weights, stored = SafetensorsFolder(folder, WEIGHTS_FILE), {}
    for name in sorted(weights.names()):
        dtype, shape = weights.describe(name)
        if dtype not in FLOATS or len(shape) != 2 or not 1 <= min(shape) <= MAX_RANK:
            raise CheckpointError(f"{name} of {folder} is no factor of a low-rank change: {list(shape)}")
        stored[name] = weights.read(name, lambda rows: rows[:])
    parts: dict[str, dict[int | None, tuple[np.ndarray, np.ndarray]]] = {}
    modules = list(_modules(cfg))
    adapted = config.of_modules([module.name for module in modules])
    for module in modules:
        keys = [f"{_BASE}{module.name}.{part}.weight" for part in ("lora_A", "lora_B")]
        if not any(key in stored for key in keys):
            continue
        if not all(key in stored for key in keys):
            raise CheckpointError(f"{folder / WEIGHTS_FILE} lacks one of {keys[0]} and {keys[1]}")
        if module.name not in adapted:
            raise CheckpointError(
                f"{folder / WEIGHTS_FILE} holds {keys[0]}, which {CONFIG_FILE} does not select "
                "(target_modules, exclude_modules, layers_to_transform); take both files of one adapter"
            )
        own = adapted[module.name]
        a, b = (stored.pop(key).astype(np.float32) for key in keys)
        left, right = (a.T, b.T) if module.by_units else (b, a)
        if left.shape != (module.units, right.shape[0]) or right.shape[1] != module.width:
            raise CheckpointError(
                f"{keys[0]} {list(a.shape)} and {keys[1]} {list(b.shape)} of {folder} do not fit a map of "
                f"{module.units} units of width {module.width}; the adapter belongs to another model"
            )
        if right.shape[0] != own.rank:
            raise CheckpointError(
                f"{keys[0]} of {folder} has rank {right.shape[0]}, and {CONFIG_FILE} says {own.rank}; take "
                "both files of one adapter"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            left = left * np.float32(own.scaling / lora.scaling)
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
            shape = specs[name].shape
            count = int(np.prod(shape[:-1] if tensor.expert is None else shape[1:-1]))
            rows[name] = (at, at + count)
            at += count
        spec = specs[tensor.params[0]]
        name = prefix + tensor.name.removesuffix(".weight")
        yield _Module(name, tensor, rows, at, spec.shape[-1], spec.role == "from_units")


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
