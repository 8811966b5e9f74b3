"""Reads the weights of a bundle once, from end to end, before any of them is used.

One pass checks each segment against the bundle's manifest, copies the resident parts to memory, and
computes checksums of the parts that will be read again. Later reads are compared with these, so that bytes
of a file that was changed in place are never used as weights. Mismatching bytes are read once more before
they are refused: transient storage errors rarely repeat.
"""

from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from jaxllm.bundle import Bundle
from jaxllm.bundle.layout import PAGE
from jaxllm.errors import BundleError
from jaxllm.serving.host.direct_io import PieceReader
from jaxllm.serving.weights.pieces import Range, read_blocks

_READ_BYTES = 4 << 20
# Number of attempts to read matching bytes.
READS = 2


class Checksums:
    """Checksums of the parts of a file when it was opened."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._blocks: dict[tuple[int, int], int] = {}
        # For the one segment that is read by pages, one uint64 per page: an embedding has hundreds of
        # thousands.
        self._start, self._pages = 0, np.empty(0, np.uint64)

    def add(self, offset: int, digest: int, size: int) -> None:
        """Stores the checksum of a part."""
        self._blocks[offset, size] = digest

    def reserve_pages(self, start: int, size: int) -> None:
        """Makes room for the checksums of a segment's pages."""
        self._start, self._pages = start, np.empty(-(-size // PAGE), np.uint64)

    def add_pages(self, offset: int, data: np.ndarray) -> None:
        """Stores the checksums of whole pages of that segment, or of its last ones."""
        for at in range(0, len(data), PAGE):
            digest = xxhash.xxh3_64_intdigest(data[at : at + PAGE].data)
            self._pages[(offset + at - self._start) // PAGE] = digest

    def same(self, offset: int, data: np.ndarray) -> bool:
        """Whether `data`, uint8, read at `offset`, equals the first read."""
        return xxhash.xxh3_64_intdigest(data.data) == self._blocks[offset, len(data)]

    def same_pages(self, offset: int, data: np.ndarray) -> bool:
        """Whether pages equal the first read."""
        return all(
            xxhash.xxh3_64_intdigest(data[at : at + PAGE].data)
            == self._pages[(offset + at - self._start) // PAGE]
            for at in range(0, len(data), PAGE)
        )

    def changed(self, offset: int, size: int) -> BundleError:
        """The error of bytes that differ from the first read, even after another read."""
        segments = self._bundle.layout.segments.items()
        name = next(name for name, each in segments if 0 <= offset - each.offset < each.size_bytes)
        return BundleError(
            f"{self._bundle.path} was changed in place while it was open: {size} bytes at {offset}, of "
            f"segment {name!r}, are not what they were, also when they are read again; open it again, and "
            "replace such a file by renaming another one over it"
        )


class FirstRead:
    """Plans and runs the first pass over a file.

    Attributes:
      checksums: checksums of the parts that will be read again; filled by `run`.
    """

    def __init__(self, bundle: Bundle, reader: PieceReader) -> None:
        self.checksums = Checksums(bundle)
        self._bundle, self._reader = bundle, reader
        # Offsets in the file, and the memory to which the bytes from there on are copied.
        self._kept: list[tuple[int, np.ndarray]] = []
        self._again: set[tuple[int, int]] = set()
        self._paged = ""

    def keep(self, ranges: Sequence[Range], memory: np.ndarray) -> None:
        """Plans to copy ranges to their destinations in `memory`."""
        for each in ranges:
            self._kept.append((each.offset, memory[each.place : each.place + each.size_bytes]))

    def watch(self, ranges: Sequence[Range]) -> None:
        """Plans checksums of ranges, one per block of later reads."""
        self._again |= {(offset, size) for offset, _, size in read_blocks(ranges)}

    def watch_pages(self, segment: str) -> None:
        """Plans checksums of one segment, one per page."""
        whole = self._bundle.layout.segments[segment]
        self._paged = segment
        self.checksums.reserve_pages(whole.offset, whole.size_bytes)

    def run(self, on_bytes: Callable[[int], None]) -> None:
        """Runs the pass; calls `on_bytes` with the number of bytes of each part.

        Raises:
          CheckpointError: the file is damaged or cannot be read.
        """
        layout = self._bundle.layout
        waiting = sorted(self._again, reverse=True)
        for name in sorted(
            {name for each in layout.tensors.values() for name in each.segments},
            key=lambda name: layout.segments[name].offset,
        ):
            end = layout.segments[name].offset + layout.segments[name].size_bytes
            again = []
            while waiting and waiting[-1][0] < end:
                again.append(waiting.pop())
            try:
                self._bundle.require_checksum(name, self._read(name, again, on_bytes))
            except BundleError:
                self._bundle.require_checksum(name, self._read(name, again, lambda _: None))

    def _read(
        self, name: str, again: Sequence[tuple[int, int]], on_bytes: Callable[[int], None]
    ) -> xxhash.xxh3_128:
        """Reads a segment, copies its resident parts, and computes the checksums of the blocks `again`, by
        offset and size, ascending. Returns the digest of all of it."""
        segment, digest = self._bundle.layout.segments[name], xxhash.xxh3_128()
        end, waiting = segment.offset + segment.size_bytes, list(reversed(again))
        kept = [each for each in self._kept if segment.offset <= each[0] < end]
        # Partly read blocks.
        begun: list[tuple[int, int, xxhash.xxh3_64]] = []
        for at in range(segment.offset, end, _READ_BYTES):
            data = self._reader.read(at, min(_READ_BYTES, end - at))
            digest.update(data.data)
            if name == self._paged:
                self.checksums.add_pages(at, data)
            for offset, memory in kept:
                begin, last = max(offset, at), min(offset + len(memory), at + len(data))
                if begin < last:
                    memory[begin - offset : last - offset] = data[begin - at : last - at]
            while waiting and waiting[-1][0] < at + len(data):
                offset, size = waiting.pop()
                begun.append((offset, size, xxhash.xxh3_64()))
            begun = [each for each in begun if not self._done(*each, at, data)]
            on_bytes(len(data))
        return digest

    def _done(self, offset: int, size: int, digest: xxhash.xxh3_64, at: int, data: np.ndarray) -> bool:
        """Adds the block's part of `data`, read at `at`, to its digest; returns whether the block is
        complete."""
        digest.update(data[max(0, offset - at) : max(0, offset + size - at)].data)
        if offset + size > at + len(data):
            return False
        self.checksums.add(offset, digest.intdigest(), size)
        return True
