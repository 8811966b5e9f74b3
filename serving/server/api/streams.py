"""Sends answers as they come, and ends the work of clients that leave: while it waits, and while it streams."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")
DONE = b"data: [DONE]\n\n"


class ClientLeft(Exception):
    """The client closed its connection; nobody reads an answer."""


def event_frame(data: Any, event: str = "") -> bytes:
    """A server-sent event."""
    named = f"event: {event}\n".encode() if event else b""
    return named + b"data: " + msgspec.json.encode(data) + b"\n\n"


def line_frame(data: Any) -> bytes:
    """A line of newline-delimited JSON."""
    return msgspec.json.encode(data) + b"\n"


def json_response(data: Any, status: int = 200) -> Response:
    """A whole answer."""
    return Response(msgspec.json.encode(data), status_code=status, media_type="application/json")


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled where the client leaves first; the body must have been read.

    Raises:
      ClientLeft: it did.
    """
    task, left = asyncio.ensure_future(work), asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        await _ended(task, left)


class Streamed(Response):
    """An answer in parts. `frames` is closed however the connection ends."""

    def __init__(self, frames: AsyncGenerator[bytes, None], media_type: str, write_s: float) -> None:
        self._frames, self._write_s = frames, write_s
        self.status_code, self.background = 200, None
        self.media_type = media_type
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        sending, left = asyncio.ensure_future(self._send(send)), asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((sending, left), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _ended(sending, left)
            await self._frames.aclose()
        if sending.done() and not sending.cancelled() and (error := sending.exception()) is not None:
            if not isinstance(error, TimeoutError | OSError):
                raise error

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await asyncio.wait_for(send(start), self._write_s)
        async for frame in self._frames:
            part = {"type": "http.response.body", "body": frame, "more_body": True}
            # A client that reads nothing for so long is let go; a part at a time is all that waits for it.
            await asyncio.wait_for(send(part), self._write_s)
        await asyncio.wait_for(send({"type": "http.response.body", "body": b""}), self._write_s)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
