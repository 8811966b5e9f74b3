"""Locates the experts of a bundle in its file, and makes weights of their bytes."""

import dataclasses
import functools

import jax
import numpy as np

from jaxllm.bundle import Bundle, Segment
from jaxllm.bundle.layout import PAGE
from jaxllm.errors import ConfigError
from jaxllm.quant import Weight
from serving.buckets.parts import EXPERT_PARTS

# Index among the sparse layers, expert.
Key = tuple[int, int]
_FLOAT_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}


@dataclasses.dataclass(frozen=True)
class StoredExpert:
    """One expert in the file.

    Attributes:
      segment: of the file.
      bits: its bitwidth; 16 and 32 for floats.
      memory_bytes: its size in whole pages.
    """

    segment: Segment
    bits: int
    memory_bytes: int


def hot_bytes(bundle: Bundle) -> int:
    """Bytes of the parameters that every token needs: all but experts."""
    return sum(each.size_bytes for name, each in bundle.layout.tensors.items() if ".experts." not in name)


class ExpertStore:
    """The experts of a bundle that stores each by itself.

    Attributes:
      bundle: an open one.
      sparse: the model's sparse layers, ascending.
      experts: number per layer (E).
    """

    def __init__(self, bundle: Bundle) -> None:
        """Reads nothing.

        Raises:
          ConfigError: the experts of a layer are stored together.
        """
        if not bundle.layout.experts_apart:
            raise ConfigError(
                f"{bundle.path} stores its experts together; lay them apart by `jaxllm prepare "
                "--expert-bits` or `jaxllm quantize-experts`"
            )
        self.bundle, cfg = bundle, bundle.cfg
        self.sparse = [layer for layer in range(cfg.layers) if cfg.is_sparse(layer)]
        self.experts = cfg.experts
        self._stored = {
            (at, expert): self._of(layer, expert)
            for at, layer in enumerate(self.sparse)
            for expert in range(cfg.experts)
        }

    def __getitem__(self, key: Key) -> StoredExpert:
        return self._stored[key]

    @functools.cached_property
    def widths(self) -> tuple[int, ...]:
        """The bitwidths of all experts, ascending."""
        return tuple(sorted({each.bits for each in self._stored.values()}))

    @functools.cached_property
    def total_bytes(self) -> int:
        """Memory of all experts."""
        return sum(each.memory_bytes for each in self._stored.values())

    @property
    def largest_bytes(self) -> int:
        """Memory of the largest expert."""
        return max(each.memory_bytes for each in self._stored.values())

    def least_bytes(self) -> int:
        """Memory of the experts that a token visits at one layer, at most."""
        count = self.bundle.cfg.experts_per_token
        by_layer = [
            sorted(self[at, expert].memory_bytes for expert in range(self.experts))
            for at in range(len(self.sparse))
        ]
        return max(sum(sizes[-count:]) for sizes in by_layer)

    def weights(self, key: Key, memory: np.ndarray) -> dict[str, Weight]:
        """An expert's "gate", "up" and "down" `[F, D]` from its bytes in other memory (see
        `Bundle.segment_weights`)."""
        found = self.bundle.segment_weights(self[key].segment.name, memory)
        return {name.rsplit(".", 1)[1]: each for name, each in found.items()}

    def any_expert(self, bits: int) -> dict[str, Weight]:
        """Shapes of an expert of a bitwidth."""
        key = next(key for key, each in self._stored.items() if each.bits == bits)
        weights = self.weights(key, np.zeros(self[key].memory_bytes, np.uint8))
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights)

    def _of(self, layer: int, expert: int) -> StoredExpert:
        segment = self.bundle.layout.segments[f"layers.{layer}.experts.{expert}"]
        tensors = self.bundle.layout.by_segment[segment.name].values()
        widths = {each.bits or _FLOAT_BITS[each.data.dtype] for each in tensors}
        if len(widths) > 1 or len(tensors) != len(EXPERT_PARTS) or segment.offset % PAGE:
            raise ConfigError(f"{self.bundle.path}: expert {expert} of layer {layer} is stored in an odd way")
        return StoredExpert(segment, widths.pop(), -(-segment.size_bytes // PAGE) * PAGE)
