"""Streams the weights of a model from storage, piece by piece, in the forms that buckets take."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.bundle import Bundle
from jaxllm.bundle.layout import Extent
from jaxllm.bundle.rows import rows_alone
from jaxllm.config import ModelConfig
from jaxllm.elastic.submodel import shared_part, with_weights
from jaxllm.errors import ConfigError
from jaxllm.models.layer_stack import STACK, layers_of, stack_by_address
from jaxllm.models.parameters import Params, head_name
from jaxllm.quant import Adapted, Weight
from serving.buckets.parts import layer_params
from serving.host.direct_io import PieceReader, Storage
from serving.host.progress import Progress, loading
from serving.weights.embedding import EmbeddingRows, read_array
from serving.weights.first_read import FirstRead
from serving.weights.level_memory import ResidentPart, piece_weights
from serving.weights.model_level import ModelLevel
from serving.weights.pieces import HeadPiece, LayerPiece, head_pieces, layer_pieces
from serving.weights.prefetch import Meanwhile, Slot, StreamCounts, WeightStream
from serving.weights.prefetch_plan import SLOTS, MemoryBudget, MemoryPlan, plan_memory, spread_evenly

# Most bytes of kept rows of the embedding, and their largest share of the model.
_KEPT_ROWS_BYTES, _KEPT_ROWS_SHARE = 1 << 20, 0.02


def kept_rows_bytes(weight_bytes: int) -> int:
    """Bytes of rows of the embedding that stay in memory, of a model that is streamed."""
    return min(_KEPT_ROWS_BYTES, int(_KEPT_ROWS_SHARE * weight_bytes))


class StreamedWeights:
    """Streams a bundle's weights, piece by piece, within a memory budget.

    Attributes:
      plan: the division of the budget.
      head: the pieces of the head.
      resident_bytes: of resident pieces, which `resize` changes.
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
          bundle: an open one.
          budget: of which the fixed part is taken first.
          storage: options of reads.
          read_ahead: see `WeightStream`.
          part: of each layer, that stays resident, with embedding and head (see `part_weights`).
          levels: sub-models that `begin` accepts.
          progress: called with ("load", bytes done, bytes in all).

        Raises:
          BudgetExceeded: the budget is too small.
          CheckpointError: the file is damaged or cannot be read.
        """
        self._bundle, self._reader = bundle, PieceReader(bundle.path, storage)
        self._part = part
        layers = layer_pieces(bundle.layout) if self._part is None else self._part.pieces
        largest = max(each.memory_bytes for each in layers)
        # With a resident part, embedding and head are resident, too.
        self.head = head_pieces(bundle.layout, most_bytes=bundle.weight_bytes if self._part else largest)
        streamed = [*layers, *(() if self._part else self.head)]
        self._pieces: dict[ModelConfig, list[LayerPiece | HeadPiece]] = {bundle.cfg: streamed}
        # Else whole layers are read at every level.
        if bundle.read_in_place and self._part is None:
            self._pieces |= {cfg: [*layer_pieces(bundle.layout, cfg), *self.head] for cfg in levels}
        sizes = [each.memory_bytes - each.kept_bytes for each in streamed]
        kept_bytes = kept_rows_bytes(bundle.weight_bytes)
        fixed_bytes = budget.fixed_bytes + kept_bytes + (self._part.size_bytes if self._part else 0)
        self.plan: MemoryPlan = plan_memory(
            sizes,
            dataclasses.replace(budget, fixed_bytes=fixed_bytes),
            slot_bytes=largest,
            slots=SLOTS if part is None else part.slots,
        )
        first_read = FirstRead(bundle, self._reader)
        self._stream = WeightStream(
            self._reader,
            self._pieces[bundle.cfg],
            resident=self.plan.resident,
            slots=self.plan.slots,
            slot_bytes=self.plan.slot_bytes,
            read_ahead=read_ahead,
            checksums=first_read.checksums,
        )
        self._kept_bytes = kept_bytes + (self._part.size_bytes if self._part else 0)
        self._sizes, self.resident_bytes = sizes, self.plan.resident_bytes
        staying = self._stream.staying()
        for number, memory in staying.items():
            piece = streamed[number]
            first_read.keep((*piece.ranges, *piece.kept), memory)
        for pieces in self._pieces.values():
            for number, piece in enumerate(pieces):
                if number not in staying or self.resizable:
                    first_read.watch(piece.ranges)
        if self._part is not None:
            self._stream.keep(self._part.load(first_read, staying))
        self._rows = EmbeddingRows(bundle, self._reader, first_read.checksums, kept_bytes=kept_bytes)
        first_read.watch_pages(self._rows.segment)
        first_read.run(loading(progress, bundle.weight_bytes))
        self._placed: dict[tuple[int, int], dict[str, Weight]] = {}
        self._made: dict[tuple[int, int, tuple[int, int]], Any] = {}

    @property
    def counts(self) -> StreamCounts:
        """Counts of reads."""
        return self._stream.counts

    @property
    def idle_read_s(self) -> float:
        """See `serving.runners.runner.Runner`."""
        return self._stream.idle_read_s

    @property
    def staying_bytes(self) -> int:
        """Of weights that are always in memory, and of the slots that others are read into."""
        pieces = 0 if self.resizable else self.resident_bytes
        return self._kept_bytes + self.plan.slots * self.plan.slot_bytes + pieces

    @property
    def resizable(self) -> bool:
        """Whether resident pieces can be given up: not where a level that drafts has a part of them, and
        where there are no slots to read them into."""
        return (self._part is None or self._part.resizable) and self.plan.slots > 0

    def resize(self, resident_bytes: int) -> None:
        """Keeps as many pieces resident as fit, spread evenly as at the start, and no others than then; lets
        the rest go. Between two dispatches, under the model's lock; only where `resizable`.

        Raises:
          CheckpointError: a piece cannot be read.
        """
        kept, room = set[int](), resident_bytes
        for number in spread_evenly(len(self._sizes)):
            if number in self.plan.resident and self._sizes[number] <= room:
                kept.add(number)
                room -= self._sizes[number]
        there = set(self._stream.staying())
        for number in sorted(there - kept):
            slot = self._stream.let_go(number)
            # They alias its memory, and another slot may get its identity.
            self._placed = {key: each for key, each in self._placed.items() if key[0] != id(slot)}
            self._made = {key: each for key, each in self._made.items() if key[0] != id(slot)}
            self.resident_bytes -= self._sizes[number]
        for number in sorted(kept - there):
            self._stream.hold(number)
            self.resident_bytes += self._sizes[number]

    @property
    def caching(self) -> str:
        """Mode of reads: "direct" or "buffered"."""
        return self._reader.caching

    def facts(self) -> dict[str, Any]:
        """The division of the budget and the counts of reads, for reports."""
        counts, plan = self.counts, self.plan
        return {
            "budget_bytes": plan.budget_bytes,
            "planned_bytes": plan.planned_bytes,
            "resident_layers": len(self._stream.staying()),
            "read_bytes": counts.read_bytes,
            "read_bytes_per_s": round(counts.read_bytes / counts.read_s) if counts.read_s else None,
            "caching": self.caching,
        }

    def frozen(self) -> dict[str, Weight]:
        """All parameters by name: final norm and positions resident, all others as shapes, or as views of the
        file that are never read."""
        small = {
            name: self._bundle.place(tensor, tensor.data.shape, functools.partial(read_array, self._reader))
            for name, tensor in self._bundle.layout.tensors.items()
            if name.startswith(("final_norm.", "embed.positions"))
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
        whole = self._pieces[self._bundle.cfg]
        self._stream.use(self._pieces.get(cfg, whole))

    def rows(self, tokens: Sequence[int]) -> tuple[Weight, np.ndarray]:
        """See `EmbeddingRows.rows_of`."""
        return self._rows.rows_of(tokens)

    @contextlib.contextmanager
    def layer(
        self, model: ModelLevel, layer: int, meanwhile: Meanwhile | None = None
    ) -> Iterator[dict[str, Any]]:
        """A layer's parameters under the names of the layer whose buckets it shares.

        They are valid until the context ends; dispatches that take them must have ended by then.
        """
        with self._stream.piece(layer, meanwhile) as slot:
            key = id(slot), layer, model.weights_version
            made = self._made.get(key)
            if made is None:
                made = _with_weights(model, layer, self._weights(slot, layer))
                if self._bundle.read_in_place:
                    self._forget_versions(model)
                    self._made[key] = made
            yield made

    @contextlib.contextmanager
    def head_rows(self, number: int, meanwhile: Meanwhile | None = None) -> Iterator[Weight]:
        """The weight of one piece of `head`, valid until the context ends."""
        piece, name = self.head[number], head_name(self._bundle.cfg)
        if self._part is not None:
            yield self._part.weights[name]
            return
        with self._stream.piece(self._bundle.cfg.layers + number, meanwhile) as slot:
            key = id(slot), self._bundle.cfg.layers + number
            placed = self._placed.get(key)
            if placed is None:
                places = dict(zip(piece.extents, (each.place for each in piece.ranges), strict=True))

                def view(extent: Extent) -> np.ndarray:
                    return extent.array(slot.memory[places[extent] :][: extent.size_bytes])

                tensor = rows_alone(self._bundle.layout.tensors[name], piece.extents)
                placed = {name: self._bundle.place(tensor, (piece.count, self._bundle.cfg.hidden_size), view)}
                if self._bundle.read_in_place:
                    self._placed[key] = placed
            yield placed[name]

    def close(self) -> None:
        """Stops all threads and closes the file."""
        self._stream.close()
        self._rows.close()

    def _weights(self, slot: Slot, layer: int) -> dict[str, Weight]:
        """A layer's weights in a slot, by their full names."""
        key = id(slot), layer
        if key in self._placed:
            return self._placed[key]
        piece = self._pieces[self._bundle.cfg][layer]
        assert isinstance(piece, LayerPiece)
        if self._part is None:
            weights = piece_weights(self._bundle, piece, slot.memory)
        else:
            weights = self._part.layer_weights(piece, slot.memory)
        if self._bundle.read_in_place:
            self._placed[key] = weights
        return weights

    def _forget_versions(self, model: ModelLevel) -> None:
        """Drops the parameters of former versions of a level."""
        level, version = model.weights_version
        for key in [key for key in self._made if key[2][0] == level and key[2][1] != version]:
            del self._made[key]


def _with_weights(model: ModelLevel, layer: int, weights: Mapping[str, Weight]) -> dict[str, Any]:
    """A layer's parameters as buckets take them, adapters included, with its weights in a slot."""
    own = f"layers.{layer}."
    if STACK in model.params:
        planned = layers_of(model.weights, model.bucket_cfg)[layer]
        placed = with_weights(planned, {name.removeprefix(own): each for name, each in weights.items()})
        return {STACK: stack_by_address([placed], [0]).at(0)}
    other = f"layers.{model.alike[layer]}."
    # A level with buckets of its own takes views of the whole model's weights.
    views: Params = shared_part(weights, model.cfg)
    return {
        name: _rebased(each, views[own + name.removeprefix(other)])
        for name, each in layer_params(model.params, layer, model.alike[layer]).items()
    }


def _rebased(weight: Weight, base: Weight) -> Weight:
    """A weight with another base; its adapter stays."""
    if isinstance(weight, Adapted):
        return dataclasses.replace(weight, base=_rebased(weight.base, base))
    return base
