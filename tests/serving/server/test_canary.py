"""An engine that fails is tested by an answer of its own, and does not stay."""

import asyncio
import os
import types
from pathlib import Path

import httpx
import pytest

from jaxllm import EngineOptions
from jaxllm.errors import BundleError, CheckpointError, ConfigError, NotFinite
from jaxllm.serving.server import canary as canaries
from jaxllm.serving.server.api.app import make_app
from jaxllm.serving.server.backend import Backend
from jaxllm.serving.server.canary import Canary, EngineFailed, service_canary
from jaxllm.serving.server.limits import Limits
from jaxllm.serving.server.service import LLMService
from tests.serving.server.executors import make_executor
from tests.serving.server.talking import until
from tests.tiny import write_tiny_bundle


class Engine:
    """Counts what it is asked, at times that a test sets."""

    asked, now = 0, 0.0
    error: Exception | None = None

    def answer(self) -> None:
        self.asked += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def canary(engine: Engine) -> Canary:
    return Canary(engine.answer, clock=lambda: engine.now)


def test_calls_that_fail_have_the_engine_answer_once_each(engine: Engine, canary: Canary) -> None:
    for error in (BundleError("changed"), NotFinite("nan"), IndexError("of whatever")):
        canary.failed(error)
        assert canary.suspected
        canary.step()
        assert not canary.suspected
        canary.step()
    assert engine.asked == 3
    # Those are of the call, or of its context.
    for error in (ConfigError("wrong"), CheckpointError("a context")):
        canary.failed(error)
    canary.step()
    assert engine.asked == 3


def test_the_engine_answers_ids_not_a_text() -> None:
    """A tokenizer may have none for a text: that would end a service whose engine is well."""
    asked: list[object] = []
    own = types.SimpleNamespace(generate=lambda prompt, config: asked.append((prompt, config.max_tokens)))
    service, adapters = types.SimpleNamespace(engine=own), types.SimpleNamespace(use=asked.append)
    canary = service_canary(service, adapters)  # pyright: ignore[reportArgumentType]
    canary.failed(IndexError("of whatever"))
    canary.step()
    assert asked == ["", ((0,), 1)]


def test_an_engine_that_fails_three_times_in_a_row_is_given_up(engine: Engine, canary: Canary) -> None:
    engine.error = BundleError("it was changed in place")
    canary.failed(engine.error)
    # A call that got something proves nothing: others may not.
    canary.step()
    canary.answered()
    assert canary.suspected
    canary.step()
    assert engine.asked == 1, "not before some time has passed"
    engine.now = 2
    canary.step()
    engine.error = None
    engine.now = 4
    canary.step()
    assert not canary.suspected
    engine.error = BundleError("it was changed in place")
    canary.failed(engine.error)
    for now in (4, 6):
        engine.now = now
        canary.step()
    engine.now = 8
    with pytest.raises(EngineFailed, match="cannot answer any more: it was changed in place"):
        canary.step()


def test_readiness_asks_where_nobody_was_answered_for_a_while(engine: Engine, canary: Canary) -> None:
    canary.step(readiness=True)
    assert engine.asked == 0
    engine.now = 61
    for _ in range(3):
        canary.step(readiness=True)
    assert engine.asked == 1
    engine.now, engine.error = 122, OSError("of a device")
    for _ in range(3):
        canary.step(readiness=True)
    assert (engine.asked, canary.suspected) == (2, True)


def test_a_model_file_that_is_touched_ends_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its content may be another now: the process that comes next opens it again."""
    monkeypatch.setattr(canaries, "_PAUSE_S", 0.2)
    path = write_tiny_bundle(tmp_path / "tiny.jaxllm")
    # The shapes of the room's plain service.
    options = EngineOptions(
        context_tokens=128, cache_tokens=(64, 128), chunk_tokens=(16,), decode_block=4, buckets_bytes=0
    )
    service = LLMService.open(path, options=options)
    executor, backend = make_executor(service), Backend(Limits())
    executor.start()
    backend.opened(executor, "tiny")

    async def talk() -> None:
        transport = httpx.ASGITransport(app=make_app(backend, identify=lambda _: "mail"))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=300) as http:
            body = {"prompt": "hello", "max_tokens": 3}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            assert (await http.get("/ready")).status_code == 200
            os.utime(path, ns=(1, 1))
            failed = await http.post("/v1/completions", json=body)
            error = failed.json()["error"]
            assert (failed.status_code, error["code"]) == (503, "model_failed")
            assert "retry-after" in failed.headers
            assert "context" not in error["message"]
            assert str(path) not in failed.text
            assert (await http.get("/ready")).status_code == 503
            await asyncio.to_thread(until, lambda: not executor.alive)
            assert (await http.get("/health")).status_code == 503

    try:
        asyncio.run(talk())
    finally:
        executor.stop(0)
        backend.close()
        service.close()
    assert "cannot answer (3 of 3 times)" in caplog.text
    assert "changed in place" in caplog.text
