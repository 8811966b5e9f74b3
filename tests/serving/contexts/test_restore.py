"""A context comes back as a prefill would have made it, whatever is in memory, on storage or lost."""

import concurrent.futures
import threading

import numpy as np
import pytest

from jaxllm.contexts.codecs import RAW
from jaxllm.contexts.recompute import LOST, Delay
from jaxllm.errors import CheckpointError
from jaxllm.serving.contexts.chunk_io import ChunkIO
from jaxllm.serving.contexts.restore import Delays, Reader, measure_compute, measure_read, restore
from jaxllm.serving.host.direct_io import Storage
from jaxllm.serving.runners.runner import prefill_prompt

C = 16
TOKENS = np.random.default_rng(1).integers(0, 250, 7 * C).tolist()
FREE, DEAR = Delay(fixed_ms=0.0, per_unit_ms=1e-9), Delay(fixed_ms=100.0, per_unit_ms=100.0)
READ = Delays(read=FREE, compute=DEAR)
COMPUTE = Delays(read=DEAR, compute=FREE)


@pytest.fixture(scope="module")
def chunk_io(engine_of):
    return ChunkIO(engine_of("raw").runner)


@pytest.fixture(scope="module")
def whole(chunk_io):
    """The rows of a prefill, and its chunks as they are stored."""
    runner = chunk_io.runner
    _, cache = prefill_prompt(runner, runner.start(len(TOKENS)), TOKENS, 0)
    rows = [np.array(each) for each in (*cache.keys, *cache.values)]
    return rows, chunk_io.encode(cache, dict.fromkeys(range(7), RAW))


class Shelf:
    """Stored chunks, and who asked for which."""

    def __init__(self, stored, corrupt=None):
        self.stored, self.corrupt, self.asked = stored, corrupt, []

    def read(self, layer, chunks):
        self.asked.append((layer, tuple(chunks), threading.current_thread()))
        if layer == self.corrupt:
            raise CheckpointError("chunk 3 is corrupt")
        return [self.stored[chunk][1][layer] for chunk in chunks]


def brought_back(chunk_io, shelf, *, resident=(), lost=(), delays=READ):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        back = restore(
            chunk_io,
            chunk_io.runner.start(len(TOKENS)),
            tokens=TOKENS,
            bits=[LOST if chunk in lost else RAW for chunk in range(7)],
            resident={chunk: shelf.stored[chunk] for chunk in resident},
            reader=Reader(shelf.read, pool),
            delays=delays,
        )
    return back.cache, back.read, back.how


@pytest.mark.parametrize(
    ("resident", "lost", "delays", "read", "computed"),
    [
        (range(7), (), READ, (), ()),
        ((0, 3), (), READ, (1, 2, 4, 5, 6), ()),
        ((1, 4, 5), (2,), READ, (0, 3, 6), (2,)),
        # As many as a graph takes, the earliest of equals.
        ((1,), (), COMPUTE, (3, 4, 5, 6), (0, 2)),
        # More than a graph takes: pass by pass.
        ((2,), (0, 1, 3, 4, 6), READ, (5,), (0, 1, 3, 4, 6)),
        ((), range(7), READ, (), range(7)),
    ],
)
def test_it_is_as_if_it_had_never_left(chunk_io, whole, resident, lost, delays, read, computed, compiles):
    rows, stored = whole
    shelf = Shelf(stored)
    with compiles() as count:
        cache, arrived, how = brought_back(chunk_io, shelf, resident=resident, lost=lost, delays=delays)
    assert count() == 0
    assert chunk_io.runner.options.recomputed_chunks == (1, 2)
    assert how.read == tuple(read)
    assert how.computed == tuple(computed)
    assert how.resident == len(resident)
    assert set(arrived) == set(how.read)
    assert int(cache.length) == len(TOKENS)
    for got, wanted in zip([*cache.keys, *cache.values], rows, strict=True):
        np.testing.assert_allclose(np.asarray(got)[..., : 7 * C, :], wanted[..., : 7 * C, :], atol=2e-5)


def test_layers_are_read_in_order_beside_the_work(chunk_io, whole):
    shelf = Shelf(whole[1])
    brought_back(chunk_io, shelf, resident=(0,), lost=(2,))
    layers, chunks, threads = zip(*shelf.asked, strict=True)
    assert layers == tuple(range(chunk_io.layers))
    assert set(chunks) == {(1, 3, 4, 5, 6)}
    assert threading.current_thread() not in threads


@pytest.mark.parametrize("lost", [(), (2,)])
def test_a_corrupt_chunk_is_told(chunk_io, whole, lost):
    shelf = Shelf(whole[1], corrupt=1)
    with pytest.raises(CheckpointError, match="chunk 3 is corrupt"):
        brought_back(chunk_io, shelf, lost=lost)


def test_delays_are_of_this_device(chunk_io, tmp_path):
    compute = measure_compute(chunk_io)
    assert 0 < compute.ms(1) <= compute.ms(2)
    plain, slow = (measure_read(tmp_path, Storage(bytes_per_s=speed)) for speed in (0, 1 << 26))
    assert 0 < plain.ms(1 << 20) < slow.ms(1 << 20)
    # A megabyte at 64 a second.
    assert slow.ms(1 << 20) == pytest.approx(1000 / 64, rel=0.5)
    assert not list(tmp_path.iterdir())
