"""Limits of what apps take with contexts; a full disk, storage that fails for a while, floods."""

import concurrent.futures
import errno
import functools
import threading

import httpx
import pytest

from jaxllm.serving.contexts import store as stores
from jaxllm.serving.server.limits import AppLimits, Limits
from tests.faults import FailingDevice
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


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOSPC, errno.EIO])
def test_a_context_that_cannot_be_read_for_a_moment_is_not_gone(served, http, error):
    """There, gone, or not known: none is forgotten for an error."""
    name, other = made(http), made(http)
    before = facts(http, name, FOX, 20)["context_tokens"]
    store = served.service.contexts.store
    store.wait()
    with FailingDevice(store.root, at=None) as device:
        device.fail(error)
        answers = [
            *(said(http, each, [5], 1) for each in (name, other, name, other)),
            http.post(f"/v1/contexts/{other}/pin", json={"pinned": True}),
            http.delete(f"/v1/contexts/{other}"),
        ]
        # One that was never made is gone all the same.
        assert said(http, "0" * 16, [5], 1).status_code == 404
    codes = [(each.status_code, each.json()["error"]["code"]) for each in answers if each.status_code != 200]
    # The catalog is open: some calls need no further file.
    assert len(codes) >= 3
    assert set(codes) <= {(500, "storage_failed"), (503, "storage_failed"), (507, "budget_exceeded")}
    assert all("retry-after" in each.headers for each in answers if each.status_code == 503)
    # An error of writing in the background is told once.
    said(http, name, [5], 1)
    assert facts(http, name, [5], 1)["context_tokens"] >= before
    assert http.get(f"/v1/contexts/{name}").status_code == 200
    served.restart()
    assert facts(http, name, [5], 1)["context_tokens"] >= before
