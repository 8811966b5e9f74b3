"""Limits of what apps take with contexts; a full disk, encrypted storage, floods."""

import concurrent.futures
import errno
import functools
import threading

import httpx

from jaxllm.serving.contexts import store as stores
from jaxllm.serving.server.limits import AppLimits, Limits
from tests.serving.server.talking import FOX, facts, idle, made, said, slowly, streamed


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
        assert answer.status_code == 200, answer.text
        # Chunks are written after an answer: the context's next call is told, and so of a client that leaves.
        told = said(http, name, "hi", 1)
        assert told.status_code == 507, told.text
        assert http.get(f"/v1/contexts/{name}").json()["tokens"] > before
        with slowly(monkeypatch), streamed(served.http("mail"), name) as lines:
            for _ in range(4):
                next(lines)
        idle(served)
        # Its chunks are written by a thread, while the disk is full.
        served.service.contexts.store.wait()
    late = said(http, name, "hi", 1)
    assert late.status_code == 507
    assert "could not be written" in late.text
    assert facts(http, name, "hi", 1)["prompt_tokens"] > before


def test_many_requests_for_contexts_are_bounded(served, monkeypatch):
    """An app that floods the engine with other work than answers is refused."""
    enter = threading.Event()
    held = served.executor.work("spy", lambda: enter.wait(20))
    try:
        with concurrent.futures.ThreadPoolExecutor(24) as pool:
            key = {"x-api-key": served.keys["mail"]}
            ask = functools.partial(httpx.get, f"{served.url}/v1/contexts", timeout=60, headers=key)
            asked = [pool.submit(ask) for _ in range(24)]
            done, _ = concurrent.futures.wait(asked, timeout=60, return_when="FIRST_COMPLETED")
            assert {each.result().status_code for each in done} == {429}
            enter.set()
            assert {each.result().status_code for each in asked} == {200, 429}
    finally:
        enter.set()
    assert held.result(20)
