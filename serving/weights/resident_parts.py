"""Parts of each layer of a streamed model that are always in memory, with the embedding and the head: they
draft, and shorten the reads of each layer."""

from collections.abc import Mapping

import numpy as np

from jaxllm.bundle import Bundle
from jaxllm.bundle.layout import PAGE, Extent, low_segment
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.quant import Weight
from jaxllm.serving.host.direct_io import aligned
from jaxllm.serving.weights.first_read import FirstRead
from jaxllm.serving.weights.memory_plan import SLOTS
from jaxllm.serving.weights.pieces import LayerPiece, Range, beside_level, layer_pieces, segment_pieces

# Segments outside of the layers: embedding, final norm, head.
_OUTER = ("embed", "final")


class OuterMemory:
    """The embedding, the final norm and the head in memory.

    Attributes:
      size_bytes: their bytes.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._bundle, segments = bundle, bundle.layout.segments
        self._ranges = {
            name: Range(
                offset=segments[name].offset,
                size_bytes=segments[name].size_bytes,
                place=segments[name].offset % PAGE,
            )
            for name in _OUTER
            if name in segments
        }
        self.size_bytes = sum(each.place + each.size_bytes + PAGE for each in self._ranges.values())
        self._memory: dict[str, np.ndarray] = {}

    def load(self, first_read: FirstRead) -> dict[str, Weight]:
        """Plans to read them; returns their parameters by name."""
        found: dict[str, Weight] = {}
        for name, each in self._ranges.items():
            memory = aligned(each.place + each.size_bytes + PAGE)
            first_read.keep((each,), memory)
            self._memory[name] = memory[each.place : each.place + each.size_bytes]
            found |= self._bundle.segment_weights(name, memory[each.place :])
        return found

    def array(self, extent: Extent) -> np.ndarray:
        """A view of an array of these segments, after `load`."""
        name = next(
            name for name, each in self._ranges.items() if 0 <= extent.offset - each.offset < each.size_bytes
        )
        at = extent.offset - self._ranges[name].offset
        return extent.array(self._memory[name][at : at + extent.size_bytes])


class LevelMemory:
    """The units of a level, the embedding and the head in memory.

    Each layer has address space for all of its units, and memory for the pages of the level.

    Attributes:
      outer: the embedding and the head.
      pieces: the rest of each layer, in order: the whole model's layers, whose ranges exclude the level's
        units.
      size_bytes: memory of the level, the embedding and the head.
      weights: all parameters by name, after `load`; for layers that are not resident only the level's units
        are valid.
      resizable: whether resident pieces can be released: layers that are resident as a whole include a part
        of the level.
      slots: number of slots for pieces that are not resident, as for whole layers.
    """

    resizable, slots = False, SLOTS

    def __init__(self, bundle: Bundle, cfg: ModelConfig) -> None:
        """Plans the memory of a level of a bundle, whose weights are read in place; reads nothing."""
        self._bundle = bundle
        self.pieces: list[LayerPiece] = beside_level(
            # Memory is allocated by pages.
            layer_pieces(bundle.layout),
            layer_pieces(bundle.layout, cfg, gap_bytes=PAGE),
        )
        self.outer = OuterMemory(bundle)
        self.size_bytes = self.outer.size_bytes + sum(each.kept_bytes for each in self.pieces)
        self.weights: dict[str, Weight] = {}

    def load(self, first_read: FirstRead, staying: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Plans to read the level, except for layers that are resident as a whole, given with their memory as
        `staying`; returns the memory of the `LayerPiece.kept` ranges of the other layers."""
        kept = {}
        for piece in self.pieces:
            if piece.layer not in staying:
                kept[piece.layer] = aligned(piece.memory_bytes)
                first_read.keep(piece.kept, kept[piece.layer])
        self.weights |= self.outer.load(first_read)
        for piece in self.pieces:
            self.weights |= self.layer_weights(piece, {**staying, **kept}[piece.layer])
        return kept

    def layer_weights(self, piece: LayerPiece, memory: np.ndarray) -> dict[str, Weight]:
        """A layer's weights by their full names, from the memory of a piece."""
        return piece_weights(self._bundle, piece, memory)


def piece_weights(bundle: Bundle, piece: LayerPiece, memory: np.ndarray) -> dict[str, Weight]:
    """The weights of a layer in a piece's memory, which has the file's layout."""
    low = bundle.layout.low_offset(piece.segment)
    own = memory[piece.start :]
    return bundle.segment_weights(piece.segment, own, None if low is None else own[low:])


class HighPlanes:
    """The high planes of nested weights of all layers, the embedding and the head in memory (see
    `LevelMemory`): of each layer only the low planes are read.

    Attributes:
      pieces: the low planes of layers.
      weights: all parameters by name, after `load`; for layers only the high planes.
      slots: twice as many as for whole layers, in the same memory: storage reads on while drafts grow.
    """

    resizable, slots = True, 2 * SLOTS

    def __init__(self, bundle: Bundle) -> None:
        """Plans the memory of a bundle's nested weights, which are read in place; reads nothing."""
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
        """Plans to read the high planes, the embedding and the head; nothing is copied into pieces of low
        planes."""
        for piece in self._high:
            memory = aligned(piece.memory_bytes)
            first_read.keep(piece.ranges, memory)
            self._memory.append(memory[piece.start :])
            self.weights |= self._bundle.segment_weights(piece.segment, self._memory[-1])
        self.weights |= self.outer.load(first_read)
        return {}

    def layer_weights(self, piece: LayerPiece, memory: np.ndarray) -> dict[str, Weight]:
        """A layer's weights by their full names, both planes of them; `memory` has its low planes."""
        segment = self._high[piece.layer].segment
        return self._bundle.segment_weights(segment, self._memory[piece.layer], memory[piece.start :])


ResidentPart = LevelMemory | HighPlanes


def require_nested(bundle: Bundle) -> None:
    """Raises ConfigError unless a bundle has high planes that can be read separately for drafts."""
    weights = bundle.layout.weights
    if weights != "int8-nested" or not bundle.read_in_place:
        reason = f"it has {weights} weights" if weights != "int8-nested" else "there are no native kernels"
        raise ConfigError(
            f"{bundle.path} cannot draft or predict by its high planes, because {reason}; prepare the model "
            "with --weights int8-nested, on a CPU with native kernels, or draft with a model, level or ngram"
        )
