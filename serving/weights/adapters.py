"""Reads low-rank adapters of a bundle's model, ready to be applied to all of its levels."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

from jaxllm.bundle import Bundle
from jaxllm.bundle.levels import read_order
from jaxllm.elastic.units import reorder_adapter
from jaxllm.models.lora import Adapter, LoraConfig
from jaxllm.models.parameters import Params
from jaxllm.quant import Adapted
from jaxllm.serving.weights.model_level import LevelWeights


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """The parameters of all levels with an adapter, or without one, ready to be applied.

    Attributes:
      digest: hex digest of the adapter and its scaling; empty for none.
      levels: level in percent -> its parameters.
      size_bytes: size of the adapter's factors at all levels; weights are shared.
    """

    digest: str
    levels: Mapping[int, LevelWeights]
    size_bytes: int = 0

    @property
    def versions(self) -> frozenset[tuple[int, int]]:
        """`Runner.weights_version` of each level."""
        return frozenset(each.version for each in self.levels.values())


def read_adapter_of(bundle: Bundle, folder: str | Path) -> tuple[LoraConfig, Adapter]:
    """Reads an adapter of the bundle's original model, and orders its units like the bundle's.

    Raises:
      CheckpointError, ConfigError: the folder is missing, corrupt or of another model.
    """
    # Imported here: the import is slow, and most models have no adapter.
    from jaxllm.checkpoints.peft import read_adapter

    lora, adapter = read_adapter(Path(folder), bundle.cfg)
    order = read_order(bundle)
    return lora, adapter if order is None else reorder_adapter(adapter, order)


def rank_of(adapter: Adapter) -> int:
    """The highest rank of an adapter's changes."""
    return max(part.shape[-2] for name, part in adapter.items() if name.endswith(".right"))


def factor_bytes(levels: Iterable[Params]) -> int:
    """Bytes of the factors of adapters in the parameters of some levels, each array once."""
    arrays = {
        id(factor): factor.nbytes
        for params in levels
        for weight in params.values()
        if isinstance(weight, Adapted)
        for factor in (weight.left, weight.right)
    }
    return sum(arrays.values())
