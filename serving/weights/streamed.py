"""Streams the weights of a model from storage, piece by piece, as inputs of buckets. Parts of each layer may
always be in memory, with the embedding and the head: they draft, and shorten the reads of each layer.
"""

import abc
import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.bundle import Bundle
from jaxllm.bundle.layout import PAGE, Extent, Tensor, low_segment, row_step, rows_alone, rows_at
from jaxllm.config import ModelConfig
from jaxllm.elastic.ladder import shared_sub_model, with_weights
from jaxllm.errors import BundleError, ConfigError
from jaxllm.models.layer_stack import STACK, layers_of, stack_by_address
from jaxllm.models.parameters import ENCODER, Params, head_name
from jaxllm.quant import Adapted, Weight
from jaxllm.serving.buckets.bucket import layer_params, shared_by_layers
from jaxllm.serving.host.direct_io import PieceReader, aligned
from jaxllm.serving.host.progress import Progress, loading
from jaxllm.serving.host.storage import Storage
from jaxllm.serving.weights.memory_plan import SLOTS, MemoryBudget, MemoryPlan, plan_memory
from jaxllm.serving.weights.model_level import ModelLevel
from jaxllm.serving.weights.pieces import (
    LayerPiece,
    Passes,
    beside_level,
    head_pieces,
    layer_pieces,
    segment_pieces,
)
from jaxllm.serving.weights.prefetch import READS, FirstRead, Meanwhile, Slot, StreamCounts, WeightStream

# Segments outside of the layers: embedding, final norm, head.
_OUTER = ("embed", "final")
_PARAMETER = "embed.tokens"
_THREADS = 4
# Size limit of cached rows of the embedding, and their maximum share of the model.
_KEPT_ROWS_BYTES, _KEPT_ROWS_SHARE = 1 << 20, 0.02


class ResidentPart(abc.ABC):
    """A part of each layer that is always in memory, with the embedding, the final norm and the head.

    Attributes:
      pieces: the rest of each layer, in order.
      size_bytes: memory of the part, the embedding and the head.
      weights: all parameters by name, after `load`; of layers that are not resident only the part is valid.
      resizable: whether resident pieces can be released: not if they include a part.
      slots: number of slots for pieces that are not resident.
    """

    resizable, slots = False, SLOTS

    def __init__(self, bundle: Bundle, pieces: list[LayerPiece], part_bytes: int) -> None:
        """Plans the memory of a part of a bundle's weights, which are read in place; reads nothing."""
        self._bundle, self.pieces = bundle, pieces
        outer = [name for name in _OUTER if name in bundle.layout.segments]
        self._outer = segment_pieces(bundle.layout, outer, apart=True)
        self.size_bytes = part_bytes + sum(each.memory_bytes for each in self._outer)
        self._outer_memory: list[np.ndarray] = []
        self.weights: dict[str, Weight] = {}

    def load(self, first_read: FirstRead, staying: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Plans to read the part, except of layers that are resident as a whole, given with their memory as
        `staying`; returns the memory of the `LayerPiece.kept` ranges of the other layers."""
        for piece in self._outer:
            memory = aligned(piece.memory_bytes)
            first_read.keep(piece.ranges, memory)
            self._outer_memory.append(memory)
            self.weights |= self._bundle.segment_weights(piece.segment, memory[piece.start :])
        return self._load_layers(first_read, staying)

    def array(self, extent: Extent) -> np.ndarray:
        """A view of an array of the embedding or the head, after `load`."""
        for piece, memory in zip(self._outer, self._outer_memory, strict=True):
            (whole,) = piece.ranges
            at = extent.offset - whole.offset
            if 0 <= at < whole.size_bytes:
                return extent.array(memory[whole.place + at :][: extent.size_bytes])
        raise KeyError(extent)

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
        super().__init__(bundle, pieces, sum(each.kept_bytes for each in pieces))

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
    while drafts grow."""

    resizable, slots = True, 2 * SLOTS

    def __init__(self, bundle: Bundle) -> None:
        layers = [f"layers.{layer}" for layer in range(bundle.cfg.layers)]
        self._high = segment_pieces(bundle.layout, layers, apart=True)
        pieces = segment_pieces(bundle.layout, [low_segment(each) for each in layers])
        super().__init__(bundle, pieces, sum(each.memory_bytes for each in self._high))
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


def piece_weights(bundle: Bundle, piece: LayerPiece, memory: np.ndarray) -> dict[str, Weight]:
    """The weights of a layer in a piece's memory, which has the file's layout."""
    low = bundle.layout.low_offset(piece.segment)
    own = memory[piece.start :]
    return bundle.segment_weights(piece.segment, own, None if low is None else own[low:])


class EmbeddingRows:
    """The rows of a bundle's embedding.

    Prompts mostly repeat a few tokens, so the most recently used rows are cached if they are read from
    storage.

    Attributes:
      segment: segment of the file with the embedding.
    """

    def __init__(
        self,
        bundle: Bundle,
        reader: PieceReader,
        first_read: FirstRead,
        *,
        kept_bytes: int,
        resident: Callable[[Extent], np.ndarray] | None = None,
    ) -> None:
        """See the class; reads nothing yet.

        Args:
          bundle: an open bundle.
          reader: reader of its file.
          first_read: has the checksums of the pages of `segment` (see `FirstRead.watch_pages`).
          kept_bytes: size limit of cached rows.
          resident: returns a view of an extent of the embedding; None if it is not in memory.
        """
        self._bundle, self._reader, self._first_read = bundle, reader, first_read
        self._resident = resident
        self._tensor = bundle.layout.tensors[_PARAMETER]
        self.segment = self._tensor.segment
        self._whole = bundle.layout.segments[self.segment]
        self._step = row_step(self._tensor)
        row_bytes = sum(each.size_bytes for each in rows_at(self._tensor, 0, self._step))
        self._room = max(1, kept_bytes // row_bytes)
        self._kept: dict[int, list[np.ndarray]] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS)

    def rows_of(self, tokens: Sequence[int]) -> tuple[Weight, np.ndarray]:
        """A weight with the rows of T tokens, `[T·step, D]`, since rows are stored in groups of `step`; and
        the index of each token's row in it, `[1, T]` int32.

        Raises:
          CheckpointError: the file cannot be read.
        """
        ids = np.asarray(tokens, np.int64)
        firsts = [int(each) for each in ids // self._step * self._step]
        found = self._panels(set(firsts))
        extents = rows_at(self._tensor, 0, self._step * len(firsts))
        # Per extent the rows of all tokens one after another, as in the whole embedding.
        arrays = {
            each: np.concatenate([found[first][part] for first in firsts]).reshape(each.shape)
            for part, each in enumerate(extents)
        }
        shape = (self._step * len(firsts), self._bundle.cfg.hidden_size)
        rows = self._bundle.place(rows_alone(self._tensor, extents), shape, arrays.__getitem__)
        indices = np.arange(len(ids)) * self._step + ids % self._step
        return rows, indices.astype(np.int32)[None]

    def close(self) -> None:
        """Stops the reader threads."""
        self._pool.shutdown()

    def _panels(self, firsts: set[int]) -> dict[int, list[np.ndarray]]:
        """First row of a panel -> its parts."""
        array = self._resident or self._checked

        def read(first: int) -> list[np.ndarray]:
            return [array(each) for each in rows_at(self._tensor, first, self._step)]

        if self._resident is not None:
            return {first: read(first) for first in firsts}
        missing = sorted(firsts - self._kept.keys())
        self._kept.update(zip(missing, self._pool.map(read, missing), strict=True))
        found = {first: self._kept.pop(first) for first in firsts}
        # In the order of last use.
        self._kept.update(found)
        while len(self._kept) > max(self._room, len(firsts)):
            del self._kept[next(iter(self._kept))]
        return found

    def _checked(self, extent: Extent) -> np.ndarray:
        """Reads an array of the embedding with all of the pages that it touches, and checks these."""
        start = self._whole.offset
        begin = (extent.offset - start) // PAGE * PAGE
        end = -(-(extent.offset + extent.size_bytes - start) // PAGE) * PAGE
        end = min(end, self._whole.size_bytes)
        at = extent.offset - start - begin
        for _ in range(READS):
            data = self._reader.read(start + begin, end - begin)
            if self._first_read.same_pages(start + begin, data):
                return extent.array(data[at : at + extent.size_bytes].copy())
        raise self._first_read.changed(start + begin, end - begin)


def kept_rows_bytes(weight_bytes: int) -> int:
    """Size limit of the cached embedding rows of a streamed model."""
    return min(_KEPT_ROWS_BYTES, int(_KEPT_ROWS_SHARE * weight_bytes))


class StreamedWeights:
    """Streams a bundle's weights, piece by piece, within a memory budget.

    Attributes:
      plan: the division of the budget.
      resident_bytes: bytes of resident pieces, which `resize` changes.
      counts: counts of reads.
    """

    def __init__(
        self,
        bundle: Bundle,
        budget: MemoryBudget,
        *,
        storage: Storage | None = None,
        read_ahead: bool = True,
        part: ResidentPart | None = None,
        levels: Sequence[ModelConfig] = (),
        progress: Progress | None = None,
    ) -> None:
        """Allocates the memory and reads the file once: checks it, and loads the resident pieces.

        Args:
          bundle: an open bundle.
          budget: memory budget, including the fixed part.
          storage: options of reads.
          read_ahead: see `WeightStream`.
          part: part of each layer that stays resident, with embedding and head (see `part_weights`).
          levels: sub-models that `begin` accepts.
          progress: callback for ("load", bytes done, bytes in all).

        Raises:
          BudgetExceeded: the budget is too small.
          CheckpointError: the file is damaged or cannot be read.
        """
        self._bundle, self._reader = bundle, PieceReader(bundle.path, storage, error=BundleError)
        self._part = part
        cfg = bundle.cfg.encoder
        names = [f"{ENCODER}layers.{layer}" for layer in range(0 if cfg is None else cfg.layers)]
        encoder = segment_pieces(bundle.layout, names)
        layers = layer_pieces(bundle.layout) if self._part is None else self._part.pieces
        largest = max(each.memory_bytes for each in (*encoder, *layers))
        # With a resident part, embedding and head are resident, too.
        self.head = head_pieces(bundle.layout, most_bytes=bundle.weight_bytes if self._part else largest)
        self._passes = passes = Passes(bundle.layout, encoder, layers, () if self._part else self.head)
        # Else whole layers are read at every level.
        if bundle.read_in_place and self._part is None:
            for cfg in levels:
                passes.add_level(cfg, layer_pieces(bundle.layout, cfg))
        sizes = [each.memory_bytes - each.kept_bytes for each in passes.whole]
        # A resident part has the whole embedding.
        rows_bytes = 0 if self._part else kept_rows_bytes(bundle.weight_bytes)
        self._kept_bytes = rows_bytes + sum(each.size_bytes for each in self._vectors().values())
        self._kept_bytes += self._part.size_bytes if self._part else 0
        self.plan: MemoryPlan = plan_memory(
            sizes,
            dataclasses.replace(budget, fixed_bytes=budget.fixed_bytes + self._kept_bytes),
            slot_bytes=largest,
            slots=SLOTS if part is None else part.slots,
            order=passes.kept_first,
        )
        first_read = FirstRead(bundle, self._reader)
        self._stream = WeightStream(
            self._reader,
            passes.whole,
            resident=self.plan.resident,
            slots=self.plan.slots,
            slot_bytes=self.plan.slot_bytes,
            read_ahead=read_ahead,
            first_read=first_read,
        )
        self._sizes, self.resident_bytes = sizes, self.plan.resident_bytes
        self.counts: StreamCounts = self._stream.counts
        staying = self._stream.staying()
        for number, memory in staying.items():
            piece = passes.whole[number]
            first_read.keep((*piece.ranges, *piece.kept), memory)
        for pieces in (passes.whole, passes.of_tokens, passes.of_source, *passes.of_level.values()):
            for number, piece in enumerate(pieces):
                if number not in staying or self.resizable:
                    first_read.watch(piece.ranges)
        if self._part is not None:
            of_layers = {number - passes.first_layer: each for number, each in staying.items()}
            kept = self._part.load(first_read, of_layers)
            self._stream.keep({passes.first_layer + layer: memory for layer, memory in kept.items()})
        self._rows = EmbeddingRows(
            bundle,
            self._reader,
            first_read,
            kept_bytes=rows_bytes,
            resident=self._part.array if self._part else None,
        )
        if self._part is None:
            first_read.watch_pages(self._rows.segment)
        first_read.run(loading(progress, bundle.weight_bytes))
        # Parameters in a slot's memory, by its identity, the piece in it, and the version of the weights.
        self._made: dict[tuple[int, int, tuple[int, int]], Any] = {}

    @property
    def idle_read_s(self) -> float:
        """See `jaxllm.serving.runners.runner.Runner`."""
        return self._stream.idle_read_s

    @property
    def staying_bytes(self) -> int:
        """Size of weights that always stay in memory, and of the slots of others."""
        pieces = 0 if self.resizable else self.resident_bytes
        return self._kept_bytes + self.plan.slots * self.plan.slot_bytes + pieces

    @property
    def resizable(self) -> bool:
        """Whether resident pieces can be released: not if a drafting level includes a part of them, or if
        there are no slots to read them into."""
        return (self._part is None or self._part.resizable) and self.plan.slots > 0

    def resize(self, resident_bytes: int) -> None:
        """Makes as many of the initially resident pieces resident as fit, spread evenly, and releases the
        rest. Between two dispatches, under the model's lock; only if `resizable`.

        Raises:
          CheckpointError: a piece cannot be read.
        """
        kept, room = set[int](), resident_bytes
        for number in self._passes.kept_first:
            if number in self.plan.resident and self._sizes[number] <= room:
                kept.add(number)
                room -= self._sizes[number]
        there = set(self._stream.staying())
        for number in sorted(there - kept):
            slot = self._stream.offload(number)
            # They alias its memory, and another slot may get its identity.
            self._made = {key: each for key, each in self._made.items() if key[0] != id(slot)}
            self.resident_bytes -= self._sizes[number]
        for number in sorted(kept - there):
            self._stream.hold(number)
            self.resident_bytes += self._sizes[number]

    def facts(self) -> dict[str, Any]:
        """The division of the budget and the counts of reads, for reports."""
        counts, plan = self.counts, self.plan
        return {
            "budget_bytes": plan.budget_bytes,
            "planned_bytes": plan.planned_bytes,
            "resident_layers": len(self._stream.staying()),
            "read_bytes": counts.read_bytes,
            "pass_bytes": self._stream.pass_bytes,
            "read_bytes_per_s": round(counts.read_bytes / counts.read_s) if counts.read_s else None,
            "caching": self._reader.caching,
        }

    def frozen(self) -> dict[str, Weight]:
        """All parameters by name: vectors outside of layers resident, all others as shapes, or as views of
        the file that are never read."""

        def read(extent: Extent) -> np.ndarray:
            # Copied, so that the rest of its pages is freed.
            return extent.array(self._reader.read(extent.offset, extent.size_bytes).copy())

        small = {
            name: self._bundle.place(tensor, tensor.data.shape, read)
            for name, tensor in self._vectors().items()
        }
        if self._bundle.read_in_place:
            return {**self._bundle.unchecked(), **small}
        slot = np.zeros(max(each.size_bytes for each in self._bundle.layout.segments.values()), np.uint8)
        found: dict[str, Weight] = {}
        for segment in dict.fromkeys(each.segment for each in self._bundle.layout.tensors.values()):
            low = None if self._bundle.layout.low_offset(segment) is None else slot
            weights = self._bundle.segment_weights(segment, slot, low)
            found |= jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights)
        return {**found, **small}

    def part_weights(self) -> dict[str, Weight]:
        """All parameters by name; of layers only the resident part is valid.

        Raises:
          ConfigError: no part is resident.
        """
        if self._part is None:
            raise ConfigError(
                "no part of this model stays in memory; name a drafter of its own weights when it is opened"
            )
        return self._part.weights

    def begin(self, cfg: ModelConfig) -> None:
        """Begins a pass of the model, or of one of its levels."""
        passes = self._passes
        self._stream.use(passes.of_level.get(cfg, passes.of_tokens))

    def begin_source(self) -> None:
        """Begins a pass over the encoder's layers, then over the decoder's parts for a source: by
        `encoder_layer`, then `layer`."""
        self._stream.use(self._passes.of_source, then=self._passes.of_tokens)

    def rows(self, tokens: Sequence[int]) -> tuple[Weight, np.ndarray]:
        """See `EmbeddingRows.rows_of`."""
        return self._rows.rows_of(tokens)

    @contextlib.contextmanager
    def layer(
        self, model: ModelLevel, layer: int, meanwhile: Meanwhile | None = None
    ) -> Iterator[dict[str, Any]]:
        """A layer's parameters under the names of the layer whose buckets it shares.

        They are valid until the context ends; dispatches that use them must have ended by then.
        """
        with self.layers(model, layer, 1, meanwhile) as (one,):
            yield one

    @contextlib.contextmanager
    def layers(
        self, model: ModelLevel, layer: int, most: int, meanwhile: Meanwhile | None = None
    ) -> Iterator[list[dict[str, Any]]]:
        """`layer`, for it and the layers after it that are in memory by then, at most `most` in total."""
        first = self._passes.first_layer + layer
        with self._stream.pieces(first, most, meanwhile) as slots:
            yield [
                self._layer_in(slot, first + index, model, layer + index) for index, slot in enumerate(slots)
            ]

    @contextlib.contextmanager
    def encoder_layer(self, model: ModelLevel, layer: int) -> Iterator[dict[str, Any]]:
        """`layer` of the encoder as a model."""
        with self._stream.piece(layer) as slot:
            yield self._layer_in(slot, layer, model, layer)

    def _layer_in(self, slot: Slot, number: int, model: ModelLevel, layer: int) -> dict[str, Any]:
        """The parameters of a layer, piece `number`, in a slot."""
        key = id(slot), number, model.weights_version
        made = self._made.get(key)
        if made is None:
            piece = self._passes.whole[number]
            assert isinstance(piece, LayerPiece)
            if self._part is None or number < self._passes.first_layer:
                weights = piece_weights(self._bundle, piece, slot.memory)
            else:
                weights = self._part.layer_weights(piece, slot.memory)
            own = {name.removeprefix(ENCODER): each for name, each in weights.items()}
            made = _with_weights(model, layer, own)
            if self._bundle.read_in_place:
                # Without former versions of the level.
                former = [each for each in self._made if each[2][0] == model.level and each[2] != key[2]]
                for each in former:
                    del self._made[each]
                self._made[key] = made
        return made

    @contextlib.contextmanager
    def head_rows(self, number: int, meanwhile: Meanwhile | None = None) -> Iterator[Weight]:
        """The weight of one piece of `head`, valid until the context ends."""
        piece, name = self.head[number], head_name(self._bundle.cfg)
        if self._part is not None:
            yield self._part.weights[name]
            return
        place = self._passes.first_head + number
        with self._stream.piece(place, meanwhile) as slot:
            # All levels share the head.
            key = id(slot), place, (0, 0)
            weight = self._made.get(key)
            if weight is None:
                places = dict(zip(piece.extents, (each.place for each in piece.ranges), strict=True))

                def view(extent: Extent) -> np.ndarray:
                    return extent.array(slot.memory[places[extent] :][: extent.size_bytes])

                tensor = rows_alone(self._bundle.layout.tensors[name], piece.extents)
                weight = self._bundle.place(tensor, (piece.count, self._bundle.cfg.hidden_size), view)
                if self._bundle.read_in_place:
                    self._made[key] = weight
            yield weight

    def close(self) -> None:
        """Stops all threads and closes the file."""
        self._stream.close()
        self._rows.close()

    def _vectors(self) -> dict[str, Tensor]:
        """The parameters outside of layers that are not token matrices: norms, positions and biases."""
        layout = self._bundle.layout
        matrices = {"embed.tokens", head_name(layout.cfg)}
        return {
            name: tensor
            for name, tensor in layout.tensors.items()
            if not name.removeprefix(ENCODER).startswith("layers.") and name not in matrices
        }


def _with_weights(model: ModelLevel, layer: int, weights: Mapping[str, Weight]) -> dict[str, Any]:
    """A layer's parameters as inputs of buckets, including adapters, with its weights in a slot."""
    own = f"layers.{layer}."
    if STACK in model.params:
        planned = layers_of(model.weights, model.bucket_cfg)[layer]
        placed = with_weights(planned, {name.removeprefix(own): each for name, each in weights.items()})
        return {STACK: stack_by_address([placed], [0]).at(0), **shared_by_layers(model.params)}
    other = f"layers.{model.alike[layer]}."
    # A level with its own buckets uses views of the whole model's weights.
    views: Params = shared_sub_model(weights, model.cfg)
    return {
        name: _rebased(each, views[own + name.removeprefix(other)]) if name.startswith(other) else each
        for name, each in layer_params(model.params, layer, model.alike[layer]).items()
    }


def _rebased(weight: Weight, base: Weight) -> Weight:
    if isinstance(weight, Adapted):
        return dataclasses.replace(weight, base=_rebased(weight.base, base))
    return base
