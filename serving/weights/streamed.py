"""Brings the weights of a model into memory piece by piece, as the buckets of its layers take them."""

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
from jaxllm.elastic.submodel import CountedSubModel, shared_part
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import Params
from jaxllm.quant import Adapted, AdaptedFromBuffer, Weight
from serving.buckets.parts import layer_params
from serving.host.direct_io import PieceReader, Storage
from serving.host.progress import Progress, loading
from serving.weights.embedding import EmbeddingRows, read_array
from serving.weights.first_read import FirstReading
from serving.weights.level_memory import LevelMemory
from serving.weights.model_level import ModelLevel
from serving.weights.pieces import HeadPiece, LayerPiece, head_pieces, layer_pieces
from serving.weights.prefetch import Meanwhile, Slot, StreamCounts, WeightStream
from serving.weights.prefetch_plan import MemoryPlan, plan_memory

# Of the embedding table's rows that stay: at most so many bytes, and this share of the model.
_KEPT_ROWS_BYTES, _KEPT_ROWS_SHARE = 1 << 20, 0.02


class StreamedWeights:
    """Brings a bundle's weights into memory, piece by piece, within a budget.

    Attributes:
      plan: how the budget is spent.
      head: the pieces of the table that gives logits.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        budget_bytes: int,
        fixed_bytes: int,
        what: str,
        storage: Storage | None = None,
        read_ahead: bool = True,
        level: ModelConfig | None = None,
        levels: Sequence[ModelConfig] = (),
        progress: Progress | None = None,
    ) -> None:
        """Takes the memory, and reads the file once: checks it, and puts what stays into memory.

        Args:
          bundle: an open one.
          budget_bytes, fixed_bytes, what: see `plan_memory`.
          storage: how it is read.
          read_ahead: see `WeightStream`.
          level: a sub-model that stays in memory (see `level_weights`).
          levels: sub-models that passes may be of.
          progress: called with ("load", bytes done, bytes in all).

        Raises:
          BudgetExceeded: the budget is too small.
          CheckpointError: the file is damaged or cannot be read.
        """
        self._bundle, self._reader = bundle, PieceReader(bundle.path, storage)
        self._level = None if level is None else LevelMemory(bundle, level)
        layers = layer_pieces(bundle.layout) if self._level is None else self._level.pieces
        largest = max(each.memory_bytes for each in layers)
        # With a level, the tables stay.
        self.head = head_pieces(bundle.layout, most_bytes=bundle.weight_bytes if self._level else largest)
        streamed = [*layers, *(() if self._level else self.head)]
        self._pieces: dict[ModelConfig, list[LayerPiece | HeadPiece]] = {bundle.cfg: streamed}
        # Else whole layers are read, whatever of them is used.
        if bundle.read_in_place and self._level is None:
            self._pieces |= {cfg: [*layer_pieces(bundle.layout, cfg), *self.head] for cfg in levels}
        sizes = [each.memory_bytes - getattr(each, "kept_bytes", 0) for each in streamed]
        kept_bytes = min(_KEPT_ROWS_BYTES, int(_KEPT_ROWS_SHARE * bundle.weight_bytes))
        fixed_bytes += kept_bytes + (self._level.size_bytes if self._level else 0)
        self.plan: MemoryPlan = plan_memory(
            sizes, budget_bytes=budget_bytes, fixed_bytes=fixed_bytes, what=what, slot_bytes=largest
        )
        reading = FirstReading(bundle, self._reader)
        self._stream = WeightStream(
            self._reader,
            self._pieces[bundle.cfg],
            resident=self.plan.resident,
            slots=self.plan.slots,
            slot_bytes=self.plan.slot_bytes,
            read_ahead=read_ahead,
            checksums=reading.checksums,
        )
        staying = self._stream.staying()
        for number, memory in staying.items():
            piece = streamed[number]
            reading.keep((*piece.ranges, *getattr(piece, "kept", ())), memory)
        for pieces in self._pieces.values():
            for number, piece in enumerate(pieces):
                if number not in staying:
                    reading.watch(piece.ranges)
        if self._level is not None:
            self._stream.keep(self._level.load(reading, staying))
        self._rows = EmbeddingRows(bundle, self._reader, reading.checksums, kept_bytes=kept_bytes)
        reading.watch_pages(self._rows.segment)
        reading.run(loading(progress, bundle.weight_bytes))
        self._placed: dict[tuple[int, int], dict[str, Weight]] = {}
        self._made: dict[tuple[int, int, tuple[int, int]], Any] = {}

    @property
    def counts(self) -> StreamCounts:
        """What was read."""
        return self._stream.counts

    @property
    def caching(self) -> str:
        """How the file is read: "direct" or "buffered"."""
        return self._reader.caching

    def facts(self) -> dict[str, Any]:
        """How the budget is spent and what was read, for people."""
        counts, plan = self.counts, self.plan
        return {
            "budget_bytes": plan.budget_bytes,
            "planned_bytes": plan.planned_bytes,
            "resident_layers": len(plan.resident),
            "read_bytes": counts.read_bytes,
            "read_bytes_per_s": round(counts.read_bytes / counts.reading_s) if counts.reading_s else None,
            "caching": self.caching,
        }

    def frozen(self) -> dict[str, Weight]:
        """All parameters by name: norms and positions in memory, all others as their shapes alone, or as
        views of the file that nobody reads."""
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
            weights = self._bundle.segment_weights(segment, slot)
            found |= jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights)
        return {**found, **small}

    def level_weights(self) -> dict[str, Weight]:
        """All parameters by name, of which the level that stays is in memory.

        Raises:
          ConfigError: none does.
        """
        if self._level is None:
            raise ConfigError("no level of this model stays in memory; name one when it is opened")
        return self._level.weights

    def begin(self, cfg: ModelConfig) -> None:
        """A pass of the model, or of one of its levels, begins."""
        whole = self._pieces[self._bundle.cfg]
        self._stream.use(self._pieces.get(cfg, whole))

    def rows(self, tokens: Sequence[int]) -> tuple[Weight, np.ndarray]:
        """See `EmbeddingRows.table`."""
        return self._rows.table(tokens)

    @contextlib.contextmanager
    def layer(
        self, model: ModelLevel, layer: int, meanwhile: Meanwhile | None = None
    ) -> Iterator[dict[str, Any] | CountedSubModel]:
        """A layer's parameters, as the bucket takes them that it shares with others like it.

        They are there until the context ends, and what reads them must be done by then.
        """
        with self._stream.piece(layer, meanwhile) as slot:
            key = id(slot), layer, model.weights_version
            made = self._made.get(key)
            if made is None:
                own = layer_params(model.params, layer, model.alike[layer])
                made = _with_weights(own, self._weights(slot, layer), layer, model)
                if self._bundle.read_in_place:
                    self._forget_versions(model)
                    self._made[key] = made
            yield made

    @contextlib.contextmanager
    def head_rows(self, number: int, meanwhile: Meanwhile | None = None) -> Iterator[Weight]:
        """One of the pieces of `head`."""
        piece, name = self.head[number], "embed.tokens" if self._bundle.cfg.tied_head else "head"
        if self._level is not None:
            yield self._level.weights[name]
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
        """Ends reading."""
        self._stream.close()
        self._rows.close()

    def _weights(self, slot: Slot, layer: int) -> dict[str, Weight]:
        """A layer's weights in a slot, by their full names."""
        key = id(slot), layer
        if key in self._placed:
            return self._placed[key]
        piece = self._pieces[self._bundle.cfg][layer]
        assert isinstance(piece, LayerPiece)
        weights = self._bundle.segment_weights(piece.segment, slot.memory[piece.start :])
        if self._bundle.read_in_place:
            self._placed[key] = weights
        return weights

    def _forget_versions(self, model: ModelLevel) -> None:
        """Drops what was made of parameters that a level has no more."""
        level, version = model.weights_version
        for key in [key for key in self._made if key[2][0] == level and key[2][1] != version]:
            del self._made[key]


def _with_weights(
    params: dict[str, Any] | CountedSubModel, weights: Mapping[str, Weight], layer: int, model: ModelLevel
) -> dict[str, Any] | CountedSubModel:
    """A layer's parameters, adapters and all, over its weights in a slot."""
    own, other = f"layers.{layer}.", f"layers.{model.alike[layer]}."
    if isinstance(params, CountedSubModel):
        named = {other + name.removeprefix(own): each for name, each in weights.items()}
        return dataclasses.replace(params, whole=named)
    # Where a level has buckets of its own, it takes views of the whole model's weights.
    views: Params = shared_part(weights, model.cfg)
    return {name: _rebased(each, views[own + name.removeprefix(other)]) for name, each in params.items()}


def _rebased(weight: Weight, base: Weight) -> Weight:
    """A weight with its adapter, if it has one, over another base."""
    if isinstance(weight, Adapted | AdaptedFromBuffer):
        return dataclasses.replace(weight, base=_rebased(weight.base, base))
    return base
