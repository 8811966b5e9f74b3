"""Contexts over HTTP: turns, forks, pins, limits, restarts, cancels, a full disk."""

import concurrent.futures
import contextlib
import errno
import json
import threading
import time

import httpx
import pytest

from jaxllm.client import Busy
from jaxllm.errors import BudgetExceeded, ConfigError, ContextGone
from jaxllm.sampling import Sampling
from serving.contexts import store as stores
from serving.request import GenerationConfig
from serving.server import executor as executors
from serving.server.limits import AppLimits, Limits
from tests.serving.server.context_service import WHOLE, WINDOW
from tests.tiny import END_ID

GREEDY = Sampling(logit_bias=((END_ID, -100.0),))
FOX = "the quick brown fox"


@pytest.fixture
def served(context_service):
    yield context_service
    context_service.backend.limiter.limits = Limits()
    with contextlib.suppress(ContextGone):
        for each in context_service.client("mail").contexts():
            each.delete()


@pytest.fixture
def http(served):
    return served.http("mail")


def made(http, **options):
    answer = http.post("/v1/contexts", json=options)
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def said(http, name, prompt, tokens=8, **more):
    """The answer to a text, token ids or messages in a context."""
    field = "messages" if isinstance(prompt, list) and isinstance(prompt[0], dict) else "prompt"
    body = {field: prompt, "max_tokens": tokens, **WHOLE, **more}
    return http.post(f"/v1/contexts/{name}/generate", json=body)


def facts(http, name, prompt, tokens=8, **more):
    answer = said(http, name, prompt, tokens, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()["jaxllm"]


def user(text):
    return {"role": "user", "content": text}


@contextlib.contextmanager
def slowly(monkeypatch):
    """Steps take a while, so that answers run while others come."""
    real = executors.step

    def step(run):
        time.sleep(0.05)
        return real(run)

    with monkeypatch.context() as patch:
        patch.setattr(executors, "step", step)
        yield


def idle(served):
    """Waits until the engine has noticed that a client has left."""
    late_s = time.monotonic() + 30
    while served.executor.queue().work:
        assert time.monotonic() < late_s
        time.sleep(0.01)


def test_the_papers_calls(served):
    client = served.client("mail")
    context = client.new_context()
    first = context.generate(FOX, max_tokens=8, sampling=GREEDY).result()
    second = context.generate("and the dog?", max_tokens=8, sampling=GREEDY).result()
    assert (first.facts["source"], first.facts["context"]) == ("context", context.name)
    assert second.facts["reused_tokens"] >= first.facts["context_tokens"] - 1
    # The same tokens as if all of it were asked at once.
    tokenizer = served.service.engine.tokenizer
    contexts = served.service.contexts
    tokens = list(contexts.store.record(context.name).tokens)
    answer = served.service.engine.stream(tokens[:-8], GenerationConfig(max_tokens=8, sampling=GREEDY))
    assert answer.result().text == second.text
    assert tokenizer.decode(tokens).startswith(FOX)
    (there,) = client.contexts()
    assert (there.name, there.facts.tokens) == (context.name, len(tokens))
    context.pin()
    assert client.context(context.name).facts.pinned
    context.delete()
    assert client.contexts() == []
    with pytest.raises(ContextGone):
        context.generate("again").result()
    with pytest.raises(ContextGone):
        context.delete()


def test_turns_by_every_format(http):
    name = made(http)
    system = {"role": "system", "content": "Be short."}
    begun = facts(http, name, [system, user("hello")])
    ids = facts(http, name, [5, 6, 7])
    assert ids["prompt_tokens"] == begun["context_tokens"] + 3
    chat = {"model": "tiny", "messages": [user("and?")], "max_tokens": 4, "conversation": {"id": name}}
    answer = http.post("/v1/chat/completions", json=chat | WHOLE).json()
    assert answer["usage"]["prompt_tokens"] > ids["context_tokens"]
    results = [{"role": "tool", "tool_call_id": "1", "content": "rain"}, user("so?")]
    assert said(http, name, results, 2).status_code == 200
    assert http.get(f"/v1/contexts/{name}").json()["tokens"] == facts(http, name, [1], 1)["prompt_tokens"] - 1


def test_what_is_no_turn_is_refused_and_changes_nothing(http):
    name = made(http)
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    facts(http, name, [user("hello")])
    before = http.get(f"/v1/contexts/{name}").json()
    for wrong, more in (
        ([{"role": "system", "content": "Be long."}, user("hello")], {}),
        ([user("a"), user("b")], {}),
        ([user("a"), {"role": "assistant", "content": "b"}], {}),
        ([user("hello")], {"tools": [tool]}),
        ([user("hello")], {"slo": {"joules": 2}}),
        ([user("x" * 4 * WINDOW)], {}),
        ([70_000], {}),
        ("  ", {}),
    ):
        answer = said(http, name, wrong, **more)
        assert answer.status_code == 400, answer.text
    assert "earlier turns" in said(http, name, [user("a"), user("b")]).json()["error"]["message"]
    assert http.get(f"/v1/contexts/{name}").json() == before


def test_a_context_has_its_level_and_objectives_are_judged(http):
    assert http.post("/v1/contexts", json={"level": 70}).status_code == 400
    name = made(http, level=50)
    told = facts(http, name, FOX, slo={"ttft_ms": 1e6, "tpot_ms": 1e6})
    assert (told["level"], told["source"], told["met"]) == (50, "context", True)
    assert facts(http, name, FOX, slo={"ttft_ms": 1e-3, "tpot_ms": 1e-3})["met"] is False
    refused = said(http, name, FOX, slo={"ttft_ms": 1e-3, "tpot_ms": 1e-3}, strict=True)
    assert refused.status_code == 422
    assert "level 50" in refused.text


def test_answers_in_contexts_are_decoded_together_with_others(served, http):
    one, other = made(http), made(http)
    alone = [said(http, one, FOX, 40).json()["choices"][0]["text"]]
    body = {"prompt": FOX, "max_tokens": 40, **WHOLE}
    alone.append(http.post("/v1/completions", json=body).json()["choices"][0]["text"])
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        asked = [
            pool.submit(said, http, other, FOX, 40),
            *(pool.submit(http.post, "/v1/completions", json=body) for _ in range(2)),
        ]
        texts = [each.result().json()["choices"][0]["text"] for each in asked]
    assert texts == [alone[0], alone[1], alone[1]]
    # Contexts have their own caches, and no prefix of other calls.
    assert served.executor.contexts.figures()["mail"]["contexts"] == 2


def test_a_fork_leaves_the_context_as_it_is(served, http):
    name = made(http)
    first = facts(http, name, FOX, 20)["context_tokens"]
    second = said(http, name, "and the dog?").json()
    before = http.get(f"/v1/contexts/{name}").json()
    fork = forked(served, name, first, "and the dog?")
    assert fork[0].context_tokens == first
    assert fork[0].reused_tokens >= 16
    assert fork[-1].context not in ("", name)
    assert fork[-1].context_tokens == second["jaxllm"]["context_tokens"]
    assert http.get(f"/v1/contexts/{name}").json() == before
    # The fork goes on as a context of its own.
    assert facts(http, fork[-1].context, "so?")["prompt_tokens"] > fork[-1].context_tokens
    for tokens in (-1, before["tokens"] + 1):
        with pytest.raises(ConfigError, match="tokens, and the call continues"):
            forked(served, name, tokens, "so?")
    assert forked(served, name, 0, "so?")[0].reused_tokens == 0
    served.backend.limiter.limits = Limits(default=AppLimits(contexts=3))
    with pytest.raises(BudgetExceeded, match="3 contexts of at most 3"):
        forked(served, name, first, "so?")
    assert len(http.get("/v1/contexts").json()["data"]) == 3


def forked(served, name, tokens, prompt):
    """The events of a call that forks a context."""
    import asyncio

    from serving.server.calls import Call

    config = GenerationConfig(max_tokens=8, ignore_eos=True)
    call = Call(app="mail", request_id="1", prompt=prompt, config=config, context=name, context_tokens=tokens)

    async def run():
        ticket = served.executor.submit(call, asyncio.get_running_loop())
        return [event async for event in ticket.events()]

    return asyncio.run(run())


def test_one_call_at_a_time_in_a_context(served, http, monkeypatch):
    name, other = made(http), made(http)
    with slowly(monkeypatch), streamed(http, name) as lines:
        next(lines)
        busy = said(http, name, "hi")
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "context_busy")
        assert http.delete(f"/v1/contexts/{name}").status_code == 409
        with pytest.raises(Busy):
            served.client("mail").context(name).delete()
        # Others wait for their turn; a pin need not.
        assert http.post(f"/v1/contexts/{name}/pin", json={}).json()["pinned"]
        assert facts(http, other, FOX, 2)["source"] == "context"
        assert [*lines][-2].startswith("data: [DONE]")
    assert http.get(f"/v1/contexts/{name}").json()["pinned"]
    assert facts(http, name, "hi")["reused_tokens"] > 16


@contextlib.contextmanager
def streamed(http, name, tokens=40):
    body = {"prompt": FOX, "max_tokens": tokens, "stream": True, **WHOLE}
    with http.stream("POST", f"/v1/contexts/{name}/generate", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        yield answer.iter_lines()


def test_a_cancel_keeps_the_tokens_that_are_complete(served, http, monkeypatch):
    name = made(http)
    with slowly(monkeypatch):
        with streamed(served.http("mail"), name, 80) as lines:
            text = "".join(
                json.loads(next(line for line in lines if line)[6:])["choices"][0]["text"] for _ in range(2)
            )
        idle(served)
    tokens = served.service.contexts.store.record(name).tokens
    assert text in served.service.engine.tokenizer.decode(tokens)
    assert len(tokens) < 80
    assert facts(http, name, "and?", 2)["prompt_tokens"] > len(tokens)


def test_a_restart_finds_the_contexts(served, http, monkeypatch):
    name = made(http, pinned=True)
    before = facts(http, name, FOX, 30)
    with slowly(monkeypatch), streamed(served.http("mail"), name, 60) as lines:
        next(lines)
        # What runs is ended, and its tokens are kept.
        served.restart()
        assert "draining" in "".join(lines)
    there = http.get(f"/v1/contexts/{name}").json()
    assert there["pinned"]
    assert there["tokens"] > before["context_tokens"]
    assert facts(http, name, [1])["reused_tokens"] >= there["tokens"] // 16 * 16
    assert http.delete(f"/v1/contexts/{name}").json()["deleted"]
    served.restart()
    assert http.get(f"/v1/contexts/{name}").status_code == 404


def test_limits_of_an_app(served, http):
    served.backend.limiter.limits = Limits(default=AppLimits(contexts=2, pinned=1, tokens_per_minute=300))
    name = made(http, pinned=True)
    assert http.post("/v1/contexts", json={"pinned": True}).status_code == 507
    other = made(http)
    assert http.post("/v1/contexts", json={}).status_code == 507
    assert http.post(f"/v1/contexts/{other}/pin", json={}).status_code == 507
    assert http.post(f"/v1/contexts/{name}/pin", json={"pinned": False}).json()["pinned"] is False
    assert http.post(f"/v1/contexts/{other}/pin", json={}).status_code == 200
    # A turn counts its own tokens, not the context's again.
    for _ in range(4):
        facts(http, name, "hello", 8)
    assert served.backend.limiter.usage("mail").tokens > 200
    served.backend.limiter.limits = Limits(default=AppLimits(stored_bytes=1))
    full = said(http, name, "hi")
    assert full.status_code == 507
    assert "delete some" in full.text
    # Another app has its own.
    spy = served.http("spy")
    gone = made(spy)
    assert spy.delete(f"/v1/contexts/{gone}").status_code == 200


def test_a_full_disk_answers_507_and_the_service_lives(served, http, monkeypatch):
    name = made(http)
    before = facts(http, name, FOX, 20)["context_tokens"]

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(stores, "write_segment", full)
        answer = said(http, name, FOX, 20)
        assert answer.status_code == 507, answer.text
        assert http.get(f"/v1/contexts/{name}").json()["tokens"] == before
        # A client that leaves is told by the context's next call.
        with slowly(monkeypatch), streamed(served.http("mail"), name) as lines:
            for _ in range(4):
                next(lines)
        idle(served)
    late = said(http, name, "hi", 1)
    assert late.status_code == 507
    assert "could not be kept" in late.text
    assert facts(http, name, "hi", 1)["prompt_tokens"] > before


def test_encrypted_contexts(served, http, tmp_path):
    before = served.service.contexts.options.folder
    served.restart(folder=tmp_path / "sealed", encryption=tmp_path / "keys")
    try:
        name = made(http)
        facts(http, name, [9] * 40, 8)
        assert list((tmp_path / "keys").iterdir())
        served.restart()
        assert facts(http, name, [1])["reused_tokens"] >= 32
    finally:
        served.restart(folder=before, encryption=None)


def test_many_requests_for_contexts_are_bounded(served, monkeypatch):
    """An app that floods the engine with other work than answers is refused."""
    enter = threading.Event()
    held = served.executor.work("spy", lambda: enter.wait(20))
    try:
        with concurrent.futures.ThreadPoolExecutor(24) as pool:
            asked = [
                pool.submit(
                    httpx.get, f"{served.url}/v1/contexts", timeout=60,
                    headers={"x-api-key": served.keys["mail"]},
                )
                for _ in range(24)
            ]  # fmt: skip
            done, _ = concurrent.futures.wait(asked, timeout=60, return_when="FIRST_COMPLETED")
            assert {each.result().status_code for each in done} == {429}
            enter.set()
            assert {each.result().status_code for each in asked} == {200, 429}
    finally:
        enter.set()
    assert held.result(20)
