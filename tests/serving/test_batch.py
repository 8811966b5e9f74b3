"""Answers step by step, and decoded together: each is the one that it gets alone, and joins, leaves and fails
alone."""

import dataclasses
import json
import math
from unittest.mock import Mock

import pytest

from jaxllm import Engine
from jaxllm.bundle.levels import elastic_parts
from jaxllm.elastic.ladder import Ladder
from jaxllm.errors import ConfigError, NotFinite
from jaxllm.sampling import Sampling
from jaxllm.serving.engine import step as steps
from jaxllm.serving.engine.guided_decoding import Chances
from jaxllm.serving.engine.request import GenerationConfig, Session, Sliding
from jaxllm.serving.engine.run import Lifecycle, Run
from jaxllm.serving.engine.step import Answer, batchable, close, decode_together, step
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.serving.guided.grammar import Grammar, Thought
from tests.elastic.models import scaled_params
from tests.kernels.switching import fall_back, needs_native
from tests.tiny import TINY, write_tiny_bundle

OPTIONS = EngineOptions(context_tokens=64, chunk_tokens=(16,), decode_block=4, batch_rows=(2, 4))
PROMPTS = ([1, 50, 7, 99, 23], [9, 8, 7], [*range(30, 50)], [5], [77, 78, 79, 80, 81, 82])
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(repetition_penalty=1.4, seed=1),
    Sampling(temperature=0.7, top_k=20, top_p=0.9, seed=5),
    Sampling(temperature=1.5, presence_penalty=0.5, seed=8),
)


def opened(folder, weights, options=OPTIONS, **more):
    return Engine.open(write_tiny_bundle(folder / f"{weights}.jaxllm", weights), options=options, **more)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return opened(tmp_path_factory.mktemp("batch"), "int8")


def begun(engine, number, tokens=14, **more):
    """A run that has its first token."""
    config = GenerationConfig(max_tokens=tokens, sampling=SAMPLINGS[number], **{"ignore_eos": True} | more)
    run = engine.stream(PROMPTS[number], config)
    while run.stage in ("begin", "prefill"):
        step(run)
    return run


def alone(engine, run):
    return engine.generate(run.request.prompt, run.request.config)


def ended(runs):
    """Decodes the runs together until each has ended."""
    while running := [run for run in runs if run.stage != "ended"]:
        for run in running:
            if run.decoding.matcher is not None:
                run.decoding.matcher.wait()
            if not batchable(run):
                step(run)
        decode_together([run for run in running if batchable(run)])
    return runs


def check(engine, runs):
    for run in runs:
        expected = alone(engine, run)
        assert (run.tokens, run.finish_reason) == (expected.tokens, expected.finish_reason)
        assert "".join(run) == expected.text
        # Where the last token ends a grammar's text, it is cached or not.
        one, other = sorted((run.session.tokens, expected.session.tokens), key=len)
        assert one == other[: len(one)]
        assert len(other) - len(one) <= (run.decoding.matcher is not None)


@needs_native
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_answers_are_those_of_each_alone(engine, weights, tmp_path, compiles):
    """Five answers in buckets of up to four rows, of other lengths and samplings."""
    if weights != "int8":
        engine = opened(tmp_path, weights, dataclasses.replace(OPTIONS, batch_rows=(4,)))
    runs = ended([begun(engine, number, tokens=9 + number) for number in range(5)])
    check(engine, runs)
    assert len({tuple(run.tokens[:9]) for run in runs}) == 5
    with compiles() as count:
        for together in range(1, 6):
            ended([begun(engine, number) for number in range(together)])
    assert count() == 0


@needs_native
def test_answers_join_and_leave_between_dispatches(engine):
    runs = [begun(engine, 0, tokens=20), begun(engine, 1, tokens=3), begun(engine, 2)]
    decode_together(runs, most_tokens=3)
    # A dispatch gives as many tokens as were asked; one that ends sooner waits for nobody.
    assert [(len(run.tokens), run.stage) for run in runs] == [(4, "decode"), (3, "finish"), (4, "decode")]
    assert all(run.pace >= 1 for run in runs)
    first = [begun(engine, 0, tokens=20), begun(engine, 1, tokens=7)]
    decode_together(first)
    decode_together(first, most_tokens=2)
    second = [first[0], begun(engine, 2), begun(engine, 3, tokens=3)]
    # A dispatch of its own between two.
    step(second[1])
    decode_together(second)
    check(engine, ended([*first, *second[1:]]))
    # Each stops at its own string or token.
    text = alone(engine, begun(engine, 1)).text
    runs = [begun(engine, 0), begun(engine, 1, stop=(text[3:5],)), begun(engine, 2, ignore_eos=False)]
    check(engine, ended(runs))
    assert runs[1].finish_reason == "stop"
    # A sequence that slides takes that step alone.
    config = GenerationConfig(max_tokens=40, ignore_eos=True)
    sliding = [engine.stream([*range(2, 58)], config, sliding=Sliding(sink_tokens=4)) for _ in range(2)]
    runs = ended([sliding[1], begun(engine, 1, tokens=30)])
    assert runs[0].tokens == sliding[0].result().tokens
    check(engine, runs[1:])
    # Only what decodes is batchable. Of three chunks of 16 tokens the first is fed as the run begins.
    run, found = engine.stream([1] * 40, dataclasses.replace(config, max_tokens=2)), []
    while run.stage != "ended":
        found.append((run.stage, batchable(run)))
        step(run)
    fed = [("prefill", False)] * 2
    assert found == [("begin", False), *fed, ("decode", True), ("finish", False)]


@needs_native
def test_answers_under_grammars_share_dispatches(engine, monkeypatch):
    """With a mask each, sampled together and cut, in a thought, and with forced tokens, beside plain ones."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    thought = Thought(opening="<think>", closing="</think>", opened=True, most_tokens=5)
    grammars = [
        Grammar(kind="regex", text="(?s:.){20,}"),
        Grammar(kind="json_schema", text=json.dumps(schema | {"required": ["a", "b"]})),
        Grammar(kind="regex", text="(hello the ){2}[0-9]{3}"),
        Grammar(kind="regex", text="[a-e]+", thought=thought),
    ]
    rows, batch = [], engine.runner.batch
    decode_batch = type(batch).decode_batch
    monkeypatch.setattr(
        type(batch), "decode_batch", lambda self, each: rows.append(each) or decode_batch(self, each)
    )
    for most, some in ((None, grammars), (1, grammars), (3, grammars[:1] * 3)):
        if most is not None:
            monkeypatch.setattr(
                Chances,
                "tokens",
                lambda self, wide, limit, one_pass, most=most: min(limit, most),
            )
        runs = [begun(engine, number, tokens=40, grammar=each) for number, each in enumerate(some)]
        check(engine, ended([*runs, begun(engine, 4, tokens=20)]))
    assert max(len(each) for each in rows) == 5
    limits = [{row.limit for row in each} for each in rows if len(each) > 1]
    # All rows are as long as the shortest.
    assert {(1,), (3,)} <= {tuple(each) for each in limits}


@needs_native
def test_levels_share_dispatches(tmp_path, compiles):
    """Answers of three levels in one: each as its level answers alone, with no bucket of its own."""
    ladder = elastic_parts(Ladder(levels=(40, 70, 100)))
    path = write_tiny_bundle(tmp_path / "elastic.jaxllm", "int8", params=scaled_params(TINY), parts=ladder)
    options = dataclasses.replace(OPTIONS, levels=(40, 70), batch_rows=(4,))
    whole = Engine.open(path, options=options)
    engines = [whole, whole.at(40), whole.at(70), whole.at(40)]
    with compiles() as count:
        runs = [begun(engine, number) for number, engine in enumerate(engines)]
        assert len({id(run.runner.batch.family) for run in runs}) == 1
        ended(runs)
    assert count() == 0
    for engine, run in zip(engines, runs, strict=True):
        check(engine, [run])
    assert any(run.tokens != alone(whole, run).tokens for run in runs)


@needs_native
@pytest.mark.slow
def test_caches_of_several_lengths(tmp_path):
    """Shorter caches become as long as the longest of the batch."""
    options = dataclasses.replace(OPTIONS, cache_tokens=(16, 32, 64), batch_rows=(4,))
    engine = opened(tmp_path, "int8", options)
    check(engine, ended([begun(engine, number, tokens=5 + 8 * number) for number in range(4)]))


# Ends


class Noted(Lifecycle):
    """Writes down which hooks were called, and fails where it is told to."""

    def __init__(self, error=None):
        self.hooks, self.error = [], error
        for name in ("finish", "failed", "dropped"):
            setattr(self, name, lambda run, name=name: self.hooks.append(name))

    def stepped(self, run):
        self.hooks.append("stepped")
        if self.error is not None and len(run.tokens) > 1:
            raise self.error


@needs_native
def test_an_error_of_one_answer_ends_it_alone(engine):
    runs = [begun(engine, number) for number in range(3)]
    forbidden = dataclasses.replace(runs[1].sampler, penalized=True, bias=runs[1].sampler.bias - math.inf)
    runs[1].sampler = forbidden
    runs[2].lifecycle = Noted(ConfigError("the disk is full"))
    decode_together(runs)
    assert [run.stage for run in runs] == ["decode", "ended", "ended"]
    with pytest.raises(NotFinite, match="not finite"):
        list(runs[1])
    with pytest.raises(ConfigError, match="disk is full"):
        list(runs[2])
    assert runs[1].session.cache is None
    assert runs[2].lifecycle.hooks[:2] == ["stepped", "failed"]
    ended(runs[:1])
    check(engine, runs[:1])


@needs_native
def test_an_error_of_the_dispatch_ends_all_of_it(engine, monkeypatch):
    runs = [begun(engine, number) for number in range(2)]
    changed = Mock(side_effect=ConfigError("the model's file was changed"))
    monkeypatch.setattr(engine.runner.batch, "decode_batch", changed)
    decode_together(runs)
    for run in runs:
        assert run.stage == "ended"
        with pytest.raises(ConfigError, match="was changed"):
            list(run)
    runs = [begun(engine, number) for number in range(2)]
    monkeypatch.setattr(engine.runner.batch, "decode_batch", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        decode_together(runs)
    assert [run.stage for run in runs] == ["ended", "ended"]


@needs_native
def test_an_answer_that_another_thread_closes_is_left_out(engine):
    runs = [begun(engine, number) for number in range(2)]
    for run in runs:
        run.lifecycle = Noted()
    close(runs[0])
    tokens = list(runs[0].tokens)
    decode_together(runs)
    assert runs[0].tokens == tokens
    assert runs[0].lifecycle.hooks == ["finish", "finish"]
    assert runs[1].lifecycle.hooks == ["stepped"]
    check(engine, ended(runs[1:]))


@needs_native
@pytest.mark.slow
def test_drafts_are_off_while_answers_are_together(tmp_path):
    options = dataclasses.replace(OPTIONS, batch_rows=(2,))
    engine = opened(tmp_path, "int8", options, speculation=SpeculationOptions(drafter="ngram"))
    runs = [begun(engine, number, tokens=20) for number in (0, 2)]
    step(runs[0])
    decode_together(runs)
    step(runs[1])
    check(engine, ended(runs))


# Where answers are decoded one by one


@pytest.mark.slow
def test_xla_decodes_one_by_one(tmp_path, monkeypatch):
    """Its products of several rows have other last bits than those of one; so does who was not asked."""
    unasked = opened(tmp_path, "int8", dataclasses.replace(OPTIONS, batch_rows=()))
    assert not batchable(begun(unasked, 0))
    engine = opened(tmp_path, "f32")
    run = begun(engine, 0)
    assert not batchable(run)
    check(engine, ended([run]))
    fall_back(monkeypatch)
    assert not batchable(begun(opened(tmp_path, "int8"), 0))


# Step by step: closed by another thread, in the middle of a slide, and interrupted.


PROMPT = PROMPTS[0]


def config(tokens):
    return GenerationConfig(max_tokens=tokens, ignore_eos=True)


@pytest.mark.parametrize("because", [None, ConfigError("the service ended it")])
def test_another_thread_may_close_an_answer_whenever_it_comes(engine, monkeypatch, because):
    run = engine.stream(PROMPT, config(20))

    def closed_behind(answer: Run):
        step(answer)
        close(answer, because)

    monkeypatch.setattr(steps, "step", closed_behind)
    if because is None:
        assert list(run) == []
    else:
        with pytest.raises(ConfigError, match="the service ended it"):
            next(run)
    assert run.stage == "ended"
    # Nothing was lost of what was decoded.
    assert run.session.tokens == PROMPT


def test_a_slide_takes_steps_of_its_own_and_may_be_closed(engine):
    def slid(session=None):
        run = engine.stream([*range(2, 60)], config(40), session=session, sliding=Sliding(sink_tokens=4))
        while run.slid is None:
            step(run)
        return run

    run = slid()
    while run.stage != "ended":
        step(run)
    assert len(run.tokens) == 40
    # What is closed in the middle forgets its cache, and goes on.
    session = Session()
    run = slid(session)
    before = list(run.sequence)
    run.close()
    assert (run.sequence, session.tokens, session.cache) == (before, [], None)
    again = engine.stream(before[:40], config(4), session=session).result()
    assert again.tokens == engine.generate(before[:40], config(4)).tokens


def test_an_interrupt_before_the_end_is_stored_leaves_it_to_be_stored(engine, monkeypatch):
    request, lifecycle = engine.request(PROMPT, config(20)), Noted()
    run = Answer(engine.decoding(request), engine.tokenizer, request, lifecycle=lifecycle)
    next(run)
    with monkeypatch.context() as patch:
        patch.setattr(lifecycle, "finish", Mock(side_effect=KeyboardInterrupt))
        patch.setattr(lifecycle, "failed", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            list(run)
    assert "finish" not in lifecycle.hooks
    run.close()
    del run
    assert lifecycle.hooks[-2:] == ["finish", "dropped"]
