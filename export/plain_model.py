"""Makes a plain model of a bundle's level: float parameters of one config, for engines without levels.

A level's layers differ in their numbers of kv groups and neurons. Formats with one number for all layers
get the maximum, and zeros for what a layer lacks: a kv group of zeros adds nothing to its layer's output,
and neither does a neuron.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.bundle import Bundle
from jaxllm.bundle.levels import read_recovery, require_level
from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.export.folder import new_folder
from jaxllm.models.architectures import architecture
from jaxllm.models.features import require_decoder_alone
from jaxllm.models.lora import Adapter
from jaxllm.models.parameters import param_specs
from jaxllm.quant import as_floats
from jaxllm.quant.weights import all_finite
from jaxllm.serving.weights.model_level import read_adapter_of
from jaxllm.text.tokenizer import TokenizerFiles

# Precision -> type of the parameters of a folder.
DTYPES = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainModel:
    """Level as floats, read one parameter at a time from an open bundle.

    Attributes:
      changes: adapters and their scalings, of the whole model or of the level, added to the weights.
    """

    name: str
    cfg: ModelConfig
    tokenizer: TokenizerFiles
    bundle: Bundle
    changes: tuple[tuple[Adapter, float], ...] = ()

    def params(self, cfg: ModelConfig, dtype: np.dtype) -> dict[str, "PlainParam"]:
        """Returns the parameters of the level for a config that has at least its units, in `dtype`; missing
        units are zeros."""
        return {name: PlainParam(self, name, spec.shape, dtype) for name, spec in param_specs(cfg).items()}

    def read(self, name: str) -> np.ndarray:
        """A parameter of the level, float32.

        Raises:
          BundleError: its checksum is wrong.
        """
        stored = self.bundle.stored(name)
        value = np.array(as_floats(stored))
        shape = param_specs(self.cfg)[name].shape
        for adapter, scaling in self.changes:
            if f"{name}.left" not in adapter:
                continue
            left, right = (np.asarray(adapter[f"{name}.{side}"], np.float32) for side in ("left", "right"))
            change = np.matmul(left, right) * np.float32(scaling)
            value[tuple(map(slice, change.shape))] += change
        return value[tuple(map(slice, shape))]


class PlainParam:
    """Parameter of a plain model, read on access."""

    def __init__(self, model: PlainModel, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._model, self._name, self.shape, self.dtype = model, name, shape, dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The array, on the host."""
        del copy
        value = self._model.read(self._name)
        found = np.pad(value, [(0, to - has) for has, to in zip(value.shape, self.shape, strict=True)])
        with np.errstate(over="ignore"):
            narrow = found.astype(self.dtype)
        if not all_finite(narrow):
            raise ConfigError(
                f"parameter {self._name} has numbers that {self.dtype} cannot hold; take --precision bf16 or "
                "f32"
            )
        return narrow.astype(dtype or self.dtype, copy=False)

    def __getitem__(self, index: int) -> np.ndarray:
        """One expert's."""
        return np.asarray(self)[index]


def read_plain(bundle: Bundle, *, level: int = FULL_LEVEL, adapter: Path | None = None) -> PlainModel:
    """Opens a level of an open bundle as a plain model; nothing is read yet.

    Args:
      bundle: bundle, which must stay open while the result is used.
      adapter: low-rank adapter of the model in PEFT's layout, to add to the weights.

    Raises:
      ConfigError: the bundle has no such level, or its kind has no plain model.
    """
    require_decoder_alone(bundle.cfg, "plain models")
    if bundle.layout.experts_apart:
        raise ConfigError(
            f"{bundle.path} has its experts stored separately; export the bundle that it was made of, or "
            "prepare the model without --expert-bits"
        )
    changes: list[tuple[Adapter, float]] = []
    if adapter is not None:
        lora, change = read_adapter_of(bundle, adapter)
        changes.append((change, lora.scaling))
    recovery = None if level == FULL_LEVEL else read_recovery(bundle, level)
    if recovery is not None:
        changes.append((recovery.adapter, recovery.scaling))
    return PlainModel(
        name=bundle.layout.name,
        cfg=bundle.cfg if level == FULL_LEVEL else require_level(bundle, level),
        tokenizer=bundle.tokenizer_files(),
        bundle=bundle,
        changes=tuple(changes),
    )


def uniform(cfg: ModelConfig) -> ModelConfig:
    """Returns the smallest config of equal layers that a level fits in and that its family can express.

    Families whose head size is that of the model divided by its heads keep all heads.
    """
    units = [cfg.units(layer) for layer in range(cfg.layers)]
    groups = max(each.kv_heads for each in units)
    neurons: Mapping[bool, int] = {
        sparse: max((each.neurons for at, each in enumerate(units) if cfg.is_sparse(at) == sparse), default=0)
        for sparse in (False, True)
    }
    narrow = dataclasses.replace(
        cfg.whole,
        ffn_size=neurons[False] or cfg.ffn_size,
        expert_ffn_size=neurons[True] or cfg.expert_ffn_size,
    )
    fewer = dataclasses.replace(narrow, kv_heads=groups, heads=groups * cfg.group)
    for candidate in (fewer, narrow):
        with contextlib.suppress(ConfigError):
            architecture(cfg.model_type).config_to_hf(candidate)
            return candidate
    return cfg.whole


def write_plain_folder(path: Path, model: PlainModel, precision: str) -> ModelConfig:
    """Writes a Hugging Face folder, atomically: config, safetensors and tokenizer. Returns its config.

    Args:
      precision: precision of all parameters, a key of `DTYPES`.

    Raises:
      ConfigError: the folder exists already, or numbers are too large for the precision.
    """
    from jaxllm.checkpoints.huggingface import write_folder
    from jaxllm.checkpoints.tokenizer_folder import write_sampling, write_tokenizer

    cfg, tokenizer = uniform(model.cfg), model.tokenizer
    ends: Any = list(tokenizer.eos_ids) or None
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends[0] if ends and len(ends) == 1 else ends}
    params: Any = model.params(cfg, DTYPES[precision])
    with new_folder(path) as folder:
        write_folder(folder, cfg, params, extra_config=ids)
        write_tokenizer(folder, tokenizer)
        write_sampling(folder, tokenizer)
    return cfg
