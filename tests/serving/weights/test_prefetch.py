"""Pieces come by the ranges that were asked for last, and a closed stream says so."""

import threading
import time

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from serving.host.direct_io import PAGE, PieceReader, Storage
from serving.weights.pieces import LayerPiece, Range
from serving.weights.prefetch import WeightStream

LAYERS, SIZE = 4, 8 * PAGE


@pytest.fixture
def path(tmp_path):
    content = np.repeat(np.arange(1, LAYERS + 1, dtype=np.uint8), SIZE)
    (tmp_path / "layers").write_bytes(content.tobytes())
    return tmp_path / "layers"


def pieces(size):
    """Of each layer the first `size` bytes."""
    return [
        LayerPiece(
            layer=layer,
            segment=f"layers.{layer}",
            start=0,
            ranges=(Range(offset=layer * SIZE, size_bytes=size, place=0),),
            memory_bytes=SIZE,
        )
        for layer in range(LAYERS)
    ]


def opened(path, part):
    return WeightStream(PieceReader(path), part, resident=[], slots=2, slot_bytes=SIZE)


class Preempted(threading.Condition):
    """Who gives the lock back, but for the thread that reads, is preempted at once."""

    def __exit__(self, *error):
        done = super().__exit__(*error)
        if threading.current_thread() is threading.main_thread():
            time.sleep(0.01)
        return done


def test_a_piece_is_never_filled_by_the_ranges_before(path):
    half, whole = pieces(SIZE // 2), pieces(SIZE)
    stream = opened(path, half)
    stream._changed = Preempted()
    for _ in range(2):
        for part in (half, whole):
            stream.use(part)
            (size,) = {each.size_bytes for piece in part for each in piece.ranges}
            for layer in range(LAYERS):
                with stream.piece(layer) as slot:
                    assert (slot.memory[:size] == layer + 1).all()
                    # So that nothing is there that was not read.
                    slot.memory[:] = 0
    stream.close()


def test_a_pass_may_begin_later_while_storage_reads(path):
    """Until the slots are full, and for no longer than the pass before waited."""
    stream = WeightStream(
        PieceReader(path, Storage(latency_ms=20)), pieces(SIZE), resident=[], slots=2, slot_bytes=SIZE
    )
    assert stream.idle_read_s == 0

    def run(compute_s):
        for layer in range(LAYERS):
            with stream.piece(layer):
                time.sleep(compute_s)

    run(0)
    run(0)
    with stream.piece(0):
        # Reading takes all of the time, 20 ms a piece.
        assert 0.02 <= stream.idle_read_s <= 0.2
    for _ in range(3):
        run(0.2)
    # Computing does: nothing is waited for.
    assert stream.idle_read_s < 0.02
    stream.close()


def test_storage_has_the_next_piece_to_read_before_one_ends(path):
    reader = PieceReader(path)
    read_into, second = reader.read_into, threading.Event()

    def read(memory, place, offset, size):
        if offset:
            second.set()
        # A stream that read one piece at a time would never go on.
        assert second.wait(10)
        read_into(memory, place, offset, size)

    reader.read_into = read
    stream = WeightStream(reader, pieces(SIZE), resident=[], slots=3, slot_bytes=SIZE)
    for layer in range(LAYERS):
        with stream.piece(layer) as slot:
            assert (slot.memory[:SIZE] == layer + 1).all()
    # Time in which both were read counts once.
    assert stream.counts.read_bytes >= LAYERS * SIZE
    assert stream.counts.read_s < 5
    stream.close()


def test_a_closed_stream_is_refused_and_nobody_waits_for_it(path):
    stream = opened(path, pieces(SIZE))
    with stream.piece(0):
        pass
    stream.close()
    found = []

    def take():
        try:
            with stream.piece(1):
                pass
        except ConfigError as error:
            found.append(str(error))

    waiting = threading.Thread(target=take, daemon=True)
    waiting.start()
    waiting.join(10)
    assert found == ["the engine of these weights is closed; open another one"]
