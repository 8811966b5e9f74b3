"""The one server over programs."""

import asyncio
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import pytest

from jaxllm.errors import ConfigError, ContextGone
from jaxllm.export.device.contexts import ProgramContexts
from jaxllm.export.device.opening import longest_cache_bytes, needed_bytes
from jaxllm.export.device.service import ProgramService
from jaxllm.export.device.serving import OpenedPrograms, device_options
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.server.api.app import make_app
from jaxllm.serving.server.backend import Backend
from jaxllm.serving.server.calls import AdapterGone, Call, Ended, Piece, Started
from tests.export.device.conftest import FOLDER_VARIABLE

CONFIG = GenerationConfig(max_tokens=6, ignore_eos=True)


@pytest.fixture
def backend(engine, profile, tmp_path):
    contexts = ProgramContexts(engine, tmp_path / "contexts", budget_bytes=1 << 20)
    made = Backend()
    OpenedPrograms(ProgramService(engine, profile, contexts=contexts)).start(made)
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
async def test_calls_at_once_are_reported_from_start_to_end(engine, backend):
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
async def test_the_wire_formats_of_the_live_service_and_what_programs_do_not_have(backend):
    with pytest.raises(ConfigError, match="neither embed nor score"):
        await backend.embed("app", [[1]])
    with pytest.raises(AdapterGone):
        backend.submit(call(adapter="brief"))
    app = make_app(backend, identify=lambda scope: "app")
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        body = {"prompt": "the hello", "max_tokens": 4, "temperature": 0}
        whole = (await client.post("/v1/completions", json=body)).json()
        assert whole["usage"]["completion_tokens"] <= 4
        planned = (await client.post("/v1/completions", json={**body, "slo": "<90,90>"})).json()
        assert planned["jaxllm"]["level"] in (40, 100)
        schema = {"enum": ["red", "green"]}
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "temperature": 0}
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "color", "schema": schema}}
        (choice,) = (await client.post("/v1/chat/completions", json=chat)).json()["choices"]
        assert json.loads(choice["message"]["content"]) in schema["enum"]
        models = (await client.get("/v1/models")).json()["data"]
        assert [each["jaxllm"]["levels"] for each in models] == [[40, 100]]


def test_memory_bounds_the_answers_that_run(engine, profile):
    need = needed_bytes(engine.model.executor.manifest)
    spare = longest_cache_bytes(engine.model.executor.manifest)
    for limit, running in ((need, 1), (need + spare, 2), (need + 100 * spare, 4), (0, 4)):
        assert OpenedPrograms(ProgramService(engine, profile), limit)._scheduler().running == running


def test_options_are_those_that_programs_have(tmp_path):
    path = tmp_path / "service.toml"
    assert device_options().batch_rows == ()
    path.write_text("[limits.apps.mail]\nforeground_only = true")
    assert device_options(path).limits.of("mail").foreground_only
    for text in ("memory = 1", "[scheduler]\nqueued = 1", "contexts = 'c'", "context_keys = 'k'"):
        path.write_text(text)
        with pytest.raises(
            ConfigError, match=f"exported programs have no option {text.split()[0].strip('[]')[:9]}"
        ):
            device_options(path)


@pytest.mark.skipif(FOLDER_VARIABLE not in os.environ, reason="runs on a device (make test-device)")
def test_its_loop_serves_over_a_socket(folder, tmp_path):
    (tmp_path / "service.toml").write_text(
        f"[limits]\nforeground_only = true\n[apps]\n'uid:{os.getuid()}' = 'mail'"
    )
    # Names of sockets are short.
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "s"
        command = [
            sys.executable, "-P", str(folder), "serve", "--socket", str(path), "--config", "service.toml",
        ]  # fmt: skip
        device = subprocess.Popen(command, cwd=tmp_path, env={"JAXLLM_CACHE": str(tmp_path / "cache")})
        transport = httpx.HTTPTransport(uds=str(path))
        try:
            with httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as client:
                late_s = time.monotonic() + 120
                while not path.exists() or client.get("/ready").status_code != 200:
                    assert device.poll() is None
                    assert time.monotonic() < late_s
                    time.sleep(0.05)
                body = {"prompt": "the", "max_tokens": 20, "guided_json": {"enum": ["red", "green"]}}
                refused = client.post("/v1/completions", json=body)
                assert refused.json()["error"]["code"] == "BACKGROUND_USE_BLOCKED"
                assert client.post("/v1/device", json={"foreground": ["mail"]}).status_code == 200
                (choice,) = client.post("/v1/completions", json=body).json()["choices"]
                assert json.loads(choice["text"]) in ("red", "green")
        finally:
            device.terminate()
        assert device.wait(60) == 0
