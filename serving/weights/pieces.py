"""Cuts a bundle into pieces that are read and computed together: a layer, or some rows of the head."""

import dataclasses
from collections.abc import Sequence

from jaxllm.bundle.layout import PAGE, Extent, Layout, Tensor
from jaxllm.bundle.rows import rows_at
from jaxllm.config import ModelConfig
from jaxllm.models.parameters import ParamSpec, param_specs
from jaxllm.quant import blocked_shapes

# Rows of the table in one piece are a multiple of this, for panels and alignment.
_ROW_STEP = 64
# What lies between two parts of a layer that a level needs is read, too, where it is shorter than a seek.
_SHORT_GAP_BYTES = 64 << 10

# Threads that read a piece together. Of one call: so large that a disk's time to find it counts for little,
# and so small that they share a piece.
READERS = 4
_LEAST_BLOCK_BYTES, _MOST_BLOCK_BYTES = 256 << 10, 4 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """Bytes of the file `[offset, offset + size_bytes)`, which go to `place` in a piece's memory; both lie
    equally far from a page's start."""

    offset: int
    size_bytes: int
    place: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPiece:
    """A layer, or what a level uses of it. In memory each byte lies where it does in the whole layer.

    Attributes:
      layer: its index.
      segment: that holds it.
      start: where its first byte is in memory.
      ranges: what is read.
      memory_bytes: that it takes, the whole layer's.
      kept: what is not read, for it is in memory elsewhere: a level that stays.
    """

    layer: int
    segment: str
    start: int
    ranges: tuple[Range, ...]
    memory_bytes: int
    kept: tuple[Range, ...] = ()

    @property
    def kept_bytes(self) -> int:
        """Memory that the kept part takes by itself, in whole pages."""
        return sum(_whole_pages(each.place % PAGE + each.size_bytes) for each in self.kept)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadPiece:
    """Rows `[first, first + count)` of the table that gives logits.

    Attributes:
      first: token id.
      count: of tokens.
      extents: the rows' data, and their scales if they are quantized, in the file.
      ranges: what is read, extent by extent.
      memory_bytes: that it takes.
    """

    first: int
    count: int
    extents: tuple[Extent, ...]
    ranges: tuple[Range, ...]
    memory_bytes: int


Piece = LayerPiece | HeadPiece


def read_bytes(piece: Piece) -> int:
    """What is read of the file for a piece."""
    return sum(each.size_bytes for each in piece.ranges)


def read_blocks(ranges: Sequence[Range]) -> list[tuple[int, int, int]]:
    """The parts of a piece that are read by a call each: offset in the file, place in memory, bytes."""
    share = sum(each.size_bytes for each in ranges) // READERS
    step = min(_MOST_BLOCK_BYTES, max(_LEAST_BLOCK_BYTES, share))
    blocks = []
    for each in ranges:
        at = 0
        while at < each.size_bytes:
            # To a page's end, so that no page is read twice.
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
      layout: the bundle's.
      cfg: a sub-model, of which only what it uses is read; None for the whole model.
      gap_bytes: what lies between two used parts counts as used where it is no longer; None for what is read
        as soon as skipped.
    """
    sub = None if cfg is None or cfg == layout.cfg else param_specs(cfg)
    whole = param_specs(layout.cfg)
    tensors: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in layout.tensors.items():
        tensors.setdefault(tensor.segment, []).append((name, tensor))
    pieces = []
    for layer in range(layout.cfg.layers):
        segment = layout.segments[f"layers.{layer}"]
        start = segment.offset % PAGE
        first = segment.offset - start
        if sub is None:
            ranges = [Range(offset=segment.offset, size_bytes=segment.size_bytes, place=start)]
        else:
            used = sorted(
                span
                for name, tensor in tensors[segment.name]
                for span in _used_spans(tensor, whole[name], sub[name])
            )
            ranges = [
                Range(offset=begin, size_bytes=end - begin, place=begin - first)
                for begin, end in _joined(used, _SHORT_GAP_BYTES if gap_bytes is None else gap_bytes)
            ]
        pieces.append(
            LayerPiece(
                layer=layer,
                segment=segment.name,
                start=start,
                ranges=tuple(ranges),
                memory_bytes=_whole_pages(start + segment.size_bytes),
            )
        )
    return pieces


def beside_level(pieces: Sequence[LayerPiece], level: Sequence[LayerPiece]) -> list[LayerPiece]:
    """The pieces of a whole model of which a level stays in memory.

    Args:
      pieces: the whole model's.
      level: the level's, of the same layers.
    """
    found = []
    for piece, part in zip(pieces, level, strict=True):
        (whole,) = piece.ranges
        at, end, rest = whole.offset, whole.offset + whole.size_bytes, []
        for kept in (*part.ranges, Range(offset=end, size_bytes=0, place=0)):
            if kept.offset > at:
                rest.append((at, kept.offset))
            at = max(at, kept.offset + kept.size_bytes)
        # What stays is read again where skipping it would take longer.
        ranges = [
            Range(offset=begin, size_bytes=last - begin, place=whole.place + begin - whole.offset)
            for begin, last in (_joined(rest, _SHORT_GAP_BYTES) if rest else ())
        ]
        found.append(dataclasses.replace(piece, ranges=tuple(ranges), kept=part.ranges))
    return found


def head_pieces(layout: Layout, *, most_bytes: int) -> list[HeadPiece]:
    """The table that gives logits, cut into equal pieces (but the last) of at most `most_bytes` where rows
    are that short."""
    table = layout.tensors["embed.tokens" if layout.cfg.tied_head else "head"]
    rows = layout.cfg.vocab_size
    row_bytes = table.size_bytes / rows
    steps = max(1, int(most_bytes / row_bytes) // _ROW_STEP)
    pieces = -(-rows // (steps * _ROW_STEP))
    # Equal pieces share a bucket, and waste no memory.
    count = -(-rows // pieces // _ROW_STEP) * _ROW_STEP if pieces > 1 else rows
    return [_head_piece(table, first, min(count, rows - first)) for first in range(0, rows, count)]


def _head_piece(table: Tensor, first: int, count: int) -> HeadPiece:
    extents, ranges, place = rows_at(table, first, count), [], 0
    for each in extents:
        start = each.offset % PAGE
        ranges.append(Range(offset=each.offset, size_bytes=each.size_bytes, place=place + start))
        place += _whole_pages(start + each.size_bytes)
    return HeadPiece(first=first, count=count, extents=extents, ranges=tuple(ranges), memory_bytes=place)


def _used_spans(tensor: Tensor, whole: ParamSpec, used: ParamSpec) -> list[tuple[int, int]]:
    """Where in the file a sub-model's part of a parameter lies, as (first byte, behind the last)."""
    extents = [tensor.data] if tensor.scale is None else [tensor.data, tensor.scale]
    if used.shape[1:] != whole.shape[1:]:
        # Rows of each expert are no beginning of the stack.
        sizes = [each.size_bytes for each in extents]
    elif tensor.scale is None:
        sizes = [_resized(tensor.data, used.shape)]
    else:
        shapes = blocked_shapes(used.shape, bits=tensor.bits, group=tensor.group, axis=tensor.axis)
        sizes = [_resized(each, shape) for each, shape in zip(extents, shapes, strict=True)]
    return [(each.offset, each.offset + size) for each, size in zip(extents, sizes, strict=True)]


def _resized(extent: Extent, shape: tuple[int, ...]) -> int:
    return dataclasses.replace(extent, shape=shape).size_bytes


def _joined(spans: list[tuple[int, int]], gap_bytes: int) -> list[tuple[int, int]]:
    """Ascending spans, those near one another made one."""
    joined = [spans[0]]
    for begin, end in spans[1:]:
        last = joined[-1]
        if begin - last[1] <= gap_bytes:
            joined[-1] = last[0], max(end, last[1])
        else:
            joined.append((begin, end))
    return joined


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
