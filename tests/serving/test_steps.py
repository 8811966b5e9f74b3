"""Answers step by step: closed by another thread, in the middle of a slide, and interrupted."""

import pytest

from jaxllm import Engine
from jaxllm.errors import ConfigError
from jaxllm.serving.engine import answer as answers
from jaxllm.serving.engine.request import GenerationConfig, Session
from jaxllm.serving.engine.run import Lifecycle, Run
from jaxllm.serving.engine.step import close, step
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.sliding import Sliding
from tests.tiny import write_tiny_bundle

PROMPT = [1, 50, 7, 99, 23]
OPTIONS = EngineOptions(
    context_tokens=64, cache_tokens=(64,), chunk_tokens=(16,), decode_block=4, buckets_bytes=0
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return Engine.open(write_tiny_bundle(tmp_path_factory.mktemp("steps") / "tiny.jaxllm"), options=OPTIONS)


def config(tokens):
    return GenerationConfig(max_tokens=tokens, ignore_eos=True)


class Noted(Lifecycle):
    """Writes down which hooks were called."""

    def __init__(self):
        self.hooks = []

    def finish(self, run):
        self.hooks.append("finish")

    def failed(self, run):
        self.hooks.append("failed")

    def dropped(self, run):
        self.hooks.append("dropped")


def noted(engine):
    request = engine.request(PROMPT, config(20))
    lifecycle = Noted()
    return answers.Answer(engine.decoding(request), engine.tokenizer, request, lifecycle=lifecycle), lifecycle


def test_each_stage_takes_its_steps(engine):
    run, stages = engine.stream([1] * 40, config(2)), []
    while run.stage != "ended":
        stages.append(run.stage)
        assert step(run) is run
    # Three chunks of 16 tokens: the first is fed as the run begins.
    assert stages == ["begin", "prefill", "prefill", "decode", "finish"]
    assert len(run.tokens) == 2


def test_the_run_that_waited_longest_takes_the_step(engine):
    runs = [engine.stream(PROMPT, config(8)) for _ in range(2)]
    order = [runs.index(step(*runs)) for _ in range(4)]
    assert order == [0, 1, 0, 1]


@pytest.mark.parametrize("because", [None, ConfigError("the service ended it")])
def test_another_thread_may_close_an_answer_whenever_it_comes(engine, monkeypatch, because):
    run = engine.stream(PROMPT, config(20))

    def closed_behind(answer: Run):
        step(answer)
        close(answer, because)

    monkeypatch.setattr(answers, "step", closed_behind)
    if because is None:
        assert list(run) == []
    else:
        with pytest.raises(ConfigError, match="the service ended it"):
            next(run)
    assert run.stage == "ended"
    # Nothing was lost of what was decoded.
    assert run.session.tokens == PROMPT


def test_what_is_closed_while_it_slides_forgets_its_cache_and_goes_on(engine):
    session = Session()
    run = engine.stream([*range(2, 60)], config(40), session=session, sliding=Sliding(sink_tokens=4))
    while run.slid is None:
        step(run)
    before = list(run.sequence)
    run.close()
    assert (run.sequence, session.tokens, session.cache) == (before, [], None)
    again = engine.stream(before[:40], config(4), session=session).result()
    assert again.tokens == engine.generate(before[:40], config(4)).tokens


def test_each_step_of_a_slide_is_one_of_its_own(engine):
    run = engine.stream([*range(2, 60)], config(40), sliding=Sliding(sink_tokens=4))
    sliding = 0
    while run.stage != "ended":
        step(run)
        sliding += run.slid is not None
    assert sliding > 0
    assert len(run.tokens) == 40


def test_an_interrupt_before_the_end_is_stored_leaves_it_to_be_stored(engine, monkeypatch):
    run, lifecycle = noted(engine)
    next(run)

    def interrupted(run):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lifecycle, "finish", interrupted)
        patch.setattr(lifecycle, "failed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(run)
    assert lifecycle.hooks == []
    run.close()
    del run
    assert lifecycle.hooks == ["finish", "dropped"]


def test_an_error_ends_an_answer_once(engine, monkeypatch):
    run, lifecycle = noted(engine)

    def broken(*args, **kwargs):
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine.runner, "prefill", broken)
    with pytest.raises(RuntimeError, match="device lost"):
        next(run)
    assert list(run) == []
    assert set(lifecycle.hooks) == {"failed"}
