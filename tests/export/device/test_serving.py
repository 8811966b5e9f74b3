"""The one server over programs."""

import asyncio
import functools
import itertools
import json

import httpx
import pytest

from jaxllm.errors import ConfigError, ContextGone
from jaxllm.export.device.contexts import ProgramContexts
from jaxllm.export.device.opening import longest_cache_bytes, needed_bytes
from jaxllm.export.device.service import ProgramService
from jaxllm.export.device.serving import OpenedPrograms
from jaxllm.export.programs.runner import ProgramRunner
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.server.api.app import make_app
from jaxllm.serving.server.backend import Backend
from jaxllm.serving.server.calls import AdapterGone, Call, Ended, Piece, Refused, Started

CONFIG = GenerationConfig(max_tokens=6, ignore_eos=True)
STREAM = GenerationConfig(max_tokens=50, ignore_eos=True)


def started(service, **options):
    made = Backend()
    OpenedPrograms(service, queued=2, **options).start(made)
    return made


@pytest.fixture
def backend(engine, profile, tmp_path):
    contexts = ProgramContexts(engine, tmp_path / "contexts", budget_bytes=1 << 20)
    made = started(ProgramService(engine, profile, contexts=contexts))
    yield made
    made.executor.stop(0)
    made.close()
    contexts.close()


def in_loop(test):
    """Runs a test in an event loop."""

    @functools.wraps(test)
    def run(*args, **more):
        asyncio.run(test(*args, **more))

    return run


def call(prompt=(1, 2, 3), **more):
    return Call(**{"app": "app", "request_id": "one", "prompt": prompt, "config": CONFIG, **more})


async def events_of(ticket):
    return [each async for each in ticket.events()]


@in_loop
async def test_calls_at_once_are_told_from_start_to_end(engine, backend):
    tickets = [backend.submit(call((n, 2, 3), request_id=str(n))) for n in (5, 6)]
    for ticket, n in zip(tickets, (5, 6), strict=True):
        first, *pieces, last = await events_of(ticket)
        assert isinstance(first, Started)
        assert isinstance(last, Ended)
        assert (first.prompt_tokens, first.level, first.source) == (3, 100, "unplanned")
        assert all(isinstance(each, Piece) for each in pieces)
        tokens = [token for each in pieces for token in each.tokens]
        assert tokens == engine.generate([n, 2, 3], CONFIG).tokens
        assert (last.tokens, last.finish_reason, last.met) == (6, "length", None)


@in_loop
async def test_a_short_call_is_answered_beside_a_long_one_and_a_prefix_is_reused(backend):
    long = backend.submit(call(config=GenerationConfig(max_tokens=50, ignore_eos=True)))
    events = long.events()
    await anext(events)
    (first, *_, last) = await events_of(backend.submit(call((*range(1, 21),))))
    assert isinstance(last, Ended)
    assert long.run.stage != "ended"
    assert [each async for each in events][-1].tokens == 50
    again, *_ = await events_of(backend.submit(call((*range(1, 21),))))
    assert (first.reused_tokens, again.reused_tokens) == (0, 19)


@in_loop
async def test_a_stream_goes_on_between_the_chunks_of_a_long_prompt(engine, backend, monkeypatch):
    """Each chunk of a prompt is a dispatch of its own, and both answers are those of each alone."""
    prompt, ran, runner = [*range(1, 53)], [], engine.runner

    def fed(cache, tokens, at, chunk):
        ran.append(len(tokens))
        return ProgramRunner.prefill(runner, cache, tokens, at, chunk)

    def decoded(*arguments):
        ran.append("decode")
        return ProgramRunner.decode(runner, *arguments)

    wanted = [engine.generate(prompt, CONFIG).tokens, engine.generate([5, 2, 3], STREAM).tokens]
    monkeypatch.setattr(runner, "prefill", fed)
    monkeypatch.setattr(runner, "decode", decoded)
    monkeypatch.setattr(runner, "decode_limit", lambda pace, left: 1)
    stream = backend.submit(call((5, 2, 3), config=STREAM))
    events = stream.events()
    await anext(events)
    await anext(events)
    long = backend.submit(call(tuple(prompt), request_id="two"))
    found = [each for each in await events_of(long) if isinstance(each, Piece)]
    assert [token for each in found for token in each.tokens] == wanted[0]
    pieces = [each async for each in events if isinstance(each, Piece)]
    assert [token for each in pieces for token in each.tokens] == wanted[1][
        -sum(len(each.tokens) for each in pieces) :
    ]
    chunks = [place for place, each in enumerate(ran) if each != "decode"][1:]
    assert [ran[each] for each in chunks] == [16, 16, 16, 4]
    assert any("decode" in ran[first:last] for first, last in itertools.pairwise(chunks))


@in_loop
async def test_a_full_queue_refuses(backend):
    tickets = []

    def ask_for_ten():
        tickets.extend(backend.submit(call(request_id=str(number))) for number in range(10))

    with pytest.raises(Refused, match="2 calls wait"):
        ask_for_ten()
    for each in tickets:
        each.cancel()


@in_loop
async def test_a_cancelled_call_ends_and_the_next_is_answered(backend):
    ticket = backend.submit(call(config=GenerationConfig(max_tokens=50, ignore_eos=True)))
    async for _ in ticket.events():
        ticket.cancel()
    assert isinstance((await events_of(backend.submit(call())))[-1], Ended)


@in_loop
async def test_turns_in_a_context(engine, backend):
    made = await backend.contexts("app", lambda each: each.create("app"))
    for prompt in ((1,) * 17, (4, 5)):
        last = (await events_of(backend.submit(call(prompt, context=made.name))))[-1]
        assert last.context == made.name
    (listed,) = await backend.list_contexts("app")
    assert listed.tokens == last.context_tokens == 17 + 6 + 2 + 6
    assert listed.stored_bytes > 0
    assert (await backend.contexts("app", lambda each: each.pin("app", made.name, True))).pinned
    with pytest.raises(ContextGone):
        await events_of(backend.submit(call(context=made.name, app="other")))
    with pytest.raises(ConfigError, match="not forked"):
        await events_of(backend.submit(call(context=made.name, context_tokens=3)))
    await backend.delete_context("app", made.name)
    assert await backend.list_contexts("app") == []


@in_loop
async def test_what_programs_do_not_have(backend):
    with pytest.raises(ConfigError, match="embed no texts"):
        await backend.embed("app", [[1]])
    with pytest.raises(AdapterGone):
        backend.submit(call(adapter="brief"))


@in_loop
async def test_the_wire_formats_of_the_live_service(backend):
    app = make_app(backend, identify=lambda scope: "app")
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        body = {"prompt": "the hello", "max_tokens": 4, "temperature": 0}
        whole = (await client.post("/v1/completions", json=body)).json()
        assert whole["usage"]["completion_tokens"] <= 4
        planned = (await client.post("/v1/completions", json={**body, "slo": "<90,90>"})).json()
        assert planned["jaxllm"]["level"] in (40, 100)
        assert planned["jaxllm"]["met"] in (True, False)
        streamed = await client.post("/v1/completions", json={**body, "stream": True})
        parts = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
        text = "".join(json.loads(each)["choices"][0]["text"] for each in parts)
        assert text == whole["choices"][0]["text"]
        bound = await client.post("/v1/objective", json={"slo": {"ttft_ms": 1e6, "tpot_ms": 1e6}})
        assert bound.status_code == 200
        assert (await client.get("/health")).json() == {"status": "ok"}
        models = (await client.get("/v1/models")).json()["data"]
        assert [each["jaxllm"]["levels"] for each in models] == [[40, 100]]


def test_a_stopped_service_accepts_no_calls(engine, profile):
    backend = started(ProgramService(engine, profile))
    backend.draining()
    backend.executor.stop(0)

    async def submitted():
        with pytest.raises(Refused):
            backend.submit(call())

    asyncio.run(submitted())
    assert backend.health()["why"] == "draining"


def test_memory_bounds_the_answers_that_run(engine, profile):
    need = needed_bytes(engine.model.executor.manifest)
    spare = longest_cache_bytes(engine.model.executor.manifest)
    for limit, running in ((need, 1), (need + spare, 2), (need + 100 * spare, 4), (0, 4)):
        assert OpenedPrograms(ProgramService(engine, profile), limit)._scheduler().running == running
