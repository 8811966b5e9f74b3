"""Keeps the high planes of a streamed model's nested weights resident: they draft, and of each layer only the
low planes are read."""

from collections.abc import Mapping

import numpy as np

from jaxllm.bundle import Bundle
from jaxllm.bundle.layout import low_segment
from jaxllm.errors import ConfigError
from jaxllm.quant import Weight
from jaxllm.serving.host.direct_io import aligned
from jaxllm.serving.weights.first_read import FirstRead
from jaxllm.serving.weights.level_memory import OuterMemory
from jaxllm.serving.weights.pieces import LayerPiece, segment_pieces
from jaxllm.serving.weights.prefetch_plan import SLOTS


class HighPlanes:
    """The high planes of all layers, the embedding and the head in memory (see `ResidentPart`).

    Attributes:
      pieces: the low planes of layers.
      size_bytes: memory of the high planes, the embedding and the head.
      weights: all parameters by name, after `load`; for layers only the high planes.
      resizable: whether resident low planes can be released.
      slots: twice as many as for whole layers, in the same memory: storage reads on while drafts grow.
    """

    resizable, slots = True, 2 * SLOTS

    def __init__(self, bundle: Bundle) -> None:
        """Plans the memory; reads nothing.

        Args:
          bundle: an open one of nested weights, which are read in place.
        """
        self._bundle = bundle
        layers = range(bundle.cfg.layers)
        self._high = segment_pieces(bundle.layout, [f"layers.{layer}" for layer in layers], apart=True)
        self.pieces: list[LayerPiece] = segment_pieces(
            bundle.layout, [low_segment(f"layers.{layer}") for layer in layers]
        )
        self.outer = OuterMemory(bundle)
        self.size_bytes = self.outer.size_bytes + sum(each.memory_bytes for each in self._high)
        self._memory: list[np.ndarray] = []
        self.weights: dict[str, Weight] = {}

    def load(self, first_read: FirstRead, staying: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Plans to read the high planes, the embedding and the head.

        Args:
          first_read: first read of the file.
          staying: layer -> memory of resident low planes.

        Returns:
          Nothing to copy into pieces: planes are separate.
        """
        del staying
        for piece in self._high:
            memory = aligned(piece.memory_bytes)
            first_read.keep(piece.ranges, memory)
            self._memory.append(memory[piece.start :])
            self.weights |= self._bundle.segment_weights(piece.segment, self._memory[-1])
        self.weights |= self.outer.load(first_read)
        return {}

    def layer_weights(self, piece: LayerPiece, memory: np.ndarray) -> dict[str, Weight]:
        """A layer's weights by their full names, both planes of them.

        Args:
          piece: one of `pieces`.
          memory: memory of the piece, with its low planes.
        """
        segment = self._high[piece.layer].segment
        return self._bundle.segment_weights(segment, self._memory[piece.layer], memory[piece.start :])


def require_nested(bundle: Bundle) -> None:
    """Raises ConfigError unless a bundle has high planes that can be read separately for drafts."""
    weights = bundle.layout.weights
    if weights != "int8-nested" or not bundle.read_in_place:
        reason = f"it has {weights} weights" if weights != "int8-nested" else "there are no native kernels"
        raise ConfigError(
            f"{bundle.path} cannot draft or predict by its high planes, because {reason}; prepare the model "
            "with --weights int8-nested, on a CPU with native kernels, or draft with a model, level or ngram"
        )
