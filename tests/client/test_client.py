"""The client beside a small service: the real front with a scripted backend, but for answers outside of
contexts, which are as prompts say, and are remembered."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

import jaxllm
from jaxllm.client import AsyncClient, Busy, Client, Context, ServiceError
from jaxllm.errors import (
    BudgetExceeded,
    ConfigError,
    ContextGone,
    ContextOverflow,
    ObjectiveMissed,
    TemplateError,
)
from jaxllm.serving.server.api.app import make_app
from tests.serving.server.api.conftest import FakeBackend, identify
from tests.serving.server.services import running

SEEN: list[tuple[str, Any]] = []
PLAN = {"level": 70, "kept_tokens": 4, "source": "tiny LM"}
FRONT = FakeBackend("Grüße", " an alle")
GONE = threading.Event()


async def answer(request: Request) -> Response:
    """Streams words; the prompt says what goes wrong."""
    body = await request.json()
    SEEN.append((request.url.path, body))
    prompt = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
    if prompt.startswith("status "):
        _, status, code = prompt.split()
        told = {"message": "no", "type": "invalid_request_error", "param": None, "code": code}
        return JSONResponse({"error": told}, int(status), {"retry-after": "3"})
    chat = "messages" in body

    def event(text: str | None, **more: Any) -> bytes:
        part = {"delta": {"content": text} if text else {}} if chat else {"text": text or ""}
        choice = {"index": 0, **part, "finish_reason": more.pop("finish", None)}
        return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\r\n\r\n"

    async def stream() -> AsyncIterator[bytes]:
        yield b": hello\n\n" + event("", jaxllm={"plan": PLAN})
        whole = event("Grüße") + event(" an alle")
        # In pieces that respect neither events nor characters.
        for at in range(0, len(whole), 7):
            yield whole[at : at + 7]
        if prompt == "break off":
            return
        if prompt == "malformed":
            yield b"data: {\n\n"
        if prompt == "fail":
            yield b'data: {"error": {"message": "full", "code": "budget_exceeded"}}\n\n'
        if prompt == "for ever":
            try:
                while True:
                    yield event("x")
                    await asyncio.sleep(0.01)
            finally:
                GONE.set()
        facts = {"ttft_ms": 12.5, "tpot_ms": 2.0, "met": True, "reused_tokens": 3}
        yield event(None, finish="stop")
        usage = {"prompt_tokens": 5, "completion_tokens": 3}
        yield b"data: " + json.dumps({"choices": [], "usage": usage, "jaxllm": facts}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    return StreamingResponse(stream(), media_type="text/event-stream")


APP = Starlette(
    routes=[
        Route("/v1/chat/completions", answer, methods=["POST"]),
        Route("/v1/completions", answer, methods=["POST"]),
        Mount("/", make_app(FRONT, identify=identify)),
    ]
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = str(tmp_path_factory.mktemp("s") / "s")
    with running(APP, uds=path):
        yield path


@pytest.fixture
def client(path: str) -> Iterator[Client]:
    SEEN.clear()
    FRONT.kept.clear()
    with Client(socket=path) as client:
        yield client


def sent() -> dict[str, Any]:
    return SEEN[-1][1]


def test_a_call_streams_and_has_its_plan_and_cost(client: Client, path: str) -> None:
    answer = client.call("Hello?", instruction="Be kind.")
    pieces = list(answer)
    assert pieces == ["Grüße", " an alle"]
    assert (answer.text, answer.finish_reason, answer.met) == ("Grüße an alle", "stop", True)
    assert answer.facts["plan"] == {"level": 70, "kept_tokens": 4, "source": "tiny LM"}
    assert (answer.facts["ttft_ms"], answer.usage["completion_tokens"]) == (12.5, 3)
    assert list(answer) == []
    assert sent() == {
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello?"}],
        "max_tokens": 256, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0,
    }  # fmt: skip
    with Client(socket=path, api_key="k") as other:
        assert other.http.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert other.new_context().name
        assert client.contexts() == [], "another app's"


def test_objectives_are_bound_and_named(client: Client) -> None:
    assert client.bind("<40,70>", strict=True) == (8,)
    told = client.objective()
    assert (told["slo"], told["strict"], told["shorten"], told["from"]) == ("<40,70>", True, False, "app")
    client.unbind()
    assert client.objective()["slo"] is None
    # The service knows the app's.
    client.call("a").result()
    assert {"slo", "strict"} & sent().keys() == set()
    latency = jaxllm.Latency(ttft_ms=200, tpot_ms=50)
    for slo, wire in (
        (latency, {"ttft_ms": 200, "tpot_ms": 50}), (jaxllm.Slo(ttft=0.4, tpot=0.7), "<40,70>"),
        ({"ttft_ms": 1}, {"ttft_ms": 1}),
    ):  # fmt: skip
        client.complete("a", slo=slo, strict=False, seed=7).result()
        assert SEEN[-1][0] == "/v1/completions"
        assert (sent()["slo"], sent()["strict"], sent()["seed"]) == (wire, False, 7)


def test_what_cannot_be_shown_is_not_asked_for_and_names_stay_in_their_place(client: Client) -> None:
    for field in ("n", "tools", "stream", "logprobs"):
        with pytest.raises(ConfigError, match="another client"):
            client.call("a", **{field: 2})
    for name in ("x?y#z", "../../v1/models", "é"):
        with pytest.raises(ConfigError if "/" in name else ContextGone):
            Context(client, {"id": name}).delete()
    assert SEEN == []


def test_errors_are_those_of_one_process(client: Client) -> None:
    for status, code, kind in (
        (400, "invalid_request", ConfigError), (400, "context_length_exceeded", ContextOverflow),
        (400, "template_error", TemplateError), (404, "context_not_found", ContextGone),
        (404, "model_not_found", ConfigError), (422, "x", ObjectiveMissed),
        (507, "budget_exceeded", BudgetExceeded), (401, "invalid_api_key", ServiceError),
        (500, "internal_error", ServiceError), (409, "context_busy", Busy), (503, "loading", Busy),
    ):  # fmt: skip
        with pytest.raises(kind) as caught:
            client.call(f"status {status} {code}")
        assert type(caught.value) is kind
        if isinstance(caught.value, ServiceError):
            told = (caught.value.status, caught.value.code, caught.value.retry_after_s)
            assert told == (status, code, 3.0)


def test_an_error_in_the_middle_is_raised_after_the_text(client: Client) -> None:
    kinds = {"break off": ServiceError, "malformed": ServiceError, "fail": BudgetExceeded}
    for prompt, kind in kinds.items():
        answer = client.call(prompt)
        with pytest.raises(kind):
            answer.result()
        assert answer.text == "Grüße an alle"
        with pytest.raises(kind):
            next(answer)


def test_a_closed_answer_ends_in_the_service(client: Client) -> None:
    for closed in (True, False):
        GONE.clear()
        answer = client.call("for ever")
        assert next(answer) == "Grüße"
        if closed:
            answer.close()
        # Or it is forgotten.
        del answer
        assert GONE.wait(20)


def test_contexts(client: Client) -> None:
    context = client.new_context(level=70, pinned=True)
    assert (context.name, context.facts["level"], context.facts["pinned"]) == ("c0", 70, True)
    assert context.generate("And?", slo="<50,50>").result().text == "Grüße an alle"
    call = FRONT.calls[-1]
    assert (call.context, call.prompt, str(call.objective)) == ("c0", "And?", "<50,50>")
    context.pin(False)
    assert not client.context("c0").facts["pinned"]
    assert [each.name for each in client.contexts()] == ["c0"]
    context.delete()
    for ask in (context.delete, context.pin, lambda: context.generate("a"), lambda: client.context("c0")):
        with pytest.raises(ContextGone):
            ask()


def test_the_same_for_asyncio(path: str) -> None:
    async def talk() -> None:
        async with AsyncClient(socket=path) as client:
            assert await client.bind("<40,70>") == (8,)
            assert (await client.objective())["strict"] is False
            await client.unbind()
            answer = await client.call("a", adapter="formal")
            assert [piece async for piece in answer] == ["Grüße", " an alle"]
            assert sent()["adapter"] == "formal"
            assert answer.met is True
            both = await asyncio.gather(client.call("a"), client.complete("b"))
            assert [(await each.aresult()).text for each in both] == ["Grüße an alle"] * 2
            with pytest.raises(Busy):
                await client.chat([{"role": "user", "content": "status 429 BUSY"}])
            with pytest.raises(BudgetExceeded):
                await (await client.call("fail")).aresult()
            GONE.clear()
            endless = await client.call("for ever")
            assert await anext(endless) == "Grüße"
            await endless.aclose()
            assert await asyncio.to_thread(GONE.wait, 20)
            context = await client.new_context()
            assert (await (await context.generate("a")).aresult()).text == "Grüße an alle"
            await context.pin()
            assert (await client.context(context.name)).facts["pinned"]
            await context.delete()
            with pytest.raises(ContextGone):
                await client.context(context.name)

    SEEN.clear()
    asyncio.run(talk())


def test_importing_it_imports_nothing_heavy() -> None:
    heavy = {"jax", "numpy", "serving", "flax", "starlette"}
    script = f"import sys, jaxllm.client; print(*({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
