"""Segments that stay open, and chunks that stay in memory after what they were read with is gone."""

import numpy as np
import pytest

from jaxllm.errors import CheckpointError
from jaxllm.serving.contexts import segment as stored_module
from jaxllm.serving.contexts.segment import OpenSegments, write_segment
from jaxllm.serving.host.direct_io import Storage
from tests.serving.contexts.talking import TURNS, begun, found


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
    segments.forget(path)
    path.unlink()
    with pytest.raises(CheckpointError):
        segments.open([path])
    write(path, 5)
    assert first_byte(segments, path) == 5
    segments.forget(tmp_path)
    write(path, 7)
    assert first_byte(segments, path) == 7
    segments.close()


def test_no_more_segments_stay_open_than_may(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_module, "_MOST_OPEN", 2)
    segments = OpenSegments(Storage())
    paths = [write(tmp_path / f"{number}.kv", number) for number in range(4)]
    # Those of one context are open together, however many there are.
    assert [each.path for each in segments.open(paths)] == paths
    for path in paths:
        assert first_byte(segments, path) == int(path.stem)
    assert len(segments._open) == 2
    segments.close()
    assert not segments._open


def test_what_was_read_in_one_piece_is_not_kept_for_one_chunk(kept):
    """Each chunk has memory of its own from the first token on."""
    contexts, context, _ = begun(kept)
    contexts = kept(read=True)
    answer = found(contexts, context).generate(TURNS[0][1], max_tokens=6, ignore_eos=True)
    next(answer)
    assert len(answer.restoration.read) == 2
    there = contexts.memory.chunks(context.name)
    assert len(there) == 2
    # With the room to begin at a line of the processor's caches.
    assert all(blob.base.nbytes <= blob.nbytes + 64 for each in there.values() for blob in each.blobs)
    answer.result()
