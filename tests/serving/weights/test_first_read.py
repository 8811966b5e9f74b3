"""A bundle is read once when it is opened, and later reads are believed only where they bring the same."""

import dataclasses
import os

import pytest

from jaxllm import Engine
from jaxllm.bundle import Bundle
from jaxllm.bundle.levels import require_level
from jaxllm.errors import BundleError, CheckpointError
from jaxllm.kernels import native
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.serving.host.direct_io import PAGE, PieceReader
from jaxllm.serving.weights.footprint import drafter_bytes, fixed_bytes
from jaxllm.serving.weights.level_memory import LevelMemory
from jaxllm.serving.weights.pieces import layer_pieces
from jaxllm.serving.weights.prefetch_plan import whole_budget
from tests.serving.weights.conftest import CFG, OPTIONS
from tests.serving.weights.test_streaming import answer, open_streamed


def test_opening_reads_the_file_once(bundle_of, resident_of):
    streamed = open_streamed(bundle_of(), resident_of(), 0.9)
    weights = streamed.model.streamed
    assert weights.plan.resident_bytes > streamed.model.bundle.weight_bytes / 4
    # Norms are read by themselves, and reads end with pages.
    assert weights._reader.bytes_read < 1.1 * streamed.model.bundle.weight_bytes
    streamed.close()


def test_a_level_that_stays_takes_its_own_pages_alone(bundle_of):
    with Bundle.open(bundle_of()) as bundle:
        level = LevelMemory(bundle, require_level(bundle, 40))
        used = layer_pieces(bundle.layout, require_level(bundle, 40), gap_bytes=0)
    for piece, part in zip(level.pieces, used, strict=True):
        pages = {page for each in part.ranges for page in pages_of(each)}
        assert {page for each in piece.kept for page in pages_of(each)} <= {
            page + more for page in pages for more in (0, 1)
        }
        # All that is not kept is read.
        covered = sorted((each.offset, each.size_bytes) for each in (*piece.ranges, *piece.kept))
        segment = bundle.layout.segments[piece.segment]
        at = segment.offset
        for offset, size in covered:
            assert offset <= at
            at = max(at, offset + size)
        assert at == segment.offset + segment.size_bytes


def test_storage_that_errs_once_is_read_again(bundle_of, resident_of, monkeypatch):
    read_into, wrong = PieceReader.read_into, set()

    def erring(reader, memory, place, offset, size):
        """Gives each place of the file wrongly at first, and right from then on."""
        read_into(reader, memory, place, offset, size)
        if (offset, size) not in wrong:
            wrong.add((offset, size))
            memory[place] ^= 1

    monkeypatch.setattr(PieceReader, "read_into", erring)
    streamed = open_streamed(bundle_of(), resident_of())
    opened = len(wrong)
    assert answer(streamed) == answer(resident_of())
    assert len(wrong) > opened > 0
    streamed.close()


@pytest.mark.skipif(not native.kernels().native, reason="planes are read by native kernels")
def test_a_low_plane_that_has_changed_is_named(bundle_of, resident_of, tmp_path):
    path, how = tmp_path / "nested.jaxllm", SpeculationOptions(drafter="nested")
    path.write_bytes(bundle_of("int8-nested").read_bytes())
    whole = resident_of("int8-nested")
    others = fixed_bytes(CFG, dataclasses.replace(whole.options, trees=how.trees))
    others += drafter_bytes(how, OPTIONS.context_tokens, CFG)
    memory = whole_budget(others + int(0.9 * whole.model.bundle.weight_bytes))
    options = dataclasses.replace(OPTIONS, memory_bytes=memory)
    engine = Engine.open(path, options=options, speculation=how, warm_up=False)
    streamed = engine.model.streamed
    layer = next(each for each in range(CFG.layers) if each not in streamed.plan.resident)
    segment = engine.model.bundle.layout.segments[f"layers.{layer}.low"]
    byte = path.read_bytes()[segment.offset]
    write_in_place(path, segment.offset, bytes([byte ^ 1]))
    with (
        pytest.raises(
            BundleError, match=rf"segment 'layers\.{layer}\.low', .* also when they are read again"
        ),
        streamed._stream.piece(layer),
    ):
        pass
    engine.close()


def pages_of(each):
    return range(each.offset // PAGE, -(-(each.offset + each.size_bytes) // PAGE))


def write_in_place(path, offset, data):
    """Changes a file as something that does not want to be noticed."""
    facts = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


@pytest.mark.parametrize("part", ["layer", "level", "rows"])
def test_what_is_read_is_what_was_there_at_first(bundle_of, resident_of, tmp_path, part):
    path = tmp_path / "served.jaxllm"
    path.write_bytes(bundle_of().read_bytes())
    streamed = open_streamed(path, resident_of(), levels=(40,))
    level = {"level": 40} if part == "level" else {}
    expected = answer(streamed, **level)
    layout, stays = streamed.model.bundle.layout, streamed.model.streamed.plan.resident
    layer = next(each for each in range(CFG.layers) if each not in stays)
    segment = layout.segments[f"layers.{layer}" if part != "rows" else layout.tensors["embed.tokens"].segment]
    kept = path.read_bytes()
    # Bytes that a level has, too, and rows of all tokens.
    size = 64 if part != "rows" else segment.size_bytes
    other = bytes(each ^ 1 for each in kept[segment.offset : segment.offset + size])
    write_in_place(path, segment.offset, other)
    with pytest.raises(BundleError, match=r"changed in place .*: .* renaming another one over it"):
        # Rows that were read before are not read again.
        streamed.model.streamed.rows(range(100, 200)) if part == "rows" else answer(streamed, **level)
    write_in_place(path, 0, kept)
    assert answer(streamed, **level) == expected
    # A file that has become shorter ends an answer, too.
    facts = path.stat()
    os.truncate(path, segment.offset)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    with pytest.raises(CheckpointError):
        answer(streamed, **level)
    streamed.close()
