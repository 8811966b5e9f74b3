"""A context comes back as a prefill would have made it, whatever is in memory, on storage or lost."""

import concurrent.futures
import threading

import numpy as np
import pytest

from jaxllm.contexts.codecs import RAW
from jaxllm.contexts.recompute import LOST, Delay
from jaxllm.errors import CheckpointError
from jaxllm.kernels import native
from jaxllm.serving.contexts.chunk_io import ChunkIO
from jaxllm.serving.contexts.chunks import Delays, measure_read
from jaxllm.serving.contexts.restore import StoredChunks, filling, restore
from jaxllm.serving.host.direct_io import Storage
from jaxllm.serving.runners.runner import prefill_prompt
from tests.serving.contexts.talking import READ, TURNS, C, answers_without_contexts, begun, new, say

TOKENS = np.random.default_rng(1).integers(0, 250, 7 * C).tolist()
FREE, DEAR = Delay(fixed_ms=0.0, per_unit_ms=1e-9), Delay(fixed_ms=100.0, per_unit_ms=100.0)
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

    def __init__(self, stored):
        self.stored, self.asked = stored, []

    def read(self, layer, chunks):
        self.asked.append((layer, tuple(chunks), threading.current_thread()))
        return [self.stored[chunk][1][layer] for chunk in chunks]


def brought_back(chunk_io, shelf, *, resident=(), lost=(), delays=READ):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        stored = StoredChunks(
            tokens=TOKENS,
            bits=[LOST if chunk in lost else RAW for chunk in range(7)],
            resident={chunk: shelf.stored[chunk] for chunk in resident},
            read=shelf.read,
            pool=pool,
        )
        back = restore(chunk_io, chunk_io.runner.start(len(TOKENS)), stored, delays=delays)
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


def test_delays_are_of_this_device(chunk_io, tmp_path):
    compute = chunk_io.rehearse()
    assert 0 < compute.ms(1) <= compute.ms(2)
    plain, slow = (measure_read(tmp_path, Storage(bytes_per_s=speed)) for speed in (0, 1 << 26))
    assert 0 < plain.ms(1 << 20) < slow.ms(1 << 20)
    # A megabyte at 64 a second.
    assert slow.ms(1 << 20) == pytest.approx(1000 / 64, rel=0.5)
    assert not list(tmp_path.iterdir())


CODED = [False, pytest.param(True, marks=pytest.mark.skipif(not native.kernels().native, reason="native"))]
# A prompt of more than one chunk of at most 32 tokens.
LONG = TURNS[1][0] + TURNS[2][2]


def swapped_out(contexts, context, evicted=slice(None)):
    """Has some chunks of a context on storage alone, and its cache gone."""
    contexts.store.wait()
    contexts._forget_cache(context.name)
    there = contexts.memory.chunks(context.name)
    for chunk in sorted(there)[evicted]:
        contexts.memory._drop(context.name, chunk)
    return contexts._delays


@pytest.mark.parametrize("coded", CODED)
def test_what_is_answered_and_counted_stays(kept, coded, compiles):
    turns, records = [TURNS[0][0], TURNS[0][1], LONG, TURNS[0][1]], []
    for overlap in (True, False):
        contexts = kept(coded=coded, overlap_prompt=overlap, share_beginnings=False)
        wanted = answers_without_contexts(contexts.engine, turns)
        context = new(contexts)
        with compiles() as count:
            for turn, answer in zip(turns, wanted, strict=True):
                held, tokens = len(context.record.bits), len(context.tokens)
                # Some chunks stay in memory.
                swapped_out(contexts, context, slice(1, None))[100] = READ
                said = say(context, turn)
                assert said.tokens == answer
                how = said.restoration
                assert how.read == tuple(range(1, held))
                fed = min(32, tokens - 16 * held + len(turn)) if overlap and held > 1 else 0
                assert how.fed_tokens == fed
                assert said.reused_tokens == 16 * held
                assert said.ttft_ms >= how.took_ms >= how.fed_ms
                assert (how.fed_ms > 0) == (fed > 0)
            assert count() == 0
        assert contexts.store.verify() == []
        records.append(context.record)
    first, second = records
    assert first.bits == second.bits
    np.testing.assert_allclose(first.mass, second.mass, rtol=1e-4)
    assert first.seen == second.seen


@pytest.mark.parametrize("coded", CODED)
def test_chunks_are_computed_and_read_beside_the_prompt(kept, coded):
    contexts = kept(coded=coded)
    turns = [LONG, TURNS[0][1]]
    wanted = answers_without_contexts(contexts.engine, turns)
    context = new(contexts)
    say(context, LONG)
    # As many as a bucket takes are computed, the others are read.
    swapped_out(contexts, context)
    contexts._delays[100] = COMPUTE
    said = say(context, turns[1])
    assert said.tokens == wanted[1]
    assert said.restoration.read
    assert said.restoration.computed
    assert said.restoration.fed_tokens


def test_nothing_is_fed_where_all_is_in_memory_or_all_is_lost(kept):
    contexts, context, wanted = begun(kept)
    swapped_out(contexts, context, slice(0, 0))
    resident = say(context, TURNS[0][1])
    assert (resident.tokens, resident.restoration.fed_tokens) == (wanted[1], 0)
    contexts.store.wait()
    record = context.record
    contexts.memory.cut(context.name, 0)
    contexts._forget_cache(context.name)
    contexts.store.commit(record.lose(set(range(len(record.bits)))))
    lost = say(context, TURNS[0][2])
    assert (lost.tokens, lost.restoration.fed_tokens) == (wanted[2], 0)


@pytest.mark.parametrize("coded", CODED)
def test_damage_is_noticed_in_the_middle_of_a_prompt(kept, coded, monkeypatch):
    """The answer is the same: what is damaged is computed."""
    contexts = kept(coded=coded)
    wanted = answers_without_contexts(contexts.engine, [LONG, TURNS[0][1]])
    context = new(contexts)
    say(context, LONG)
    swapped_out(contexts, context)[100] = READ
    (path,) = (contexts.store.root / "app-mail" / context.name).glob("*.kv")
    data = bytearray(path.read_bytes())
    # In the last layer, when the first ones have been computed.
    data[-2000] ^= 1
    path.write_bytes(data)
    said = say(context, TURNS[0][1])
    assert said.tokens == wanted[1]
    assert said.restoration.computed
    assert set(contexts.memory.chunks(context.name)) >= set(said.restoration.read)


def test_memory_of_coming_chunks_takes_what_fits_alone(kept):
    chunk_io = kept()._chunk_io[100]
    memory = chunk_io.room({3: chunk_io.widths[0]})
    small = {3: (chunk_io.widths[0], np.zeros(5, np.uint8))}
    with pytest.raises(CheckpointError, match="chunk 3 has 5 bytes in layer 1"):
        filling(memory, lambda _: small)(1)
