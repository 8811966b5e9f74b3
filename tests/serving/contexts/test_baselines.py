"""The systems that ours is compared with, as options of one manager: they answer alike, and keep as told."""

import os

import pytest

from benchmarks.contexts.switching import ABLATIONS, SYSTEMS
from jaxllm.contexts.codecs import RAW
from jaxllm.contexts.recompute import LOST, Delay
from jaxllm.serving.contexts.layout import Database
from jaxllm.serving.contexts.memory import Delays
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.ground.bundles import find_model
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.server.service import CODEC_CHUNK_TOKENS, engine_options
from tests.serving.contexts.talking import READ, TURNS, answers_without_contexts, begun, found, new, say

COMPUTE = Delays(read=Delay(fixed_ms=9.0, per_unit_ms=9.0), compute=Delay(fixed_ms=0.0, per_unit_ms=1e-9))
TIGHT = 6  # chunks in memory: a context has three or four in the end, and there are three


def segments(contexts, context):
    folder = contexts.store.root / "app-mail" / context.name
    return sorted(path.name for path in folder.glob("*.kv"))


@pytest.mark.slow
@pytest.mark.parametrize("system", [*SYSTEMS, *ABLATIONS], ids=lambda system: system.name)
def test_every_system_goes_on_as_one_conversation(kept, monkeypatch, system):
    """Three contexts by turns in a memory for less than two. No switch waits for the device and every call
    does: what leaves memory need not be safe from a power cut; what was said is."""
    names = ("ratio", "policy", "writing", "recompute")
    size = kept()._chunk_io[100].chunk_bytes(RAW)
    options = {name: getattr(system.options, name) for name in names}
    contexts = kept(budget_bytes=TIGHT * size, **options)
    wanted = [answers_without_contexts(contexts.engine, turns) for turns in TURNS]
    flushed, sync, flush = [], os.fsync, Database.flush
    monkeypatch.setattr(os, "fsync", lambda number: flushed.append(number) or sync(number))
    # SQLite flushes by itself.
    monkeypatch.setattr(Database, "flush", lambda catalog: flushed.append(catalog) or flush(catalog))
    mine, how = [new(contexts) for _ in TURNS], []
    for turn in range(3):
        for context, turns, answers in zip(mine, TURNS, wanted, strict=True):
            answer = context.generate(turns[turn], max_tokens=6, ignore_eos=True)
            flushed.clear()
            next(answer)
            assert not flushed
            assert answer.result().tokens == answers[turn]
            assert flushed
            assert contexts.memory.resident_bytes <= TIGHT * size
            how.append(answer.restoration)
    assert contexts.memory.evicted > 0
    assert any(each.read or each.computed for each in how)
    if system.options.writing == "never":
        assert not any(each.read for each in how)
        assert not any(segments(contexts, context) for context in mine)
    elif not system.options.recompute:
        assert not any(each.computed for each in how)
    # What was not flushed is when the store is closed: a fresh process has the text, and what was written.
    contexts = kept(**options)
    assert contexts.store.verify() == []
    there = [[bits != LOST for bits in record.bits] for record in contexts.store.records()]
    assert all(map(all, there)) or system.options.writing != "ahead"
    assert any(map(any, there)) or system.options.writing != "at-eviction"
    for context, turns in zip(mine, TURNS, strict=True):
        context = found(contexts, context)
        assert context.tokens[:37] == tuple(turns[0])
        stored = len(context.record.bits)
        answer = say(context, [1])
        assert len(answer.restoration.read) + len(answer.restoration.computed) == stored


def test_what_is_written_when_it_leaves_is_not_written_before(kept):
    contexts, context, _ = begun(kept, writing="at-eviction")
    assert segments(contexts, context) == []
    assert context.record.bits == (LOST, LOST)
    contexts.memory.reclaim(contexts.memory.budget_bytes)
    assert context.record.bits == (RAW, RAW)
    assert len(segments(contexts, context)) == 1
    # What did not change is not written again.
    contexts._delays[100] = READ
    other = new(contexts)
    say(other, [1])
    assert say(context, TURNS[0][1]).restoration.read == (0, 1)
    contexts.memory.reclaim(contexts.memory.budget_bytes)
    assert [contexts.store.record(context.name).files.count(name) for name in ("0.kv", "1.kv")] == [2, 1]


@pytest.mark.slow
def test_widths_never_rise_where_chunks_are_in_memory_alone(kept):
    contexts = kept("kivi", ratio=0.6, writing="never")
    context = new(contexts)
    say(context, [*range(70)], 3)
    before = {n: each.bits for n, each in contexts.memory.chunks(context.name).items()}
    say(new(contexts), [1])
    say(context, [7] * 20, 3)
    after = {n: each.bits for n, each in contexts.memory.chunks(context.name).items()}
    assert all(after[n] <= bits for n, bits in before.items())
    assert set(context.record.bits) == {LOST}


def test_room_is_made_as_an_answer_grows_and_not_when_it_ends(kept):
    """Nor for more than it comes to: what it might have said evicts nobody."""
    size = kept()._chunk_io[100].chunk_bytes(RAW)
    # What both begin with would take its room once.
    contexts = kept(budget_bytes=(TIGHT + 2) * size, share_beginnings=False)
    mine = [new(contexts) for _ in range(2)]
    for context in mine:
        say(context, TURNS[0][0] + TURNS[0][0])
    answer = mine[0].generate(TURNS[0][1], max_tokens=12, ignore_eos=True)
    next(answer)
    first = contexts.memory.evicted
    assert first > 0
    for _ in answer:
        evicted = contexts.memory.evicted
    assert evicted > first
    assert contexts.memory.evicted == evicted
    assert answer.finish_ms > 0
    other = len(contexts.memory.chunks(mine[1].name))
    assert other > 0
    short = mine[0].generate([1], max_tokens=30, ignore_eos=True)
    next(short)
    short.close()
    assert len(contexts.memory.chunks(mine[1].name)) == other


def test_services_share_scales_among_more_tokens(tmp_path):
    for asked, tokens in (
        ({}, CODEC_CHUNK_TOKENS), ({"kv_chunk_tokens": 64}, 64),
        # Who names the codec names all of it.
        ({"kv_codec": "channel"}, 16),
        # Too few chunks to choose between, and prefills that cannot compute a chunk again.
        ({"context_tokens": 255}, 16), ({"chunk_tokens": (16,)}, 16),
    ):  # fmt: skip
        asked = EngineOptions(**asked)
        chosen = engine_options(find_model("draft"), (), asked, ContextOptions(folder=tmp_path))
        assert (chosen.kv_codec, chosen.kv_chunk_tokens) == ("channel", tokens)
