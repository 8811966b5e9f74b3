"""Splits a bundle into the pieces that are read as a whole: a layer, or some rows of the head."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxllm.bundle.layout import PAGE, Extent, Layout, Tensor, low_segment, rows_at
from jaxllm.config import ModelConfig
from jaxllm.models.layer_stack import within_layer
from jaxllm.models.parameters import ENCODER, ParamSpec, head_name, param_specs
from jaxllm.quant import blocked_shapes
from jaxllm.serving.weights.memory_plan import spread_evenly

# The rows of a head piece are a multiple of this, for panels and alignment.
_ROW_STEP = 64
# Gaps between the parts of a layer that a level uses are also read, if that is faster than a seek.
_SHORT_GAP_BYTES = 64 << 10

# Threads that read a piece together. A block is large enough to hide the latency of storage and the Python
# overhead of a thread (0.1 ms while others compute), and small enough for threads to share the piece.
READERS = 4
_LEAST_BLOCK_BYTES, _MOST_BLOCK_BYTES = 2 << 20, 4 << 20
# First byte in the file, and end.
_Span = tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """Bytes `[offset, offset + size_bytes)` of the file, and their start `place` in a piece's memory; both
    have the same offset in a page."""

    offset: int
    size_bytes: int
    place: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """Part of a model that is read as a whole.

    Attributes:
      ranges: ranges to read.
      memory_bytes: memory of the whole piece.
      kept: ranges that are not read, because a resident level has them.
    """

    ranges: tuple[Range, ...]
    memory_bytes: int
    kept: tuple[Range, ...] = ()

    @property
    def kept_bytes(self) -> int:
        """Memory of the kept ranges, in whole pages."""
        return sum(_whole_pages(each.place % PAGE + each.size_bytes) for each in self.kept)

    @property
    def read_bytes(self) -> int:
        """Bytes to read."""
        return sum(each.size_bytes for each in self.ranges)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPiece(Piece):
    """A layer, or the part of it that a level uses. In memory it has the layout of the whole layer.

    Attributes:
      start: index of the segment's first byte in memory.
    """

    layer: int
    segment: str
    start: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadPiece(Piece):
    """Rows `[first, first + count)` of the head.

    Attributes:
      first: token id of the first row.
      count: number of rows.
      extents: the arrays of the rows that are read, in the file; `ranges` has one for each.
    """

    first: int
    count: int
    extents: tuple[Extent, ...]

    def array(self, extent: Extent, memory: np.ndarray) -> np.ndarray | None:
        """A view of rows of one of its arrays in the piece's memory; None if they are not in it."""
        for own, each in zip(self.extents, self.ranges, strict=True):
            at = extent.offset - own.offset
            if at >= 0 and at + extent.size_bytes <= own.size_bytes:
                return extent.array(memory[each.place + at :][: extent.size_bytes])
        return None


def without_reads(piece: Piece) -> Piece:
    """A piece without anything to read."""
    return dataclasses.replace(piece, ranges=())


def read_blocks(ranges: Sequence[Range]) -> list[tuple[int, int, int]]:
    """The blocks of a piece, each read by one call: offset in the file, start in memory, number of bytes."""
    size = sum(each.size_bytes for each in ranges)
    # Equal blocks, plus a page for their ends.
    count = max(1, min(READERS, size // _LEAST_BLOCK_BYTES))
    step = min(_MOST_BLOCK_BYTES, -(-size // count) + PAGE)
    blocks = []
    for each in ranges:
        at = 0
        while at < each.size_bytes:
            # Blocks end at a page's end, so that no page is read twice.
            end = (each.offset + at + step) // PAGE * PAGE - each.offset
            size = min(end, each.size_bytes) - at
            blocks.append((each.offset + at, each.place + at, size))
            at += size
    return blocks


def layer_pieces(
    layout: Layout, cfg: ModelConfig | None = None, *, gap_bytes: int | None = None
) -> list[LayerPiece]:
    """The layers of a model.

    Args:
      layout: layout of the bundle.
      cfg: config of a sub-model, to read only its units; None for the whole model.
      gap_bytes: maximum gap between used parts to read, too; None for gaps that are faster to read than to
        skip.
    """
    pieces = segment_pieces(layout, [f"layers.{layer}" for layer in range(layout.cfg.layers)])
    if cfg is None or cfg == layout.cfg:
        return pieces
    whole, sub = param_specs(layout.cfg), param_specs(cfg)
    gap = _SHORT_GAP_BYTES if gap_bytes is None else gap_bytes
    return _with_spans(layout, pieces, lambda name, tensor: _used_spans(tensor, whole[name], sub[name]), gap)


def segment_pieces(layout: Layout, segments: Sequence[str], *, apart: bool = False) -> list[LayerPiece]:
    """One piece for each of the segments of the layers in order, or of their low planes. A segment followed
    by its low planes is read with them, unless `apart`."""
    pieces = []
    for layer, name in enumerate(segments):
        segment = layout.segments[name]
        low = None if apart else layout.segments.get(low_segment(name))
        start = segment.offset % PAGE
        # Ranges end with their segments, which are checked one by one.
        ranges = [
            Range(offset=each.offset, size_bytes=each.size_bytes, place=start + each.offset - segment.offset)
            for each in (segment, low)
            if each is not None
        ]
        pieces.append(
            LayerPiece(
                layer=layer,
                segment=name,
                start=start,
                ranges=tuple(ranges),
                memory_bytes=_whole_pages(ranges[-1].place + ranges[-1].size_bytes),
            )
        )
    return pieces


def parts_of_pieces(
    layout: Layout, pieces: Sequence[LayerPiece], wanted: Callable[[str], bool]
) -> list[LayerPiece]:
    """The pieces of layers, or of their low planes, that hold the parameters whose name within a layer is
    `wanted`."""

    def spans(name: str, tensor: Tensor) -> list[_Span]:
        extents = tensor.extents if wanted(within_layer(name.removeprefix(ENCODER))) else ()
        return [(each.offset, each.offset + each.size_bytes) for each in extents]

    return _with_spans(layout, pieces, spans, _SHORT_GAP_BYTES)


def _with_spans(
    layout: Layout,
    pieces: Sequence[LayerPiece],
    spans_of: Callable[[str, Tensor], list[_Span]],
    gap_bytes: int,
) -> list[LayerPiece]:
    """The pieces with only the spans of their parameters to read."""
    found = []
    for piece in pieces:
        named = [each for each in layout.tensors.items() if piece.segment in each[1].segments]
        spans = sorted(span for name, tensor in named for span in spans_of(name, tensor))
        ranges = [part for whole in piece.ranges for part in _parts(whole, spans, gap_bytes)]
        found.append(dataclasses.replace(piece, ranges=tuple(ranges)))
    return found


def beside_level(pieces: Sequence[LayerPiece], level: Sequence[LayerPiece]) -> list[LayerPiece]:
    """The pieces of a whole model with a resident level, given the pieces of both."""
    found = []
    for piece, part in zip(pieces, level, strict=True):
        ranges: list[Range] = []
        for whole in piece.ranges:
            at, end, rest = whole.offset, whole.offset + whole.size_bytes, []
            for kept in (*part.ranges, Range(offset=end, size_bytes=0, place=0)):
                begin = min(max(kept.offset, at), end)
                if begin > at:
                    rest.append((at, begin))
                at = max(at, min(kept.offset + kept.size_bytes, end))
            # Resident ranges are read again if that is faster than skipping them.
            ranges += _parts(whole, rest, _SHORT_GAP_BYTES)
        found.append(dataclasses.replace(piece, ranges=tuple(ranges), kept=part.ranges))
    return found


def head_pieces(layout: Layout, *, most_bytes: int, low: bool = False) -> list[HeadPiece]:
    """The head in equal pieces, except for the last, of at most `most_bytes` unless a single step of rows is
    longer.

    Args:
      layout: layout of the bundle.
      most_bytes: see above.
      low: whether to read only the low plane, beside a resident high one.
    """
    head = layout.tensors[head_name(layout.cfg)]
    rows = layout.cfg.vocab_size
    row_bytes = (head.size_bytes if head.low is None or not low else head.low.size_bytes) / rows
    steps = max(1, int(most_bytes / row_bytes) // _ROW_STEP)
    pieces = -(-rows // (steps * _ROW_STEP))
    # Equal pieces share a bucket and fit their slots exactly.
    count = -(-rows // pieces // _ROW_STEP) * _ROW_STEP if pieces > 1 else rows
    skipped = 2 if low else 0
    return [
        _head_piece(first, min(count, rows - first), rows_at(head, first, min(count, rows - first))[skipped:])
        for first in range(0, rows, count)
    ]


def resident_head(layout: Layout, *, high: bool) -> HeadPiece:
    """The whole head, or only its `high` plane if it is nested, to be resident."""
    extents = layout.tensors[head_name(layout.cfg)].extents
    return _head_piece(0, layout.cfg.vocab_size, extents[:2] if high else extents)


def _head_piece(first: int, count: int, extents: tuple[Extent, ...]) -> HeadPiece:
    ranges, place = [], 0
    for each in extents:
        start = each.offset % PAGE
        ranges.append(Range(offset=each.offset, size_bytes=each.size_bytes, place=place + start))
        place += _whole_pages(start + each.size_bytes)
    return HeadPiece(first=first, count=count, extents=extents, ranges=tuple(ranges), memory_bytes=place)


def _used_spans(tensor: Tensor, whole: ParamSpec, used: ParamSpec) -> list[_Span]:
    """The spans of a sub-model's part of a parameter."""
    extents = tensor.extents
    if used.shape[1:] != whole.shape[1:]:
        # The first rows of each expert are not contiguous in the stack.
        sizes = [each.size_bytes for each in extents]
    elif tensor.scale is None:
        sizes = [_resized(tensor.data, used.shape)]
    else:
        data, scale = blocked_shapes(
            used.shape,
            bits=tensor.bits,
            group=tensor.group,
            axis=tensor.axis,
            nested=tensor.low is not None,
            minima=tensor.minima,
        )
        shapes = (data, scale, data)[: len(extents)]
        sizes = [_resized(each, shape) for each, shape in zip(extents, shapes, strict=True)]
    return [(each.offset, each.offset + size) for each, size in zip(extents, sizes, strict=True)]


def _parts(whole: Range, spans: Sequence[_Span], gap_bytes: int) -> list[Range]:
    """The ascending spans within a range, merged across gaps that are at most `gap_bytes`."""
    joined: list[_Span] = []
    for begin, end in spans:
        if not whole.offset <= begin < whole.offset + whole.size_bytes:
            continue
        if joined and begin - joined[-1][1] <= gap_bytes:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return [
        Range(offset=begin, size_bytes=end - begin, place=whole.place + begin - whole.offset)
        for begin, end in joined
    ]


def _resized(extent: Extent, shape: tuple[int, ...]) -> int:
    return dataclasses.replace(extent, shape=shape).size_bytes


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


# What a layer of the decoder reads of a source's hidden states, once per prompt.
_OF_SOURCE = ("cross.k", "cross.v", "cross.k_bias", "cross.v_bias")


class Passes:
    """The pieces of a model in the order of a pass: the encoder's layers, the layers, the head.

    Each kind of pass has all pieces; those that it does not read have no ranges.

    Attributes:
      whole: each piece as a whole, as when resident.
      of_tokens: the parts for tokens.
      of_level: the same, by a level's config.
      of_source: the parts for a source; empty ranges without an encoder.
      first_layer, first_head: numbers of the first layer, and of the first piece of the head.
      kept_first: numbers in the order of making pieces resident: parts for each token before parts for each
        prompt.
    """

    def __init__(
        self,
        layout: Layout,
        encoder: Sequence[LayerPiece],
        layers: Sequence[LayerPiece],
        head: Sequence[HeadPiece],
    ) -> None:
        self.first_layer, self.first_head = len(encoder), len(encoder) + len(layers)
        self.whole: list[Piece] = [*encoder, *layers, *head]
        self.of_tokens, self.of_source = self.whole, list[Piece]()
        if encoder:
            once = parts_of_pieces(layout, layers, lambda name: name in _OF_SOURCE)
            each = parts_of_pieces(layout, layers, lambda name: name not in _OF_SOURCE)
            self.of_source = [*encoder, *once, *map(without_reads, head)]
            self.of_tokens = [*map(without_reads, encoder), *each, *head]
        self.of_level: dict[ModelConfig, list[Piece]] = {}
        self._layout, self._encoder, self._head = layout, encoder, head
        later = [self.first_layer + each for each in spread_evenly(len(self.whole) - self.first_layer)]
        self.kept_first = [*later, *(spread_evenly(len(encoder)) if encoder else ())]

    def add_level(self, cfg: ModelConfig, layers: Sequence[LayerPiece]) -> None:
        """Adds the pass of a level with these pieces of layers; sources are read as for the whole model."""
        if self._encoder:
            layers = parts_of_pieces(self._layout, layers, lambda name: name not in _OF_SOURCE)
        self.of_level[cfg] = [*map(without_reads, self._encoder), *layers, *self._head]
