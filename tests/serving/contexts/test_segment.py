"""Segments: what was written is read, in few reads; what is damaged is told, whatever the damage."""

import struct

import numpy as np
import pytest

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.serving.contexts import segment
from jaxllm.serving.contexts.segment import OpenSegments, Segment, StoredChunk, write_segment
from jaxllm.serving.host.direct_io import PAGE, PieceReader
from jaxllm.serving.host.storage import Storage

LAYERS, SOURCES = 3, [f"{chunk:x}" for chunk in range(64)]
SIZES = {8: (5000, 3000, 100), 2: (700, 20, 30)}


def drawn(chunks):
    """Random blobs of some chunks at some widths."""
    draw = np.random.default_rng(0)
    return {
        chunk: (bits, [draw.integers(0, 256, size, dtype=np.uint8) for size in SIZES[bits]])
        for chunk, bits in chunks.items()
    }


@pytest.fixture
def written(tmp_path):
    chunks = drawn({7: 8, 2: 2, 3: 8, 40: 2})
    path = tmp_path / "0.kv"
    write_segment(path, chunks, SOURCES)
    return path, chunks


@pytest.mark.parametrize("caching", ["direct", "buffered"])
def test_what_was_written_is_read(written, caching):
    path, chunks = written
    with Segment(path, Storage(caching=caching)) as opened:
        assert opened.chunks == (
            StoredChunk(2, 2, "2"),
            StoredChunk(3, 8, "3"),
            StoredChunk(7, 8, "7"),
            StoredChunk(40, 2, "28"),
        )
        assert opened.layers == LAYERS
        assert opened.verify() == set()
        for layer in range(LAYERS):
            # In any order, some of them twice.
            for asked in ([2, 3, 7, 40], [40, 2], [3], [7, 7], []):
                got = opened.read(layer, asked)
                for blob, chunk in zip(got, asked, strict=True):
                    np.testing.assert_array_equal(blob, chunks[chunk][1][layer])


def test_one_layer_of_many_chunks_is_one_read(tmp_path, monkeypatch):
    """Also over small gaps; a large one is left out."""
    monkeypatch.setattr(segment, "_GAP_BYTES", 6000)
    path = tmp_path / "0.kv"
    write_segment(path, drawn(dict.fromkeys(range(20), 8)), SOURCES)
    asked = []
    real = PieceReader.read_into
    with Segment(path) as opened:
        monkeypatch.setattr(
            PieceReader, "read_into", lambda self, *place: asked.append(place) or real(self, *place)
        )
        blobs = opened.read(0, [0, 1, 3, 4, 18, 19])
        opened.read(0, [0, 1])
    assert [size for *_, size in asked] == [5 * 5000, 2 * 5000, 2 * 5000]
    # All into the same memory, of which nothing stays.
    assert len({memory.ctypes.data for memory, *_ in asked}) == 1
    assert all(blob.base.nbytes <= blob.nbytes + 64 and blob.ctypes.data % 64 == 0 for blob in blobs)


def test_no_damage_goes_unseen(written):
    """Any byte that is changed, and any end that is cut, is either told or of no use."""
    path, _ = written
    content = path.read_bytes()
    draw = np.random.default_rng(1)
    told = 0
    for place in draw.integers(0, len(content), 300):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x40]) + content[place + 1 :])
        try:
            with Segment(path) as opened:
                corrupt = opened.verify()
        except CheckpointError:
            told += 1
            continue
        told += bool(corrupt)
        if not corrupt:
            # Padding up to a page.
            assert content[place] == 0
    assert told > 100
    for end in (*draw.integers(0, len(content), 50), len(content) - 1, 0, 10):
        path.write_bytes(content[:end])
        with pytest.raises(CheckpointError):
            Segment(path)


def test_a_corrupt_chunk_is_named_and_others_are_read(written):
    path, chunks = written
    with Segment(path) as opened:
        (place,) = [i for i, each in enumerate(opened.chunks) if each.chunk == 7]
        at = opened._offsets[1] + opened._starts[1][place]
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with Segment(path) as opened:
        assert opened.verify() == {7}
        np.testing.assert_array_equal(opened.read(1, [3])[0], chunks[3][1][1])
        with pytest.raises(CheckpointError, match="chunk 7 of layer 1 is corrupt"):
            opened.read(1, [3, 7])
        with pytest.raises(CheckpointError, match="lacks chunk 5"):
            opened.read(1, [5])


def test_a_header_is_not_believed_and_blobs_must_agree(tmp_path):
    path, blobs = tmp_path / "0.kv", [np.zeros(4, np.uint8)] * 2
    for wrong in ((8, [blobs[0], blobs[0][:3]]), (4, blobs[:1])):
        with pytest.raises(ConfigError, match="chunk 1 has other layers or sizes"):
            write_segment(path, {0: (8, blobs), 1: wrong}, SOURCES)
    assert list(tmp_path.iterdir()) == []
    for head, part in (
        ((b"SOMEELSE", 1, 10), "is not a segment"),
        ((b"JXLKVSEG", 1, 10), "of version 1, this jaxllm reads 2"),
        ((b"JXLKVSEG", 2, 1 << 60), "does not fit the file"),
        ((b"JXLKVSEG", 2, 10), "index is corrupt"),
    ):
        path.write_bytes(struct.pack("<8sIQ16s", *head, b"").ljust(PAGE, b"x"))
        with pytest.raises(CheckpointError, match=part):
            Segment(path)


def write(path, value):
    write_segment(path, {0: (8, [np.full(64, value, np.uint8)] * 2)}, ["s"])
    return path


def first_byte(segments, path):
    (segment,) = segments.open([path])
    return int(segment.read(0, [0])[0][0])


def test_a_segment_is_opened_once(tmp_path):
    segments, path = OpenSegments(Storage()), write(tmp_path / "0.kv", 3)
    (first,) = segments.open([path])
    assert segments.open([path]) == [first]
    # Another file of the same name is another segment.
    for value, gone in ((5, path), (7, tmp_path)):
        segments.forget(gone)
        path.unlink()
        with pytest.raises(CheckpointError):
            segments.open([path])
        assert first_byte(segments, write(path, value)) == value
    segments.close()


def test_no_more_segments_stay_open_than_may(tmp_path, monkeypatch):
    monkeypatch.setattr(segment, "_MAX_OPEN", 2)
    segments = OpenSegments(Storage())
    paths = [write(tmp_path / f"{number}.kv", number) for number in range(4)]
    # Those of one context are open together, however many there are.
    assert [each.path for each in segments.open(paths)] == paths
    for path in paths:
        assert first_byte(segments, path) == int(path.stem)
    assert len(segments._open) == 2
    segments.close()
    assert not segments._open
