"""A small service in place of a real one, for the client: answers by what prompts say, and remembers them."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

SEEN: list[tuple[str, Any]] = []
PLAN = {"level": 70, "kept_tokens": 4, "source": "tiny LM"}
CONTEXTS: dict[str, dict[str, Any]] = {}
GONE = threading.Event()


def error(status: int, code: str, message: str = "no", **headers: str) -> Response:
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return JSONResponse(body, status, headers)


async def answer(request: Request) -> Response:
    """Streams words; the prompt says what goes wrong."""
    body = await request.json()
    SEEN.append((request.url.path, body))
    prompt = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
    if prompt.startswith("status "):
        _, status, code = prompt.split()
        return error(int(status), code, **{"retry-after": "3"})
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


async def contexts(request: Request) -> Response:
    if request.method == "GET":
        return JSONResponse({"object": "list", "data": list(CONTEXTS.values())})
    body = await request.json()
    name = f"c{len(CONTEXTS)}"
    CONTEXTS[name] = {
        "id": name, "tokens": 0, "level": body.get("level", 100), "pinned": body["pinned"],
        "stored_bytes": 0, "object": "context", "created": 7, "adapter": body.get("adapter", ""),
    }  # fmt: skip
    return JSONResponse(CONTEXTS[name])


async def context(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in CONTEXTS:
        return error(404, "context_not_found")
    if request.method == "GET":
        return JSONResponse(CONTEXTS[name])
    if request.method == "DELETE":
        del CONTEXTS[name]
        return Response(status_code=204)
    if request.path_params["verb"] == "generate":
        return await answer(request)
    CONTEXTS[name]["pinned"] = (await request.json())["pinned"]
    return JSONResponse(CONTEXTS[name])


async def objective(request: Request) -> Response:
    SEEN.append(
        (f"{request.method} {request.url.path}", await request.json() if request.method == "POST" else None)
    )
    return JSONResponse({"slo": "<40,70>", "strict": True, "from": "app", "unmet_prompt_tokens": [8, 16]})


async def told(request: Request) -> Response:
    SEEN.append((request.url.path, dict(request.headers)))
    return JSONResponse({"object": "list", "data": [{"id": "default"}]})


APP = Starlette(
    routes=[
        Route("/v1/chat/completions", answer, methods=["POST"]),
        Route("/v1/completions", answer, methods=["POST"]),
        Route("/v1/contexts", contexts, methods=["GET", "POST"]),
        Route("/v1/contexts/{name}", context, methods=["GET", "DELETE"]),
        Route("/v1/contexts/{name}/{verb}", context, methods=["POST"]),
        Route("/v1/objective", objective, methods=["GET", "POST", "DELETE"]),
        Route("/v1/models", told),
    ]
)
