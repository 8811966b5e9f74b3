"""Contexts of models with state layers go on from the states that are kept with them, or from their first
token."""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.contexts.codecs import RAW, STATE
from jaxllm.contexts.recompute import LOST
from jaxllm.errors import BudgetExceeded, CheckpointError, ConfigError
from jaxllm.kv.states import states_bytes
from jaxllm.sampling import Sampling
from jaxllm.serving.contexts.chunk_io import StateChunkIO
from jaxllm.serving.contexts.context import Context, fork
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.contexts.store import ContextStore
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.server.service import engine_options
from tests import tiny_states
from tests.serving.contexts.conftest import OPTIONS
from tests.serving.contexts.mutations import change_record, record_document
from tests.serving.contexts.talking import (
    TURNS,
    C,
    answers_without_contexts,
    begun,
    found,
    kept_by,
    new,
    say,
)

STATES = dataclasses.replace(OPTIONS, kv_codec="raw")


@pytest.fixture(scope="module", params=[pytest.param("short_conv", marks=pytest.mark.campaign), "delta_rule"])
def engine(request, tmp_path_factory):
    path = tiny_states.write_bundle(tmp_path_factory.mktemp("states") / "tiny.jaxllm", request.param, "int8")
    engine = Engine.open(path, options=STATES)
    yield engine
    engine.close()


@pytest.fixture
def kept(engine, tmp_path):
    with kept_by(engine, tmp_path / "store") as again:
        yield again


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("writing", ["background", "ahead"])
def test_a_context_goes_on_after_each_restart(kept, engine, tmp_path, encrypted, writing):
    options = {"writing": writing, "encryption": tmp_path / "keys" if encrypted else None}
    wanted, context = answers_without_contexts(engine, TURNS[0]), None
    for turn, expected in zip(TURNS[0], wanted, strict=True):
        contexts = kept(**options)
        context = new(contexts) if context is None else found(contexts, context)
        before = len(context.tokens)
        answer = say(context, turn)
        assert answer.tokens == expected
        # All but the last token of the answer before, which was never fed.
        assert answer.reused_tokens == max(0, before - 1)
        contexts.store.wait()
        record = contexts.store.record(context.name)
        assert record.state_tokens == len(record.tokens) - 1
        assert record.bits == (*[RAW] * (record.state_tokens // C), STATE)
        assert contexts.store.verify() == []


def test_switching_evicts_and_restores(kept, engine):
    """With memory for one context at a time; and without an eviction nothing is read."""
    wanted = [answers_without_contexts(engine, turns) for turns in TURNS[:2]]
    contexts = kept()
    size = contexts.chunk_bytes(new(contexts).record, 100)
    contexts = kept(budget_bytes=size + 1)
    both = [new(contexts), new(contexts)]
    for number in range(3):
        for context, turns, expected in zip(both, TURNS, wanted, strict=False):
            answer = say(context, turns[number])
            assert answer.tokens == expected[number]
            assert contexts.memory.resident_bytes <= size
            assert answer.restoration.read or number < 2
    assert contexts.memory.evicted
    contexts = kept()
    again = found(contexts, both[0])
    say(again, [5])
    say(found(contexts, both[1]), [5])
    assert say(again, [5]).restoration.read == ()


def test_a_stopped_answer_goes_on_from_the_states_before(kept, engine):
    """Unless it was stopped by the last token that was decoded."""
    contexts, beyond = kept(), 0
    for number in range(2, 7):
        context = new(contexts)
        say(context, TURNS[0][0])
        before = context.record
        # Greedy answers of so small a model say the same again and again.
        drawn = Sampling(temperature=1.5, seed=number)
        config = dataclasses.replace(_greedy(number), sampling=drawn)
        text = engine.tokenizer.decode(engine.generate([*before.tokens, 9], config).tokens)
        more = {"max_tokens": 20, "ignore_eos": True, "sampling": drawn}
        answer = context.generate([9], stop=[text[-1:]], **more).result()
        assert answer.finish_reason == "stop"
        contexts.store.wait()
        after = contexts.store.record(context.name)
        assert len(after.tokens) > len(before.tokens)
        wanted = engine.generate([*after.tokens, 7, 7], _greedy(6)).tokens
        again = say(context, [7, 7])
        assert again.tokens == wanted
        assert after.state_tokens in (before.state_tokens, len(after.tokens) - 1, len(after.tokens))
        assert again.reused_tokens == after.state_tokens
        beyond += after.state_tokens == before.state_tokens
    assert beyond


def _greedy(count):
    return GenerationConfig(max_tokens=count, ignore_eos=True)


@pytest.mark.parametrize("place", [0, -1])
def test_without_a_chunk_all_is_computed_again(kept, engine, place):
    contexts, context, wanted = begun(kept)
    record = contexts.store.record(context.name)
    contexts.store.commit(record.lose({place % len(record.bits)}))
    contexts = kept()
    context = found(contexts, context)
    answer = say(context, TURNS[0][1])
    assert (answer.tokens, answer.reused_tokens) == (wanted[1], 0)
    contexts.store.wait()
    assert LOST not in contexts.store.record(context.name).bits
    assert say(context, TURNS[0][2]).tokens == wanted[2]


def test_a_kill_before_the_states_are_written_leaves_those_before(kept, engine, monkeypatch):
    contexts, context, wanted = begun(kept)
    before, commit = contexts.store.record(context.name), contexts.store.commit

    def killed(record, chunks=None, **more):
        if chunks:
            raise CheckpointError("killed")
        return commit(record, **more)

    with monkeypatch.context() as patch:
        patch.setattr(contexts.store, "commit", killed)
        assert say(context, TURNS[0][1]).tokens == wanted[1]
        with contextlib.suppress(CheckpointError):
            kept().close()
    contexts = kept()
    context = found(contexts, context)
    record = contexts.store.record(context.name)
    assert len(record.tokens) == len(before.tokens) + len(TURNS[0][1]) + 6
    assert (record.state_tokens, record.bits) == (before.state_tokens, before.bits)
    answer = say(context, TURNS[0][2])
    assert (answer.tokens, answer.reused_tokens) == (wanted[2], before.state_tokens)


def test_a_context_that_slides_begins_its_states_anew(kept, engine):
    contexts = kept()
    context = new(contexts)
    say(context, TURNS[0][0], 60)
    answer = context.generate(TURNS[0][1], max_tokens=60, ignore_eos=True, slide=True).result()
    assert len(answer.tokens) == 60
    contexts.store.wait()
    record = contexts.store.record(context.name)
    assert record.state_tokens == len(record.tokens) - 1 < STATES.context_tokens
    contexts = kept()
    wanted = engine.generate([*record.tokens, 3], _greedy(2)).tokens
    answer = say(found(contexts, context), [3], 2)
    assert (answer.tokens, answer.reused_tokens) == (wanted, record.state_tokens)
    # What does not fit is dropped before a call, too.
    answer = found(contexts, context).generate(TURNS[0][0], max_tokens=40, ignore_eos=True, slide=True)
    assert len(answer.result().tokens) == 40


def test_forks(kept, engine):
    contexts, context, _ = begun(kept)
    record = contexts.record(context.app, context.name)
    for tokens, reused in ((len(record.tokens), record.state_tokens), (30, 0)):
        made = Context(contexts, fork(contexts, record, tokens))
        wanted = engine.generate([*record.tokens[:tokens], 8], _greedy(6)).tokens
        answer = say(made, [8])
        assert (answer.tokens, answer.reused_tokens) == (wanted, reused)
    # Contexts that begin alike share no chunks.
    assert say(new(contexts), TURNS[0][0]).restoration.shared == 0


def test_states_count(kept, engine):
    contexts = kept()
    chunk_io, size = contexts._chunk_io[100], states_bytes(engine.cfg)
    assert chunk_io.chunk_bytes(STATE) == size + chunk_io.chunk_bytes(RAW)
    context = new(contexts)
    assert contexts.chunk_bytes(context.record, 40) == 3 * chunk_io.chunk_bytes(RAW) + size
    say(context, TURNS[0][0])
    assert contexts.memory.own_bytes(context.name) == 3 * chunk_io.chunk_bytes(RAW) + size
    contexts = kept(budget_bytes=size)
    with pytest.raises(BudgetExceeded, match="raise the budget"):
        say(new(contexts), [1, 2])
    contexts = kept(app_quota_bytes=1 << 14)
    with pytest.raises(BudgetExceeded, match="quota"):
        say(new(contexts), TURNS[0][0] * 2)


def test_records(kept, engine):
    contexts = kept()
    context = new(contexts)
    say(context, TURNS[0][0])
    folder = contexts.store.root / "app-mail" / context.name
    contexts.close()
    document = record_document(folder)
    for changed in (
        {"state_tokens": -1}, {"state_tokens": 10**6}, {"state_tokens": 3}, {"state_tokens": 0},
        {"state_tokens": True}, {"bits": [STATE, RAW, RAW]}, {"bits": [RAW, RAW, RAW]},
        {"origin": {**document["origin"], "state_bytes": -1}},
        {"origin": {**document["origin"], "state_bytes": 0}},
        {"origin": {**document["origin"], "codec": "channel"}},
    ):  # fmt: skip
        change_record(folder, **{**document, **changed})
        with ContextStore(folder.parent.parent) as store:
            assert context.name not in {each.name for each in store.records()}, changed
    # Tokens that the states are not of.
    tokens = document["tokens"]
    change_record(folder, **{**document, "tokens": [tokens[0] ^ 1, *tokens[1:]]})
    contexts = kept()
    assert say(found(contexts, context), [4]).reused_tokens == 0


def test_other_codecs_than_raw_are_refused(engine, tmp_path):
    contexts = ContextOptions(folder=tmp_path)
    assert engine_options(engine.model.bundle.path, (), EngineOptions(), contexts).kv_codec == "raw"
    for more in ({"kv_codec": "channel"}, {"attend_quantized_kv": True}):
        with pytest.raises(ConfigError, match="kept as they are"):
            Engine.open(engine.model.bundle.path, options=dataclasses.replace(STATES, **more))


def test_chunks_are_what_the_cache_has(engine):
    """The rows and states of a cache, through blobs, at its end too."""
    chunk_io = StateChunkIO(engine.runner)
    empty = engine.runner.start(64)
    draw = np.random.default_rng(0)

    def noise(each):
        return draw.normal(size=each.shape).astype(each.dtype)

    full = dataclasses.replace(
        empty,
        keys=tuple(map(noise, empty.keys)),
        values=tuple(map(noise, empty.values)),
        states=jax.tree.map(noise, empty.states),
    )
    stored = chunk_io.encode(full, {0: RAW, 2: RAW, 3: STATE})
    back = chunk_io.load(empty, stored)
    for ours, theirs in zip((*full.keys, *full.values), (*back.keys, *back.values), strict=True):
        theirs = np.asarray(theirs)
        np.testing.assert_array_equal(theirs[..., :C, :], ours[..., :C, :])
        np.testing.assert_array_equal(theirs[..., 2 * C :, :], ours[..., 2 * C :, :])
        assert not theirs[..., C : 2 * C, :].any()
    jax.tree.map(np.testing.assert_array_equal, full.states, back.states)
    with pytest.raises(CheckpointError, match="should have"):
        chunk_io.load(empty, {0: (RAW, [stored[3][1][0]])})
