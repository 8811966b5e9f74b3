"""Contexts whose answers attend to chunks where they lie: what is answered is what decoding first gives, also
together with everything else that an engine can do."""

import dataclasses
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.contexts.codecs import CODECS
from jaxllm.errors import ConfigError
from jaxllm.serving.contexts import restore
from jaxllm.serving.engine.request import GenerationConfig, Session
from jaxllm.serving.engine.step import batchable, decode_together, step
from jaxllm.serving.ground.int8_prefill_options import PrefillOptions
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from tests.kernels.switching import needs_native
from tests.serving.contexts.conftest import OPTIONS
from tests.serving.contexts.talking import TURNS, C, answers_without_contexts, begun, found, new, say

pytestmark = needs_native


def test_raw_chunks_in_front_give_what_a_cache_gives(kept, compiles):
    """Three contexts by turns: each call begins with a table, of chunks in memory or read, and compiles
    nothing."""
    contexts = kept(coded=True)
    wanted = [answers_without_contexts(contexts.engine, turns) for turns in TURNS]
    mine = [new(contexts) for _ in TURNS]
    with compiles() as count:
        for turn in range(3):
            for context, turns, answers in zip(mine, TURNS, wanted, strict=True):
                held = len(context.record.bits)
                answer = say(context, turns[turn])
                assert answer.tokens == answers[turn]
                assert answer.restoration.resident == held
                assert contexts._last[1].cache.coded_tokens == held * C
        assert count() == 0
    contexts = kept(coded=True, read=True)
    context = found(contexts, mine[0])
    held = len(context.record.bits)
    answer = say(context, TURNS[1][1])
    assert len(answer.restoration.read) == held
    assert contexts._last[1].cache.coded_tokens == held * C
    assert contexts.store.verify() == []


@pytest.mark.parametrize("codec", CODECS)
def test_density_and_widths_are_those_of_decoded_chunks(kept, codec):
    """Also where chunks in front are stored at fewer bits when a call ends."""
    records = []
    for coded in (False, True):
        contexts = kept(codec, weights="int8", coded=coded, ratio=0.5, share_beginnings=False)
        first, second = new(contexts), new(contexts)
        for turn in range(3):
            for context, turns in ((first, TURNS[0]), (second, TURNS[1])):
                # Tokens are given, not drawn, so that both go the same way.
                context.generate(turns[turn], max_tokens=1, ignore_eos=True).result()
        records.append(first.record)
    decoded, coded = records
    assert coded.bits == decoded.bits
    assert len(set(coded.bits)) > 1
    np.testing.assert_allclose(coded.mass, decoded.mass, rtol=2e-2)


def test_chunks_that_leave_memory_are_freed(kept):
    """Though whoever asked keeps an answer, whose session had their chunk table."""
    contexts = kept("kivi", coded=True)
    first, second = new(contexts), new(contexts)

    def answered():
        answers = [say(second, TURNS[1][1]), say(first, TURNS[0][1])]
        contexts.store.wait()
        assert contexts._last[1].chunks is not None
        blob = weakref.ref(contexts.memory.chunks(first.name)[0].blobs[0])
        assert blob() is not None
        return answers, blob

    say(first, TURNS[0][0])
    answers, blob = answered()
    contexts.memory.cut(first.name, 0)
    answers.append(say(second, TURNS[1][1]))
    assert blob() is None
    more, blob = answered()
    # What a context had, too, whose cache is there.
    contexts.resize(1)
    assert blob() is None
    contexts.resize(1 << 20)
    assert say(first, TURNS[0][1]).restoration.resident == 0
    assert len(answers) + len(more) == 5


def test_a_long_tail_is_left_behind(kept, monkeypatch):
    """The next call of the same context begins with chunks alone."""
    contexts, context, wanted = begun(kept, coded=True)
    assert contexts._last[1].cache.coded_tokens == 0
    monkeypatch.setattr(restore, "_TAIL_TOKENS", 20)
    answer = say(context, TURNS[0][1])
    assert answer.tokens == wanted[1]
    assert not answer.restoration.cached
    assert contexts._last[1].cache.coded_tokens == 32
    monkeypatch.undo()
    answer = say(context, TURNS[0][2])
    assert answer.tokens == wanted[2]
    assert answer.restoration.cached


def test_a_context_with_chunks_in_front_slides(kept):
    answers = []
    for coded in (False, True):
        contexts = kept(coded=coded)
        context, other = new(contexts), new(contexts)
        said = []
        for turn in range(3):
            said += (
                context.generate(TURNS[0][turn], max_tokens=60, ignore_eos=True, slide=True).result().tokens
            )
            say(other, TURNS[1][0][:10])
        answers.append((said, context.tokens))
        assert contexts.store.verify() == []
    assert answers[0] == answers[1]


def test_levels_read_their_own_heads(kept):
    """And chunks that are decoded are of their level, too."""
    for coded in (False, True):
        contexts = kept(weights="int8", levels=(50,), coded=coded)
        mine = {level: new(contexts, level=level) for level in (50, 100)}
        wanted = {level: answers_without_contexts(contexts.engine.at(level), TURNS[0]) for level in mine}
        for turn in range(3):
            for level, context in mine.items():
                answer = say(context, TURNS[0][turn])
                assert (answer.tokens, context.level) == (wanted[level][turn], level)


def test_a_switch_in_memory_looks_at_no_chunk(kept, monkeypatch):
    """It calls as many functions however long contexts are, and dispatches nothing."""
    contexts, calls = kept("channel", coded=True), []
    mine = [new(contexts) for _ in range(4)]
    for context, count in zip(mine, (40, 40, 100, 100), strict=True):
        say(context, [7] * count, 1)
    contexts.store.wait()
    monkeypatch.setattr(contexts.engine.runner.buckets, "get", None)
    for context in 3 * mine:
        record, session, events = context.record, Session(), []
        prompt = [*record.tokens, 5]

        def count(_frame, event, _what, events=events):
            events.append(event)

        sys.setprofile(count)
        turn = contexts.begin(record, session, prompt_tokens=110, most_tokens=110, prompt=prompt)
        sys.setprofile(None)
        assert turn.restoration.resident == len(record.bits)
        assert session.cache.coded_tokens == len(record.bits) * C
        contexts.abandon(turn)
        contexts._last = (record.name, session)
        calls.append(sum(event.endswith("call") for event in events))
    assert len(set(calls[-4:])) == 1


# Together with what else an engine can do


# Engines by name: their weights, and what they do besides.
KINDS = {
    "int8": ("int8", {"batch_rows": (2, 4)}),
    "drafts": ("int8", {"drafts": SpeculationOptions(drafter="ngram")}),
}


@pytest.fixture
def alike(kept):
    """Asserts that a function returns the same of contexts whose answers decode chunks, and of others."""

    def run(kind, talk):
        weights, engine = KINDS[kind]
        found = []
        for coded in (False, True):
            contexts = kept("raw", weights, coded=coded, engine=engine)
            found.append(talk(contexts))
            contexts.store.wait()
            assert contexts.store.verify() == []
            for each in contexts.store.records():
                contexts.delete(each.name)
        assert found[0] == found[1]

    return run


@pytest.fixture
def coded_engine(engine_of):
    """Opens an engine that attends to coded chunks, of a format of weights."""

    def opened(weights, speculation=None, *, coded=True, **more):
        options = dataclasses.replace(OPTIONS, kv_codec="raw", attend_quantized_kv=coded, **more)
        path = engine_of("raw", weights).model.bundle.path
        return Engine.open(path, options=options, speculation=speculation, warm_up=False)

    return opened


def together(contexts):
    """Answers that are decoded together, one without a context among them."""
    mine = [new(contexts) for _ in range(3)]
    for context, turns in zip(mine, TURNS, strict=True):
        say(context, turns[0])
    config = {"max_tokens": 12, "ignore_eos": True}
    runs = [each.generate(turns[1], **config) for each, turns in zip(mine, TURNS, strict=True)]
    runs.append(contexts.engine.stream(TURNS[0][2], GenerationConfig(**config)))
    while running := [run for run in runs if run.stage != "ended"]:
        for run in running:
            if not batchable(run):
                step(run)
        decode_together([run for run in running if batchable(run)])
    return [run.tokens for run in runs]


def drafted(contexts):
    mine, turn = [new(contexts) for _ in range(2)], [5, 6, 7, 8] * 6
    return [say(each, turn, 16).tokens for _ in range(2) for each in mine]


def beginnings_that_are_shared(contexts):
    said = []
    for number, turns in enumerate(TURNS):
        answer = say(new(contexts), [*range(10, 60), *turns[0][:9]])
        said.append(answer.tokens)
        contexts.store.wait()
        assert answer.restoration.shared == (3 if number else 0)
    return said


def caches_of_ended_answers_that_are_copied(contexts):
    """As the service does for prompts that begin alike, beside contexts."""
    engine, runner = contexts.engine, contexts.engine.runner
    runner.fill(runner.fork_buckets())
    say(new(contexts), TURNS[1][0])
    first = engine.generate(TURNS[0][0], GenerationConfig(max_tokens=4, ignore_eos=True))
    session = dataclasses.replace(first.session, cache=runner.fork(first.session.cache, 32))
    session.tokens = session.tokens[:32]
    config = GenerationConfig(max_tokens=8, ignore_eos=True)
    answer = engine.stream([*TURNS[0][0][:32], *TURNS[0][1]], config, session=session).result()
    assert answer.reused_tokens == 32
    return answer.tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "talk"),
    [
        ("int8", together),
        ("int8", beginnings_that_are_shared),
        ("int8", caches_of_ended_answers_that_are_copied),
        ("drafts", drafted),
    ],
)
def test_what_attends_to_coded_chunks_answers_alike(alike, kind, talk):
    alike(kind, talk)


def test_what_cannot_is_refused_by_name(kept, engine_of, coded_engine, monkeypatch):
    with pytest.raises(ConfigError, match="name a kv_codec"):
        EngineOptions(attend_quantized_kv=True)
    with pytest.raises(ConfigError, match="because its weights are streamed"):
        kept(weights="int8", share=0.9, coded=True)
    with pytest.raises(ConfigError, match="does not attend to stored chunks: leave out attend_quantized_kv"):
        coded_engine("int8-nested", SpeculationOptions(drafter="nested"))
    with pytest.raises(ConfigError, match="no native kernels here attend to caches of bfloat16"):
        coded_engine("int8-nested", cache_dtype="bfloat16")
    engine_of("raw", "int8")
    monkeypatch.setattr(
        "jaxllm.serving.int8_prefill.modes.chosen_prefill",
        lambda *_, **__: SimpleNamespace(calibration=None),
    )
    with pytest.raises(ConfigError, match="because it prefills in integers"):
        coded_engine("int8", prefill=PrefillOptions(mode="int8"))
