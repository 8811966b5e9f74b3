"""Streams the weights of a model from storage, piece by piece, as inputs of buckets. Of the embedding only
the rows of a pass's tokens are read."""

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
from jaxllm.serving.host.direct_io import PieceReader
from jaxllm.serving.host.progress import Progress, loading
from jaxllm.serving.host.storage import Storage
from jaxllm.serving.weights.memory_plan import SLOTS, MemoryBudget, MemoryPlan, plan_memory
from jaxllm.serving.weights.model_level import ModelLevel
from jaxllm.serving.weights.pieces import (
    LayerPiece,
    Passes,
    head_pieces,
    layer_pieces,
    segment_pieces,
)
from jaxllm.serving.weights.prefetch import READS, FirstRead, Meanwhile, Slot, StreamCounts, WeightStream
from jaxllm.serving.weights.resident_part import ResidentPart, head_weight, kept_rows_bytes, piece_weights

_PARAMETER = "embed.tokens"
_THREADS = 4


class EmbeddingRows:
    """The rows of a bundle's embedding.

    Prompts mostly repeat a few tokens, so the most recently used rows are cached.
    """

    def __init__(
        self,
        bundle: Bundle,
        reader: PieceReader,
        first_read: FirstRead,
        *,
        kept_bytes: int,
        resident: Callable[[Extent], np.ndarray | None] = lambda _: None,
    ) -> None:
        """See the class; reads nothing yet, but plans checksums of what it will read.

        Args:
          bundle: an open bundle.
          reader: reader of its file.
          first_read: gets the checksums of pages.
          kept_bytes: size limit of cached rows.
          resident: returns a view of an array of rows; None if it is not in memory.
        """
        self._bundle, self._reader, self._first_read = bundle, reader, first_read
        self._resident = resident
        self._tensor = bundle.layout.tensors[_PARAMETER]
        for segment, extent in zip(self._segments(), self._tensor.extents, strict=True):
            if resident(extent) is None:
                first_read.watch_pages(segment)
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

        def read(first: int) -> list[np.ndarray]:
            found = []
            for segment, each in zip(self._segments(), rows_at(self._tensor, first, self._step), strict=True):
                array = self._resident(each)
                found.append(self._checked(segment, each) if array is None else array)
            return found

        missing = sorted(firsts - self._kept.keys())
        self._kept.update(zip(missing, self._pool.map(read, missing), strict=True))
        found = {first: self._kept.pop(first) for first in firsts}
        # In the order of last use.
        self._kept.update(found)
        while len(self._kept) > max(self._room, len(firsts)):
            del self._kept[next(iter(self._kept))]
        return found

    def _segments(self) -> list[str]:
        """The segment of each array of the embedding."""
        own = self._tensor.segment
        return [low_segment(own) if each is self._tensor.low else own for each in self._tensor.extents]

    def _checked(self, segment: str, extent: Extent) -> np.ndarray:
        """Reads an array of rows with all of the pages that it touches, and checks these."""
        whole = self._bundle.layout.segments[segment]
        start = whole.offset
        begin = (extent.offset - start) // PAGE * PAGE
        end = -(-(extent.offset + extent.size_bytes - start) // PAGE) * PAGE
        end = min(end, whole.size_bytes)
        at = extent.offset - start - begin
        for _ in range(READS):
            data = self._reader.read(start + begin, end - begin)
            if self._first_read.same_pages(segment, start + begin, data):
                return extent.array(data[at : at + extent.size_bytes].copy())
        raise self._first_read.changed(start + begin, end - begin)


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
          part: part of each layer that stays resident, with the head or its high plane (see `part_weights`).
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
        if self._part is not None and self._part.has_whole_head:
            self.head, read_head = [self._part.head], []
        else:
            self.head = head_pieces(bundle.layout, most_bytes=largest, low=self._part is not None)
            read_head = self.head
        self._passes = passes = Passes(bundle.layout, encoder, layers, read_head)
        # Else whole layers are read at every level.
        if bundle.read_in_place and self._part is None:
            for cfg in levels:
                passes.add_level(cfg, layer_pieces(bundle.layout, cfg))
        sizes = [each.memory_bytes - each.kept_bytes for each in passes.whole]
        rows_bytes = kept_rows_bytes(bundle.weight_bytes)
        self._kept_bytes = rows_bytes + sum(each.size_bytes for each in self._vectors().values())
        self._kept_bytes += self._part.size_bytes if self._part else 0
        parts = budget.fixed_parts if part is None else f"{budget.fixed_parts}; the {part.title}"
        fixed_bytes = budget.fixed_bytes + self._kept_bytes
        self.plan: MemoryPlan = plan_memory(
            sizes,
            dataclasses.replace(budget, fixed_bytes=fixed_bytes, fixed_parts=parts),
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
        # Rows of a tied embedding are those of the head.
        resident = (
            {} if self._part is None or not bundle.cfg.tied_head else {"resident": self._part.head_array}
        )
        self._rows = EmbeddingRows(bundle, self._reader, first_read, kept_bytes=rows_bytes, **resident)
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
            "plan": self.plan_text(),
            "budget_bytes": plan.budget_bytes,
            "planned_bytes": plan.planned_bytes,
            "resident_layers": len(self._stream.staying()),
            "read_bytes": counts.read_bytes,
            "pass_bytes": self._stream.pass_bytes,
            "read_bytes_per_s": round(counts.read_bytes / counts.read_s) if counts.read_s else None,
            "caching": self._reader.caching,
        }

    def plan_text(self) -> str:
        """The division of the budget in words."""
        plan, part, pieces = self.plan, self._part, "pieces"
        if part is not None:
            pieces = f"{part.title} in {_megabytes(part.size_bytes)}, other pieces"
        return (
            f"{_megabytes(plan.fixed_bytes - self._kept_bytes)} for caches, activations and the runtime; "
            f"{pieces} of layers and head: {len(self._stream.staying())} of {len(self._sizes)} in "
            f"{_megabytes(self.resident_bytes)}, and {plan.slots} slots of {_megabytes(plan.slot_bytes)}; a "
            f"pass reads {_megabytes(self._stream.pass_bytes)} and its tokens' rows of the embedding"
        )

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
        """The resident part of layers, and the head or its high plane, by name.

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
        if self._part is not None and not self._bundle.cfg.tied_head:
            # Drafts read their rows of the mapped file, whose pages would stay.
            self._bundle.release_segment(self._bundle.layout.tensors[_PARAMETER].segment)
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
        piece, part = self.head[number], self._part
        if part is not None and part.has_whole_head:
            yield part.weights[head_name(self._bundle.cfg)]
            return
        place = self._passes.first_head + number
        with self._stream.piece(place, meanwhile) as slot:
            # All levels share the head.
            key = id(slot), place, (0, 0)
            weight = self._made.get(key)
            if weight is None:

                def array(extent: Extent) -> np.ndarray | None:
                    read = piece.array(extent, slot.memory)
                    return part.head_array(extent) if read is None and part is not None else read

                weight = head_weight(self._bundle, piece, array)
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


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _rebased(weight: Weight, base: Weight) -> Weight:
    if isinstance(weight, Adapted):
        return dataclasses.replace(weight, base=_rebased(weight.base, base))
    return base
