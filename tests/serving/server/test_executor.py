"""The engine's thread, with a tiny model: turns, errors, grammars, other work, a full queue, the end."""

import asyncio
import contextlib
import dataclasses
import re
import threading
import time

import numpy as np
import pytest

from jaxllm import EngineOptions
from jaxllm.errors import ConfigError, ContextOverflow, JaxllmError
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.elastic.objectives import Latency, expected_cost
from jaxllm.serving.elastic.planner import Load, Planner, Proposal
from jaxllm.serving.elastic.profile import DeviceProfile
from jaxllm.serving.guided.compiler import PreparedGrammar
from jaxllm.serving.guided.grammar import Grammar, Thought
from jaxllm.serving.guided.matcher import Matcher
from jaxllm.serving.server import executor as executors
from jaxllm.serving.server.calls import Conversation, Ended, Piece, Refused, Started
from jaxllm.serving.server.limits import AppLimits
from jaxllm.serving.server.opening import Adapters, live_turns
from jaxllm.serving.server.scheduler import SchedulerOptions
from jaxllm.serving.server.service import LLMService
from tests import tiny_encdec
from tests.serving.server.services import PROMPT, call, make_executor, read, slowly, together, written


@pytest.fixture
def dispatches():
    """What the executor has told of them."""
    return []


@pytest.fixture
def executor(plain_service, dispatches):
    made = make_executor(
        plain_service, SchedulerOptions(queued=4, app_queued=3), on_dispatch=dispatches.append
    )
    made.start()
    yield made
    made.stop(0)
    assert not made.alive


def test_an_answer_is_that_of_the_engine_alone_and_each_dispatch_is_told(executor, plain_service, dispatches):
    prompt = tuple(range(1, 41))
    events, other = together(executor, call(prompt), call())
    for asked, found in ((list(prompt), events), (PROMPT, other)):
        alone = plain_service.engine.stream(asked, call().config).result()
        assert written(found) == (alone.text, alone.tokens)
    assert isinstance(events[0], Started)
    assert (events[-1].tokens, events[-1].met) == (12, None)
    assert events[-1].engine_ttft_ms <= events[-1].ttft_ms
    dispatches.clear()
    together(executor, call(prompt, app="fresh"))
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


def test_a_prompts_progress_is_told(executor, monkeypatch):
    async def watched():
        events, told = (job := executor.submit(call(), asyncio.get_running_loop())).events(), []
        first = asyncio.ensure_future(anext(events))
        while not first.done():
            await asyncio.sleep(0.005)
            told += [] if job.progress in (None, *told[-1:]) else [job.progress]
        await events.aclose()
        return told, first.result().prompt_tokens

    with slowly(monkeypatch):
        told, count = asyncio.run(watched())
    assert {each["total"] for each in told} == {count}
    assert [each["processed"] for each in told if each["processed"]][:2] == [16, 32]


def test_an_objective_is_planned_and_judged(executor, plain_service, monkeypatch):
    easy, hard = Latency(ttft_ms=1e6, tpot_ms=1e6), Latency(ttft_ms=1e-3, tpot_ms=1e-3)
    met, missed = together(executor, call(objective=easy), call(objective=hard))
    assert (met[0].source, met[-1].met) == ("whole", True)
    assert (missed[0].source, missed[-1].met) == ("nearest", False)
    with pytest.raises(JaxllmError, match="no sub-model meets"):
        together(executor, call(objective=Latency(ttft_ms=1e-3, tpot_ms=1.0), strict=True))
    # The first token may be the first after the reasoning, which the reader tells of.
    for first_token, expected in (("answer", False), ("reasoning", True)):
        asked = call(objective=Latency(ttft_ms=1e5, tpot_ms=1e5), first_token=first_token)

        async def late(asked=asked):
            job, events = executor.submit(asked, asyncio.get_running_loop()), []
            async for event in job.events():
                events.append(event)
                if isinstance(event, Piece):
                    job.saw_answer(event.at_s + 200)
            return events

        *pieces, end = [each for each in asyncio.run(late()) if not isinstance(each, Started)]
        assert end.answer_ttft_ms == pytest.approx(end.ttft_ms + 2e5, rel=0.01)
        assert end.met is expected
        # The text that came with each token.
        assert [len(each.ends) for each in pieces] == [len(each.tokens) for each in pieces]
        assert all(list(each.ends) == sorted(each.ends) for each in pieces)
        shown = [each.ends[-1] - len(each.text) for each in pieces]
        assert shown[:-1] == [0] * (len(pieces) - 1)
    # A thought with a budget comes before it.
    thought = Thought(opening="<t>", closing="</t>", opened=True, most_tokens=8)
    grammar = Grammar(kind="free", thought=thought)

    async def planned(first_token, most):
        thinks = call(objective=easy, first_token=first_token, grammar=grammar, tokens=most)
        job = executor.submit(thinks, asyncio.get_running_loop())
        await read(job)
        return job.whole.thought_tokens, job.plan.expected.thought_tokens

    for first_token, most, expected in (("answer", 12, 8), ("answer", 4, 4), ("reasoning", 12, 0)):
        assert asyncio.run(planned(first_token, most)) == (expected, expected)
    # A call that insists is refused for now where others take its time.
    times = expected_cost(plain_service.profile, 100, len(plain_service.engine.tokenizer.encode(PROMPT)), 12)
    insists = call(objective=Latency(ttft_ms=20 * times.ttft_ms, tpot_ms=20 * times.tpot_ms), strict=True)
    assert together(executor, insists)[0][-1].tokens == 12
    monkeypatch.setattr(executors, "load_of", lambda *_: Load(waiting_ms=30 * times.ttft_ms))
    with pytest.raises(Refused, match="try again later") as caught:
        together(executor, insists)
    assert (caught.value.reason, caught.value.retry_after_s) == ("full", max(1.0, 0.03 * times.ttft_ms))


def test_an_apps_own_cache_is_used_again_and_no_others(executor, plain_service, monkeypatch):
    long = PROMPT + " and hides"
    together(executor, call(PROMPT))
    (other,) = together(executor, call(long, app="spy"))
    (own,) = together(executor, call(long))
    assert other[0].reused_tokens == 0
    assert own[0].reused_tokens > 16
    assert written(own) == written(other)
    # A plan knows what the caches of the app have.
    asked, plan = [], plain_service.planner.plan
    monkeypatch.setattr(
        plain_service.planner,
        "plan",
        lambda *args, **more: asked.append(more["reused"]) or plan(*args, **more),
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


def test_plans_drop_words_where_the_call_allows_it(executor, plain_service, monkeypatch):
    # A token takes a second, so that no time that passes here matters.
    slow = DeviceProfile(
        levels=(100,), tokens=(1, 1000), chunk_tokens=(1,), ttft_ms=((1e3, 1e6),), tpot_ms=((1.0, 1.0),)
    )
    monkeypatch.setattr(plain_service, "planner", Planner(slow, (100,), Half(), margin=1.0))
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
    ids = tuple(plain_service.engine.tokenizer.encode(user))
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


def test_a_full_queue_and_a_stopping_service_refuse(plain_service):
    async def run():
        loop = asyncio.get_running_loop()
        made = make_executor(plain_service, SchedulerOptions(queued=2, app_queued=1))
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


def test_no_call_waits_while_the_grammar_of_another_is_compiled(executor, plain_service, monkeypatch):
    """Of the grammars of an app one is compiled at a time; what is refused is told to its own call."""
    compiler, asked = plain_service.engine.grammars, []

    def prepare(grammar, stop_ids):
        asked.append((grammar.text, PreparedGrammar()))
        return asked[-1][1]

    slow, second, bad = (call(grammar=Grammar(kind="regex", text=each)) for each in ("a{3}", "b{3}", "c{3}"))
    bad = dataclasses.replace(bad, app="other")

    async def run():
        loop = asyncio.get_running_loop()
        with monkeypatch.context() as patch:
            patch.setattr(compiler, "prepare", prepare)
            tickets = [executor.submit(each, loop) for each in (slow, second, bad)]
            plain = await read(executor.submit(call(app="third"), loop))
            assert [text for text, _ in asked] == ["a{3}", "c{3}"]
            asked[1][1].set_exception(ConfigError("it is refused"))
            with pytest.raises(ConfigError, match="it is refused"):
                await read(tickets[2])
        stops = slow.config.stop_ids(plain_service.engine.tokenizer.eos_ids)
        asked[0][1].set_result(compiler.prepare(slow.config.grammar, stops).result())
        return plain, *(await asyncio.gather(*map(read, tickets[:2])))

    plain, *guided = asyncio.run(run())
    assert plain[-1].tokens == 12
    assert [written(each)[0] for each in guided] == ["aaa", "bbb"]


def test_no_call_waits_for_the_mask_of_another(executor, monkeypatch):
    asked, ended = [], []

    def ready(matcher):
        if matcher._asked_s is None:
            return True
        asked.append(matcher)
        return bool(ended)

    monkeypatch.setattr(Matcher, "ready", property(ready))

    async def run():
        loop = asyncio.get_running_loop()
        guided = executor.submit(call(grammar=Grammar(kind="regex", text="[ab][cd]"), app="other"), loop)
        while not asked:
            await asyncio.sleep(0.001)
        plain = await read(executor.submit(call(), loop))
        assert isinstance(plain[-1], Ended)
        ended.append(True)
        return await read(guided)

    assert re.fullmatch("[ab][cd]", written(asyncio.run(run()))[0])


def test_functions_of_an_app_are_bounded_and_a_long_one_has_a_turn_of_its_own(plain_service):
    executor, done = make_executor(plain_service), []
    futures = [executor.work("a", lambda: done.append(threading.get_ident())) for _ in range(15)]
    futures.append(executor.work("a", lambda: 1 / 0))
    with pytest.raises(Refused, match="16 requests"):
        executor.work("a", lambda: 1)
    assert futures[0].cancel()
    long = [executor.work(app, lambda: time.sleep(0.03)) for app in "bc"]
    # In place of its thread.
    executor._run_functions()
    assert [each.done() for each in (*futures, *long)] == [True] * 17 + [False]
    assert done == [threading.get_ident()] * 14
    with pytest.raises(ZeroDivisionError):
        futures[-1].result(0)
    executor.stop(0)
    executor.start()
    assert long[1].result(60) is None


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    path = tiny_encdec.write_bundle(folder / "t5.jaxllm", prefix="the ", tasks={"greeting": "hello "})
    options = EngineOptions(context_tokens=48, chunk_tokens=(16,), decode_block=4, buckets_bytes=0)
    contexts = ContextOptions(folder=folder / "contexts")
    with contextlib.closing(LLMService.open(path, options=options, contexts=contexts)) as made:
        yield made


@pytest.fixture(scope="module")
def encoder_decoder(t5):
    adapters = Adapters(t5.engine.model)
    turns = live_turns(t5, adapters, lambda app: AppLimits())
    made = make_executor(t5, adapters=adapters, contexts=turns)
    made.start()
    yield made
    made.stop(0)


def asked(*messages, tools=()):
    return Conversation(
        messages=tuple({"role": role, "content": text} for role, text in messages), tools=tools
    )


def test_sources_are_answered_in_turns(encoder_decoder, t5):
    sources = ["hello there, hello there", "hello\nyou", "hello"]
    prompts = [sources[0], asked(("system", "hello"), ("user", "you")), asked(("user", "hello"))]
    calls = [call(each) for each in prompts]
    # One with an objective, whose words might be dropped.
    calls[2] = dataclasses.replace(calls[2], objective=Latency(ttft_ms=1e6, tpot_ms=1e6), shorten=True)
    # The same again takes no cache of the first time.
    for _ in range(2):
        for source, events in zip(sources, together(encoder_decoder, *calls), strict=True):
            assert written(events)[1] == t5.engine.stream(source, call().config).result().tokens
    assert len(encoder_decoder.sessions) == 0


def test_calls_and_prompts_name_a_task(encoder_decoder, t5):
    plain = call("you")
    config = dataclasses.replace(plain.config, task="greeting")
    calls = [dataclasses.replace(call(each), config=config) for each in ("you", asked(("user", "you")))]
    wanted = t5.engine.stream("hello you", plain.config).result().tokens
    for events in together(encoder_decoder, *calls, dataclasses.replace(calls[1], shorten=True)):
        assert written(events)[1] == wanted
    farewell = dataclasses.replace(config, task="farewell")
    for wrong, what in (
        (dataclasses.replace(plain, config=farewell), "the model has no task 'farewell': there are greeting"),
        (call(asked(("user", "a"), ("assistant", "b"), ("user", "c"))), "no later turns"),
        (call(asked(("user", "a"), tools=({"name": "f"},))), "tools are not for encoder-decoders"),
        (call(asked(("user", " "))), "the source is empty"),
    ):
        with pytest.raises(ConfigError, match=what):
            together(encoder_decoder, wrong)


def test_contexts_go_on_with_what_the_decoder_says(t5, encoder_decoder):
    contexts = encoder_decoder.contexts
    name = contexts.create("mail").name

    def turn(prompt, **more):
        (events,) = together(encoder_decoder, call(prompt, context=name, **more))
        return [each for each in events if not isinstance(each, Piece)][-2:]

    first, ended = turn(asked(("user", "quick you")))
    source = t5.engine.tokenizer.encode("the quick you")
    assert (first.prompt_tokens, first.context_tokens) == (len(source), 0)
    assert t5.contexts.record("mail", name).source == tuple(source)
    said = t5.engine.tokenizer.encode("you", add_special_tokens=False)
    for prompt in ("you", asked(("assistant", "you"))):
        before = len(source) + ended.context_tokens
        second, ended = turn(prompt)
        assert (second.prompt_tokens, second.context_tokens) == (before + len(said), before)
        assert second.reused_tokens == before - len(source) - 1
    tokens = t5.contexts.record("mail", name).tokens
    request = t5.engine.request(tokens[: -ended.tokens], call().config, source=source)
    assert tuple(t5.engine.submit(request).result().tokens) == tokens[-ended.tokens :]
    with pytest.raises(ConfigError, match="has one source, its first turn's"):
        turn(asked(("user", "hello")))
    # From the beginning, and in the middle of what it said.
    for count, prompt in ((0, asked(("user", "you"))), (3, asked(("assistant", "you")))):
        _, fork = turn(prompt, context_tokens=count)
        record = t5.contexts.record("mail", fork.context)
        assert (fork.context != name, record.source == tuple(source)) == (True, count > 0)
