"""A small service for the client: the real front with a scripted backend, but for answers outside of
contexts, which are as prompts say, and are remembered."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from jaxllm.serving.server.api.app import make_app
from tests.serving.server.api.conftest import identify
from tests.serving.server.api.fake import FakeBackend

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
