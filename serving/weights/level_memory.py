"""Keeps a level of a streamed model resident: it drafts, and shortens the reads of each layer."""

from collections.abc import Mapping

import numpy as np

from jaxllm.bundle import Bundle
from jaxllm.bundle.layout import PAGE
from jaxllm.config import ModelConfig
from jaxllm.quant import Weight
from serving.host.direct_io import aligned
from serving.weights.first_read import FirstRead
from serving.weights.pieces import LayerPiece, Range, beside_level, layer_pieces

# Segments outside of the layers: embedding, final norm, head.
_OUTER = ("embed", "final")


class LevelMemory:
    """The units of a level, the embedding and the head in memory.

    Each layer has address space for all of its units, and memory for the pages that the level uses.

    Attributes:
      pieces: the whole model's layers; their ranges leave out the level's units.
      size_bytes: memory of the level, the embedding and the head.
      weights: after `load`, all parameters by name; of layers that are not resident only the level's units
        are valid.
    """

    def __init__(self, bundle: Bundle, cfg: ModelConfig) -> None:
        """Plans the memory; reads nothing.

        Args:
          bundle: an open one, whose weights are read in place.
          cfg: the level.
        """
        self._bundle = bundle
        self.pieces: list[LayerPiece] = beside_level(
            # Memory is allocated by pages.
            layer_pieces(bundle.layout),
            layer_pieces(bundle.layout, cfg, gap_bytes=PAGE),
        )
        segments = bundle.layout.segments
        self._outer = {
            name: Range(
                offset=segments[name].offset,
                size_bytes=segments[name].size_bytes,
                place=segments[name].offset % PAGE,
            )
            for name in _OUTER
            if name in segments
        }
        outer = sum(each.place + each.size_bytes + PAGE for each in self._outer.values())
        self.size_bytes = outer + sum(each.kept_bytes for each in self.pieces)
        self._outer_memory: dict[str, np.ndarray] = {}
        self.weights: dict[str, Weight] = {}

    def load(self, first_read: FirstRead, staying: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Plans to read the level, except for layers that are resident as a whole.

        Args:
          first_read: of the file.
          staying: layer -> memory, of layers that are resident as a whole.

        Returns:
          Layer -> memory, of the other layers.
        """
        kept = {}
        for piece in self.pieces:
            if piece.layer not in staying:
                kept[piece.layer] = aligned(piece.memory_bytes)
                first_read.keep(piece.kept, kept[piece.layer])
        for name, each in self._outer.items():
            self._outer_memory[name] = aligned(each.place + each.size_bytes + PAGE)
            first_read.keep((each,), self._outer_memory[name])
        for name, memory in self._outer_memory.items():
            self.weights |= self._bundle.segment_weights(name, memory[self._outer[name].place :])
        for piece in self.pieces:
            memory = {**staying, **kept}[piece.layer]
            self.weights |= self._bundle.segment_weights(piece.segment, memory[piece.start :])
        return kept
