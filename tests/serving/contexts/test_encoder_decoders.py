"""Contexts of encoder-decoders: the first turn is the source, later ones go on with what the decoder says."""

import dataclasses

import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.errors import ConfigError
from jaxllm.sampling import Sampling
from jaxllm.serving.contexts.context import Context
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.contexts.record import conversation_turn_ids
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from tests import tiny
from tests.kernels.switching import needs_native
from tests.serving.contexts.talking import kept_by
from tests.serving.memory import budget
from tests.serving.test_encoder_decoders import BART, MARIAN, T5, TREES, written

OPTIONS = EngineOptions(
    context_tokens=64, cache_tokens=(64,), chunk_tokens=(16,), decode_block=4, buckets_bytes=0, kv_codec="raw"
)
CFG = dataclasses.replace(T5, encoder=dataclasses.replace(T5.encoder, window_tokens=64))
GREEDY = {"ignore_eos": True, "sampling": Sampling(temperature=0)}
# Sources, and what the decoder says before it goes on in later turns; the last goes on by itself.
SOURCES = [np.random.default_rng(n).integers(3, 90, 30).tolist() for n in range(3)]
TURNS = ([7, 8, 9], [11], [])
TOKENS = 12


@pytest.fixture(scope="module", params=["memory", "storage"])
def engine(request, tmp_path_factory):
    """All weights in memory, or layers that are read from storage."""
    path = written(tmp_path_factory.mktemp("t5"), "int8", CFG)
    options, more = OPTIONS, {}
    if request.param == "storage":
        whole = Engine.open(path, options=OPTIONS, warm_up=False)
        more = {"memory_bytes": budget(whole, 0.6)}
        whole.close()
    engine = Engine.open(path, options=dataclasses.replace(options, **more))
    assert (engine.model.streamed is not None) == (request.param == "storage")
    yield engine
    engine.close()


@pytest.fixture
def kept(engine, tmp_path):
    """Contexts in a folder of the test's; opened again by calling again."""
    with kept_by(engine, tmp_path / "store") as again:
        yield again


def new(contexts):
    return Context(contexts, contexts.create("mail"))


def say(context, prompt):
    return context.generate(prompt, max_tokens=TOKENS, **GREEDY).result()


def without_contexts(engine, source):
    """The answers to a source and the turns after it, each computed from its beginning."""
    config = GenerationConfig(max_tokens=TOKENS, **GREEDY)
    said, answers = [tiny.BEGIN_ID], []
    for turn in ([], *TURNS):
        said += turn
        request = engine.request(said, config, source=source)
        answers.append(engine.submit(request).result().tokens)
        said += answers[-1]
    return answers


def test_turns_go_on_whatever_ran_between(engine, kept, compiles):
    """Token for token: three contexts by turns, and after each turn a fresh memory."""
    contexts = kept()
    wanted = [without_contexts(engine, source) for source in SOURCES]
    mine = [new(contexts) for _ in SOURCES]
    with compiles() as count:
        for number, turn in enumerate((None, *TURNS)):
            for context, source, answers in zip(mine, SOURCES, wanted, strict=True):
                answer = say(context, source if turn is None else turn)
                assert answer.tokens == answers[number]
                assert context.source == tuple(source)
            if number == 2:
                # Another process would find them so.
                contexts = kept()
                mine = [Context(contexts, contexts.record("mail", each.name)) for each in mine]
        assert count() == 0


def test_evicted_and_lost_chunks_come_back(engine, kept, monkeypatch):
    wanted = without_contexts(engine, SOURCES[0])
    contexts = kept()
    first, other = new(contexts), new(contexts)
    for turn in (SOURCES[0], *TURNS[:2]):
        say(first, turn)
    record = contexts.record("mail", first.name)
    assert len(record.bits) == 2
    # Room for one context alone: chunks of the other are read again.
    contexts = kept(budget_bytes=contexts.chunk_bytes(record, 64))
    first, other = (Context(contexts, contexts.record("mail", each.name)) for each in (first, other))
    say(other, SOURCES[1])
    say(other, list(range(3, 33)))
    # Computed again from source and tokens.
    contexts.memory.forget(first.name)
    contexts.store.commit(contexts.store.record(first.name).lose({0}))
    answer = say(first, TURNS[2])
    assert answer.restoration.computed == (0,)
    assert answer.tokens == wanted[3]


def test_the_context_that_ran_last_reads_no_source_again(engine, kept, monkeypatch):
    contexts, read = kept(), []
    runner = type(engine.runner)
    read_source = runner.read_source
    monkeypatch.setattr(
        runner, "read_source", lambda self, cache, tokens: read.append(1) or read_source(self, cache, tokens)
    )
    context, other = new(contexts), new(contexts)
    for turn in (SOURCES[0], *TURNS):
        say(context, turn)
    assert len(read) == 1
    # One that says the same of another source has other chunks.
    say(other, SOURCES[1])
    assert len(read) == 2
    say(context, [])
    assert len(read) == 3


def test_an_end_token_is_followed_by_nothing(engine, kept):
    contexts = kept()
    context = new(contexts)
    say(context, SOURCES[0])
    ended = contexts.record("mail", context.name)
    end = engine.tokenizer.eos_ids[0]
    contexts.store.commit(dataclasses.replace(ended, tokens=(*ended.tokens, end)))
    answer = say(context, [7])
    assert context.tokens == (*ended.tokens, 7, *answer.tokens)


def test_what_contexts_of_encoder_decoders_refuse(engine, kept):
    context = new(kept())
    with pytest.raises(ConfigError, match="the prompt is empty"):
        context.generate([])
    say(context, SOURCES[0])
    with pytest.raises(ConfigError, match="answers that outgrow the context: not for"):
        context.generate([7], slide=True).result()
    asked, said = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello"}
    tokenizer = engine.tokenizer
    assert conversation_turn_ids(tokenizer, (), [asked]) == tokenizer.encode("hello")
    assert conversation_turn_ids(tokenizer, (1, 2), [said]) == tokenizer.encode(
        "hello", add_special_tokens=False
    )
    for messages, tools in (([asked], ()), ([said, asked], ()), ([said], ({"name": "f"},))):
        with pytest.raises(ConfigError, match=r"has one source, its first turn's: .* make a new context"):
            conversation_turn_ids(tokenizer, (1, 2), messages, tools=tools)


ENGINES = {
    "bart": lambda folder: (written(folder, "bf16", BART), {}, {}),
    "marian": lambda folder: (written(folder, "int8", MARIAN), {}, {}),
    "coded": lambda folder: (written(folder, "int8", T5), {"attend_quantized_kv": True}, {}),
    "ngram": lambda folder: (written(folder, "int8", T5), {}, {"speculation": drafts("ngram")}),
    "nested": lambda folder: (written(folder, "int8-nested", T5), {}, {"speculation": drafts("nested")}),
}


def drafts(name):
    return SpeculationOptions(drafter=name, trees=TREES, pausing=False, fallback="fixed", alpha=1e-6)


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize("kind", ENGINES)
def test_every_kind_of_engine_goes_on(kind, tmp_path):
    """With a chunk that is computed again. Decoding with nested weights rounds otherwise than prefill, so
    that a conversation goes on in other words where some of it was computed again."""
    path, options, more = ENGINES[kind](tmp_path)
    options = dataclasses.replace(OPTIONS, context_tokens=48, cache_tokens=(48,), **options)
    engine = Engine.open(path, options=options, **more)
    contexts = Contexts(engine, ContextOptions(folder=tmp_path / "store"))
    one, other, same = (Context(contexts, contexts.create("mail")) for _ in range(3))
    if kind == "nested":
        wanted = [say(same, each).tokens for each in (SOURCES[0], TURNS[0])]
    else:
        wanted = without_contexts(engine, SOURCES[0])[:3]
    answers = [say(one, SOURCES[0]).tokens, say(one, TURNS[0]).tokens]
    say(other, SOURCES[1])
    contexts.store.wait()
    contexts.memory.forget(one.name)
    contexts.store.commit(contexts.store.record(one.name).lose({0}))
    answer = say(one, TURNS[1])
    assert answer.restoration.computed == (0,)
    assert [*answers, answer.tokens][: len(wanted)] == wanted
    contexts.close()
    engine.close()
