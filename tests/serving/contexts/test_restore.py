"""A context comes back as a prefill would have made it, whatever is in memory, on storage or lost."""

import concurrent.futures
import functools
import threading

import numpy as np
import pytest

from jaxllm.contexts.codecs import RAW, ChunkFormat, ChunkShape
from jaxllm.contexts.recompute import LOST, Delay
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.kernels import native
from jaxllm.serving.contexts.chunk_io import ChunkIO
from jaxllm.serving.contexts.memory import Delays, measure_read
from jaxllm.serving.contexts.restore import restore
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.host.storage import Storage
from jaxllm.serving.runners.runner import prefill_prompt
from tests.kernels.switching import needs_native
from tests.serving.contexts.talking import READ, TURNS, C, answers_without_contexts, begun, new, say
from tests.tiny import TINY

TOKENS = np.random.default_rng(1).integers(0, 250, 7 * C).tolist()
FREE, DEAR = Delay(fixed_ms=0.0, per_unit_ms=1e-9), Delay(fixed_ms=100.0, per_unit_ms=100.0)
COMPUTE = Delays(read=DEAR, compute=FREE)


@pytest.fixture(scope="module")
def chunk_io(engine_of):
    return ChunkIO(engine_of("raw").runner)


def prefilled(runner, tokens):
    """A cache, and a copy of its keys and values."""
    _, cache = prefill_prompt(runner, runner.start(len(tokens)), tokens, 0)
    return cache, [np.array(rows) for rows in rows_of(cache)]


def rows_of(cache):
    return [np.asarray(rows) for rows in (*cache.keys, *cache.values)]


@pytest.fixture(scope="module")
def whole(chunk_io):
    """The rows of a prefill, and its chunks as they are stored."""
    cache, rows = prefilled(chunk_io.runner, TOKENS)
    return rows, chunk_io.encode(cache, dict.fromkeys(range(7), RAW))


class Shelf:
    """Stored chunks, and who asked for which."""

    def __init__(self, stored):
        self.stored, self.asked = stored, []

    def read(self, layer, chunks):
        self.asked.append((layer, tuple(chunks), threading.current_thread()))
        return [self.stored[chunk][1][layer] for chunk in chunks]


def brought_back(chunk_io, shelf, *, resident=(), lost=(), delays=READ):
    bits = [LOST if chunk in lost else RAW for chunk in range(7)]
    there, cache = {chunk: shelf.stored[chunk] for chunk in resident}, chunk_io.runner.start(len(TOKENS))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        read = functools.partial(pool.submit, shelf.read)
        back = restore(chunk_io, cache, TOKENS, bits, there, read, delays=delays)
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
    for got, wanted in zip(rows_of(cache), rows, strict=True):
        np.testing.assert_allclose(got[..., : 7 * C, :], wanted[..., : 7 * C, :], atol=2e-5)


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


# Chunks in and out of caches: what is stored comes back, what is computed is what a prefill gives


def test_chunks_come_back_as_their_codec_has_them(engine_of):
    """Of every width, in other places nothing; the first layer by hand."""
    runner = engine_of("kivi").runner
    chunk_io = ChunkIO(runner)
    cache, rows = prefilled(runner, TOKENS[:60])
    stored = chunk_io.encode(cache, {0: 4, 1: 8, 3: 2})
    assert {chunk: bits for chunk, (bits, _) in stored.items()} == {0: 4, 1: 8, 3: 2}
    shape = ChunkShape(heads=4, tokens=C, width=16)
    for chunk, (bits, blobs) in stored.items():
        assert tuple(blob.size for blob in blobs) == chunk_io.layer_bytes[bits]
        assert sum(blob.size for blob in blobs) == chunk_io.chunk_bytes(bits)
        # What the codec decodes is what it was given, but for its levels.
        keys, values = ChunkFormat.named("kivi", C).codec.decode(blobs[0][None], shape, bits)
        for got, stack in ((keys, 0), (values, 1)):
            wanted = rows[stack][0, 0, :, chunk * C : (chunk + 1) * C]
            assert np.abs(np.asarray(got)[0] - wanted).max() <= 0.6 * np.ptp(wanted) / (2**bits - 1)
    loaded = chunk_io.load(runner.start(60), stored)
    for got, whole in zip(rows_of(loaded), rows, strict=True):
        assert not got[..., 32:48, :].any()
        assert not np.array_equal(got[..., :16, :], whole[..., :16, :])
        np.testing.assert_allclose(got[..., 16:32, :], whole[..., 16:32, :], atol=0.02)


def test_blobs_that_have_not_the_bytes_of_their_width_are_refused(engine_of):
    """Before an address of them is given away, in whichever layer."""
    runner = engine_of("kivi").runner
    chunk_io = ChunkIO(runner)
    cache, _ = prefilled(runner, TOKENS[:60])
    bits, blobs = chunk_io.encode(cache, {1: 4})[1]
    short = [*blobs[:2], blobs[2][:-1]]
    for stored, layer in (((8, blobs), 0), ((2, blobs), 0), ((bits, short), 2)):
        with pytest.raises(CheckpointError, match=f"chunk 1 has .* bytes in layer {layer}"):
            chunk_io.load(runner.start(60), {1: stored})
        at = chunk_io.positions([0], 1)
        there = {1: (stored[0], stored[1][layer])}
        with pytest.raises(CheckpointError, match=f"chunk 1 has .* bytes in layer {layer}"):
            chunk_io.restore_layer(layer, chunk_io.embed(TOKENS, at), at, runner.start(60), there)


@pytest.mark.slow
@needs_native
def test_a_level_stores_the_heads_that_it_uses(engine_of):
    """Although its cache has room for those of the whole model."""
    engine = engine_of("channel", "int8", (50,))
    whole, half = (ChunkIO(engine.runner_at(level)) for level in (100, 50))
    assert half.runner.model.bucket_level == 100
    assert half.chunk_bytes(4) == whole.chunk_bytes(4) // 2
    assert (half.origin.heads, whole.origin.heads) == ((2, 2, 2), (4, 4, 4))
    cache, rows = prefilled(half.runner, TOKENS[:60])
    loaded = half.load(half.runner.start(60), half.encode(cache, {0: 8, 2: 8}))
    for got, wanted in zip(rows_of(loaded), rows, strict=True):
        assert got.shape[-3] == 4
        got, unused = got[..., :2, :, :], got[..., 2:, :, :]
        assert not unused.any()
        for there in (slice(16), slice(32, 48)):
            np.testing.assert_allclose(got[..., there, :], wanted[..., :2, there, :], atol=0.03)
        assert not got[..., 16:32, :].any()


def test_chunks_that_cannot_be_computed_are_refused():
    with pytest.raises(ConfigError, match="divides none"):
        EngineOptions(kv_codec="raw", kv_chunk_tokens=24).resolve(TINY)
