"""Reads the low-rank adapters that programs accept as an input, and writes them into the programs' folder."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxllm.bundle import Bundle
from jaxllm.config import WHOLE, ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.export.folder_format.adapters import INPUT_LEFT, INPUT_RIGHT, AdapterInputs, adapter_file
from jaxllm.export.folder_format.manifest import LEFT, RIGHT
from jaxllm.models.lora import MAX_RANK, LoraConfig, adapted_parameters, parameters_of, target_of
from jaxllm.models.parameters import param_specs
from jaxllm.serving.weights.model_level import rank_of, read_adapter_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Adapters that programs accept.

    Attributes:
      given: folders in PEFT's layout, by name; may be empty, for future adapters.
      rank: maximum rank; 0 for that of the given ones.
    """

    given: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank <= MAX_RANK or not (self.rank or self.given):
            raise ConfigError(
                f"programs take adapters of a rank of 1 to {MAX_RANK}, got {self.rank}; name an adapter, or "
                "give --adapter-rank"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class InputAdapters:
    """Description of the programs' input, and the arrays `[N]` of the whole model's adapters by name."""

    inputs: AdapterInputs
    arrays: Mapping[str, np.ndarray]

    def write(self, folder: Path) -> None:
        """Writes the adapters into a folder of programs."""
        for name, each in self.arrays.items():
            (folder / adapter_file(name)).write_bytes(each.astype("<f4").tobytes())


def read_adapters(bundle: Bundle, cfgs: Mapping[int, ModelConfig], options: AdapterOptions) -> InputAdapters:
    """Reads the adapters of a bundle's model, with its order of units.

    Args:
      bundle: bundle of the model.
      cfgs: configs of the sub-models to export, by level.
      options: the adapters to read.

    Raises:
      CheckpointError, ConfigError: an adapter cannot be read, is of another model, or has a higher rank; or
        the model supports none.
    """
    if bundle.cfg.encoder is not None or bundle.cfg.experts:
        raise ConfigError(
            f"programs of {bundle.cfg.model_type} take no adapters as an input; fold one in (--adapter)"
        )
    found = {name: read_adapter_of(bundle, folder) for name, folder in options.given.items()}
    targets = {target_of(each) for _, adapter in found.values() for each in parameters_of(adapter)}
    rank = options.rank or max(rank_of(adapter) for _, adapter in found.values())
    for name, (_, adapter) in found.items():
        if rank_of(adapter) > rank:
            raise ConfigError(
                f"the adapter {name} has rank {rank_of(adapter)}, and programs take up to {rank}; give a "
                "higher --adapter-rank"
            )
    # With only a rank, the parameters that adapters change by default.
    names = adapted_parameters(bundle.cfg, tuple(targets) or LoraConfig.targets)
    inputs = AdapterInputs(
        rank=rank,
        shapes={level: {name: param_specs(cfg)[name].shape for name in names} for level, cfg in cfgs.items()},
        names=tuple(found),
    )
    assert WHOLE in inputs.shapes
    arrays = {}
    for name, (lora, adapter) in found.items():
        factors = {}
        for each in parameters_of(adapter):
            left = np.moveaxis(np.asarray(adapter[f"{each}{LEFT}"], np.float32), -1, 0)
            factors[f"{each}{INPUT_LEFT}"] = left * np.float32(lora.scaling)
            factors[f"{each}{INPUT_RIGHT}"] = np.asarray(adapter[f"{each}{RIGHT}"], np.float32)
        arrays[name] = inputs.joined(factors)
    return InputAdapters(inputs=inputs, arrays=arrays)
