"""Parts of each layer that are always in memory, with the head or its high plane: they draft, and shorten the
reads of each pass."""

import abc
from collections.abc import Callable, Mapping

import numpy as np

from jaxllm.bundle import Bundle
from jaxllm.bundle.layout import PAGE, Extent, low_segment, rows_alone, rows_at
from jaxllm.config import ModelConfig
from jaxllm.models.parameters import head_name
from jaxllm.quant import Weight
from jaxllm.serving.host.direct_io import aligned
from jaxllm.serving.weights.memory_plan import SLOTS
from jaxllm.serving.weights.pieces import (
    HeadPiece,
    LayerPiece,
    beside_level,
    layer_pieces,
    resident_head,
    segment_pieces,
)
from jaxllm.serving.weights.prefetch import FirstRead

# Size limit of cached rows of the embedding, and their maximum share of the model.
_KEPT_ROWS_BYTES, _KEPT_ROWS_SHARE = 1 << 20, 0.02


class ResidentPart(abc.ABC):
    """A part of each layer that is always in memory, with the head or its high plane.

    Attributes:
      title: name of the part, for people.
      pieces: the rest of each layer, in order.
      head: the part of the head that is in memory.
      size_bytes: memory of the part and of the head.
      weights: the parameters by name, after `load`; of layers that are not resident only the part is valid.
      resizable: whether resident pieces can be released: not if they include a part.
      slots: number of slots for pieces that are not resident.
    """

    resizable, slots, title = False, SLOTS, "units of a level in each layer, and the head"

    def __init__(self, bundle: Bundle, pieces: list[LayerPiece], part_bytes: int, head: HeadPiece) -> None:
        """Plans the memory of a part of a bundle's weights, which are read in place; reads nothing."""
        self._bundle, self.pieces, self.head = bundle, pieces, head
        self.size_bytes = part_bytes + head.memory_bytes
        self._head_memory = np.empty(0, np.uint8)
        self.weights: dict[str, Weight] = {}

    @property
    def has_whole_head(self) -> bool:
        """Whether nothing of the head is read in a pass."""
        return len(self.head.extents) == len(self._bundle.layout.tensors[head_name(self._bundle.cfg)].extents)

    def load(self, first_read: FirstRead, staying: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Plans to read the part, except of layers that are resident as a whole, given with their memory as
        `staying`; returns the memory of the `LayerPiece.kept` ranges of the other layers."""
        self._head_memory = aligned(self.head.memory_bytes)
        first_read.keep(self.head.ranges, self._head_memory)
        self.weights |= {head_name(self._bundle.cfg): head_weight(self._bundle, self.head, self.head_array)}
        return self._load_layers(first_read, staying)

    def head_array(self, extent: Extent) -> np.ndarray | None:
        """A view of rows of the head, after `load`; None if they are not in memory."""
        return self.head.array(extent, self._head_memory)

    @abc.abstractmethod
    def _load_layers(self, first_read: FirstRead, staying: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """`load` of the layers."""

    @abc.abstractmethod
    def layer_weights(self, piece: LayerPiece, memory: np.ndarray) -> dict[str, Weight]:
        """A layer's weights by their full names, from the memory of a piece."""


class LevelMemory(ResidentPart):
    """The units of a level. Each layer has address space for all of its units, and memory for the pages of
    the level; `pieces` are the whole model's layers, whose ranges exclude the level's units."""

    def __init__(self, bundle: Bundle, cfg: ModelConfig) -> None:
        # Memory is allocated by pages.
        level = layer_pieces(bundle.layout, cfg, gap_bytes=PAGE)
        pieces = beside_level(layer_pieces(bundle.layout), level)
        size_bytes = sum(each.kept_bytes for each in pieces)
        super().__init__(bundle, pieces, size_bytes, resident_head(bundle.layout, high=False))

    def _load_layers(self, first_read: FirstRead, staying: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        kept = {}
        for piece in self.pieces:
            if piece.layer not in staying:
                kept[piece.layer] = aligned(piece.memory_bytes)
                first_read.keep(piece.kept, kept[piece.layer])
            self.weights |= self.layer_weights(piece, {**staying, **kept}[piece.layer])
        return kept

    def layer_weights(self, piece: LayerPiece, memory: np.ndarray) -> dict[str, Weight]:
        """See `ResidentPart`."""
        return piece_weights(self._bundle, piece, memory)


class HighPlanes(ResidentPart):
    """The high planes of nested weights: of each layer only the low planes are read, and nothing is copied
    into their pieces. There are twice as many slots as for whole layers, in the same memory: storage reads on
    while drafts grow.

    The head is the last of the model that 4 bits suffice for: its low plane is resident before those of
    layers, because drafts are better by it, unless `room_bytes` are too few.
    """

    resizable, slots = True, 2 * SLOTS

    def __init__(self, bundle: Bundle, room_bytes: int) -> None:
        """`room_bytes` is the memory for weights."""
        layout = bundle.layout
        layers = [f"layers.{layer}" for layer in range(bundle.cfg.layers)]
        self._high = segment_pieces(layout, layers, apart=True)
        pieces = segment_pieces(layout, [low_segment(each) for each in layers])
        high_bytes = sum(each.memory_bytes for each in self._high)
        head, slots = resident_head(layout, high=False), SLOTS * max(each.memory_bytes for each in pieces)
        if high_bytes + head.memory_bytes + slots + kept_rows_bytes(bundle.weight_bytes) > room_bytes:
            head = resident_head(layout, high=True)
        super().__init__(bundle, pieces, high_bytes, head)
        self.title = f"high planes of all layers, and {'all' if self.has_whole_head else 'that'} of the head"
        self._memory: list[np.ndarray] = []

    def _load_layers(self, first_read: FirstRead, staying: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        for piece in self._high:
            memory = aligned(piece.memory_bytes)
            first_read.keep(piece.ranges, memory)
            self._memory.append(memory[piece.start :])
            self.weights |= self._bundle.segment_weights(piece.segment, self._memory[-1])
        return {}

    def layer_weights(self, piece: LayerPiece, memory: np.ndarray) -> dict[str, Weight]:
        """See `ResidentPart`; `memory` has the low planes."""
        segment = self._high[piece.layer].segment
        return self._bundle.segment_weights(segment, self._memory[piece.layer], memory[piece.start :])


def head_weight(bundle: Bundle, piece: HeadPiece, array: Callable[[Extent], np.ndarray | None]) -> Weight:
    """The weight of the rows of a piece of the head; of its arrays those that `array` returns."""
    tensor = bundle.layout.tensors[head_name(bundle.cfg)]
    views = {each: array(each) for each in rows_at(tensor, piece.first, piece.count)}
    there = {each: view for each, view in views.items() if view is not None}
    return bundle.place(
        rows_alone(tensor, tuple(there)), (piece.count, bundle.cfg.hidden_size), there.__getitem__
    )


def piece_weights(bundle: Bundle, piece: LayerPiece, memory: np.ndarray) -> dict[str, Weight]:
    """The weights of a layer in a piece's memory, which has the file's layout."""
    low = bundle.layout.low_offset(piece.segment)
    own = memory[piece.start :]
    return bundle.segment_weights(piece.segment, own, None if low is None else own[low:])


def kept_rows_bytes(weight_bytes: int) -> int:
    """Size limit of the cached embedding rows of a streamed model."""
    return min(_KEPT_ROWS_BYTES, int(_KEPT_ROWS_SHARE * weight_bytes))
