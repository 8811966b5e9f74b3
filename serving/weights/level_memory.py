"""Keeps a level of a streamed model in memory: to draft with, and so that less of a layer is read."""

from collections.abc import Mapping

import numpy as np

from jaxllm.bundle import Bundle
from jaxllm.bundle.layout import PAGE
from jaxllm.config import ModelConfig
from jaxllm.quant import Weight
from serving.host.direct_io import aligned
from serving.weights.first_read import FirstReading
from serving.weights.pieces import LayerPiece, Range, beside_level, layer_pieces

_TABLES = ("embed", "final")


class LevelMemory:
    """The units of a level, and the tables of tokens.

    Of each layer there is address space for all of it, and memory for the pages alone that the level uses.

    Attributes:
      pieces: the whole model's layers, of which what the level has is not read.
      size_bytes: what the level and the tables take.
      weights: once they are read, all parameters by name; of layers that do not stay only the level's units
        are there.
    """

    def __init__(self, bundle: Bundle, cfg: ModelConfig) -> None:
        """Plans; nothing is read.

        Args:
          bundle: an open one, whose weights are read in place.
          cfg: the level.
        """
        self._bundle = bundle
        self.pieces: list[LayerPiece] = beside_level(
            # Memory comes by pages.
            layer_pieces(bundle.layout),
            layer_pieces(bundle.layout, cfg, gap_bytes=PAGE),
        )
        segments = bundle.layout.segments
        self._tables = {
            name: Range(
                offset=segments[name].offset,
                size_bytes=segments[name].size_bytes,
                place=segments[name].offset % PAGE,
            )
            for name in _TABLES
            if name in segments
        }
        tables = sum(each.place + each.size_bytes + PAGE for each in self._tables.values())
        self.size_bytes = tables + sum(each.kept_bytes for each in self.pieces)
        self._table_memory: dict[str, np.ndarray] = {}
        self.weights: dict[str, Weight] = {}

    def load(self, reading: FirstReading, staying: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Has the level read, but for layers that stay whole.

        Args:
          reading: of the file.
          staying: memory of layers that stay, by their numbers.

        Returns:
          Memory of the other layers, by their numbers.
        """
        kept = {}
        for piece in self.pieces:
            if piece.layer not in staying:
                kept[piece.layer] = aligned(piece.memory_bytes)
                reading.keep(piece.kept, kept[piece.layer])
        for name, each in self._tables.items():
            self._table_memory[name] = aligned(each.place + each.size_bytes + PAGE)
            reading.keep((each,), self._table_memory[name])
        for name, memory in self._table_memory.items():
            self.weights |= self._bundle.segment_weights(name, memory[self._tables[name].place :])
        for piece in self.pieces:
            memory = {**staying, **kept}[piece.layer]
            self.weights |= self._bundle.segment_weights(piece.segment, memory[piece.start :])
        return kept
