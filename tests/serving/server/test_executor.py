"""The engine's thread, with a tiny model: turns, cancels, errors, other work, a full queue, the end."""

import asyncio
import dataclasses
import re
import threading
import time

import numpy as np
import pytest

from jaxllm import GenerationConfig
from jaxllm.errors import ConfigError, ContextOverflow, JaxllmError
from jaxllm.serving.elastic.objectives import Latency, expected_cost
from jaxllm.serving.elastic.planner import Load, Planner, Proposal
from jaxllm.serving.elastic.profile import DeviceProfile
from jaxllm.serving.engine.step import step
from jaxllm.serving.guided.grammar import Grammar
from jaxllm.serving.server import executor as executors
from jaxllm.serving.server.calls import Call, Conversation, Ended, Piece, Refused, Started
from jaxllm.serving.server.executor import EngineWork
from jaxllm.serving.server.scheduler import SchedulerOptions
from tests.serving.server.executors import make_executor

PROMPT = "the quick brown fox jumps over the lazy dog"


@pytest.fixture
def service(plain_service):
    return plain_service


@pytest.fixture
def dispatches():
    """What the executor has told of them."""
    return []


@pytest.fixture
def executor(service, dispatches):
    made = make_executor(service, SchedulerOptions(queued=4, app_queued=3), on_dispatch=dispatches.append)
    made.start()
    yield made
    made.stop(0)
    assert not made.alive


def call(prompt=PROMPT, *, app="mail", tokens=12, grammar=None, top_logprobs=None, **more):
    config = GenerationConfig(max_tokens=tokens, ignore_eos=True, grammar=grammar, top_logprobs=top_logprobs)
    return Call(app=app, request_id="1", prompt=prompt, config=config, **more)


async def read(ticket):
    return [event async for event in ticket.events()]


def written(events):
    """Text and tokens of an answer."""
    pieces = [each for each in events if isinstance(each, Piece)]
    return "".join(each.text for each in pieces), [token for each in pieces for token in each.tokens]


def together(executor, *calls):
    async def run():
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(read(executor.submit(each, loop)) for each in calls))

    return asyncio.run(run())


def test_answers_in_turns_are_those_of_the_engine_alone(executor, service):
    prompts = [PROMPT, "hello the there", "a"]
    for prompt, events in zip(prompts, together(executor, *map(call, prompts)), strict=True):
        alone = service.engine.stream(prompt, call().config).result()
        assert isinstance(events[0], Started)
        assert isinstance(events[-1], Ended)
        assert written(events) == (alone.text, alone.tokens)
        assert (events[-1].tokens, events[-1].met) == (12, None)
        assert events[-1].engine_ttft_ms <= events[-1].ttft_ms


def test_each_dispatch_is_told(executor, dispatches):
    prompt = tuple(range(1, 41))
    together(executor, call(prompt))
    executor.stop(60)
    told = [(each.kind, each.rows, each.tokens, each.chunk_tokens, each.mode) for each in dispatches]
    chunk = ("prefill", 1, 0, 16, "float")
    # The last chunk of a prompt gives the first token.
    assert told[:3] == [chunk, chunk, ("prefill", 1, 1, 16, "float")]
    assert told[-1] == ("finish", 1, 0, 0, "")
    decoded = told[3:-1]
    assert {each[0] for each in decoded} == {"decode"}
    assert sum(each[2] for each in decoded) == 11
    assert all(each.took_ms > 0 for each in dispatches)


def test_an_answer_matches_its_grammar_and_tells_log_probabilities(executor):
    grammar = Grammar(kind="regex", text="[a-c]{5}")
    guided, plain = together(executor, call(grammar=grammar, top_logprobs=2), call())
    pieces = [each for each in guided if isinstance(each, Piece)]
    assert re.fullmatch("[a-c]{5}", written(guided)[0])
    assert guided[-1].finish_reason == "stop"
    told = [each for piece in pieces for each in piece.logprobs or ()]
    assert [each.token for each in told] == [token for piece in pieces for token in piece.tokens]
    assert all(each.logprob <= 0 and len(each.top) == 2 for each in told)
    assert all(each.logprobs is None for each in plain if isinstance(each, Piece))
    with pytest.raises(ConfigError, match="regex"):
        together(executor, call(grammar=Grammar(kind="regex", text="(")))


def test_an_objective_is_planned_and_judged(executor, service, monkeypatch):
    easy, hard = Latency(ttft_ms=1e6, tpot_ms=1e6), Latency(ttft_ms=1e-3, tpot_ms=1e-3)
    met, missed = together(executor, call(objective=easy), call(objective=hard))
    assert (met[0].source, met[-1].met) == ("whole", True)
    assert (missed[0].source, missed[-1].met) == ("nearest", False)
    with pytest.raises(JaxllmError, match="no sub-model meets"):
        together(executor, call(objective=Latency(ttft_ms=1e-3, tpot_ms=1.0), strict=True))
    # A call that insists is refused for now where others take its time.
    times = expected_cost(service.profile, 100, len(service.engine.tokenizer.encode(PROMPT)), 12)
    insists = call(objective=Latency(ttft_ms=20 * times.ttft_ms, tpot_ms=20 * times.tpot_ms), strict=True)
    assert together(executor, insists)[0][-1].tokens == 12
    monkeypatch.setattr(executors, "load_of", lambda *_: Load(waiting_ms=30 * times.ttft_ms))
    with pytest.raises(Refused, match="try again later") as caught:
        together(executor, insists)
    assert (caught.value.reason, caught.value.retry_after_s) == ("full", max(1.0, 0.03 * times.ttft_ms))


def test_an_apps_own_cache_is_used_again_and_no_others(executor, service, monkeypatch):
    long = PROMPT + " and hides"
    together(executor, call(PROMPT))
    (other,) = together(executor, call(long, app="spy"))
    (own,) = together(executor, call(long))
    assert other[0].reused_tokens == 0
    assert own[0].reused_tokens > 16
    assert written(own) == written(other)
    # A plan knows what the caches of the app have.
    asked, plan = [], service.planner.plan
    monkeypatch.setattr(
        service.planner, "plan", lambda *args, **more: asked.append(more["reused"]) or plan(*args, **more)
    )
    fresh = call(PROMPT + " of the deep wood", app="fresh", objective=Latency(ttft_ms=1e6, tpot_ms=1e6))
    together(executor, fresh)
    (again,) = together(executor, dataclasses.replace(fresh, prompt=fresh.prompt + " and hides"))
    assert asked == [{}, {100: again[0].reused_tokens}]


class Half:
    """Proposes the half of a prompt; later words matter more."""

    prompt_ratios = (0.5, 1.0)

    def propose(self, prompt, slo, allowed):
        return Proposal(level=100, prompt_ratio=0.5, scores=self.scores(prompt))

    def scores(self, prompt):
        return np.linspace(0, 1, len(prompt.ids))

    def planning_ms(self, tokens):
        return 0.0


def test_plans_drop_words_where_the_call_allows_it(executor, service, monkeypatch):
    # A token takes a second, so that no time that passes here matters.
    slow = DeviceProfile(
        levels=(100,), tokens=(1, 1000), chunk_tokens=(1,), ttft_ms=((1e3, 1e6),), tpot_ms=((1.0, 1.0),)
    )
    monkeypatch.setattr(service, "planner", Planner(slow, (100,), Half(), margin=1.0))
    user, objective = f"{PROMPT}. And then", Latency(ttft_ms=25e3, tpot_ms=1e6)
    for prompt in (user, Conversation(messages=({"role": "user", "content": user},))):
        kept, allowed = (
            # Apps whose caches have nothing of it.
            together(executor, call(prompt, app=f"{type(prompt)} {each}", objective=objective, shorten=each))[
                0
            ]
            for each in (None, True)
        )
        assert (kept[0].source, kept[0].kept_tokens) == ("nearest", kept[0].prompt_tokens)
        assert (allowed[0].source, allowed[0].prompt_tokens) == ("proposed", kept[0].prompt_tokens)
        assert 0 < allowed[0].kept_tokens < kept[0].kept_tokens
    # Ids have no words, whatever an app is bound to.
    ids = tuple(service.engine.tokenizer.encode(user))
    (whole,) = together(executor, call(ids, objective=objective, shorten=True))
    assert whole[0].kept_tokens == len(ids)


def test_conversations_that_share_an_instruction_reuse_it_each(executor, compiles):
    shared = "the quick brown fox jumps over the lazy dog and "
    # With more behind it than an answer that is encoded otherwise when it comes back.
    first, second = shared + "hello to all of you", shared + "a cat that sleeps"
    fresh = [together(executor, call(each, app=f"app {each[-5:]}"))[0] for each in (first, second)]
    with compiles() as count:
        seen = [together(executor, call(each))[0] for each in (first, second)]
        # Neither took what the other goes on with.
        again = [together(executor, call(each))[0] for each in (first, second)]
    assert count() == 0
    texts = [written(events) for events in (*fresh, *seen, *again)]
    assert texts[2:4] == texts[4:] == texts[:2]
    assert [events[0].reused_tokens for events in fresh] == [0, 0]
    assert seen[1][0].reused_tokens > 16
    for events in again:
        assert events[0].reused_tokens == events[0].prompt_tokens - 1


def test_a_cancel_ends_one_answer_and_no_other(executor):
    async def run():
        loop = asyncio.get_running_loop()
        first, other = (executor.submit(call(tokens=80), loop) for _ in range(2))
        async for event in first.events():
            if isinstance(event, Piece):
                first.cancel()
        first.cancel()
        return await read(other)

    assert asyncio.run(run())[-1].tokens == 80


def test_an_error_in_the_middle_ends_that_answer_alone(executor, dispatches, monkeypatch, caplog):
    real, count = executors.step, [0]

    def failing(run):
        count[0] += 1
        if count[0] == 2:
            run.stage = "ended"
            raise RuntimeError("secret path")
        return real(run)

    monkeypatch.setattr(executors, "step", failing)
    with pytest.raises(JaxllmError, match="RuntimeError") as caught:
        together(executor, call())
    assert "secret" not in str(caught.value)
    assert len(dispatches) == 1
    (record,) = caplog.records
    assert (record.request_id, record.app) == ("1", "mail")
    assert together(executor, call())[0][-1].tokens == 12


def test_what_cannot_be_answered_is_refused_at_once(executor):
    said = Conversation(messages=({"role": "user", "content": PROMPT},))
    tasks = [
        dataclasses.replace(each, config=dataclasses.replace(each.config, task="summarize"))
        for each in (call(said), call(said, shorten=True), call(shorten=True))
    ]
    wrongs = (call(""), call((99_999,)), call(context="c"), *tasks)
    for wrong, error in ((call("x" * 500), ContextOverflow), *((each, ConfigError) for each in wrongs)):
        with pytest.raises(error):
            together(executor, wrong)


def test_a_full_queue_and_a_stopping_service_refuse(service):
    async def run():
        loop = asyncio.get_running_loop()
        made = make_executor(service, SchedulerOptions(queued=2, app_queued=1))
        tickets = [made.submit(call(app="a"), loop), made.submit(call(app="b"), loop)]
        with pytest.raises(Refused) as caught:
            made.submit(call(app="c"), loop)
        assert caught.value.reason == "full"
        assert caught.value.retry_after_s is not None
        made.start()
        # What was taken is answered.
        await asyncio.to_thread(made.stop, 60)
        with pytest.raises(Refused) as caught:
            made.submit(call(), loop)
        assert caught.value.reason == "draining"
        return [await read(each) for each in tickets]

    assert all(isinstance(events[-1], Ended) for events in asyncio.run(run()))


def test_a_call_that_comes_just_before_a_dispatch_waits_for_the_next(service):
    async def run():
        made, loop, late = make_executor(service), asyncio.get_running_loop(), []

        def come():
            # In the engine's thread, after it has accepted calls; a foreground call goes first.
            late.append(made.submit(call(), loop))

        first = made.submit(call(priority="background"), loop)
        done = made.work("mail", come)
        made.start()
        await asyncio.wrap_future(done)
        events = [await read(each) for each in (first, *late)]
        await asyncio.to_thread(made.stop, 60)
        return events

    assert all(isinstance(each[-1], Ended) for each in asyncio.run(run()))


def test_the_deadline_of_a_stop_ends_what_runs(service, monkeypatch):
    def slow(run):
        time.sleep(0.05)
        step(run)

    # Else the answer may have ended before the service is told to stop.
    monkeypatch.setattr(executors, "step", slow)

    async def run():
        made = make_executor(service)
        ticket = made.submit(call(tokens=80), asyncio.get_running_loop())
        made.start()
        await asyncio.to_thread(made.stop, 0)
        await read(ticket)

    with pytest.raises(Refused, match="middle"):
        asyncio.run(run())


def failing():
    raise ConfigError("no")


def test_functions_run_in_order_and_tell_their_errors_and_long_ones_alone():
    work, done = EngineWork(), []
    first = work.add("a", lambda: done.append(1) or threading.get_ident())
    second = work.add("b", failing)
    left = work.add("b", lambda: done.append(3))
    assert left.cancel()
    while len(work):
        took_ms = work.run()
        assert set(took_ms) <= {"a", "b"}
    assert first.result(0) == threading.get_ident()
    with pytest.raises(ConfigError, match="no"):
        second.result(0)
    assert done == [1]
    # One that takes long is the only one of its turn.
    for app in ("a", "b"):
        work.add(app, lambda: time.sleep(0.03))
    assert [*work.run()] == ["a"]
    assert [*work.run()] == ["b"]
    assert work.run() == {}


def test_an_app_has_a_bounded_number_waiting():
    work = EngineWork()
    futures = [work.add("a", lambda: 1) for _ in range(16)]
    with pytest.raises(Refused, match="16 requests"):
        work.add("a", lambda: 1)
    futures.append(work.add("b", lambda: 1))
    work.fail(Refused("stopping", reason="draining"))
    for each in futures:
        with pytest.raises(Refused, match="stopping"):
            each.result(0)
    assert not len(work)
