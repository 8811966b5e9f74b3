"""Routes for who runs the service: `/metrics`, the dashboard at `/` with its files, and its events.

The pages hold no data, so anyone may load them; metrics and events name all apps and their times, so `allow`
decides who may read them.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from serving.server.calls import Refused
from serving.server.feed import Feed
from serving.server.guard import error_body
from serving.server.metrics import CONTENT_TYPE, Metrics

_FOLDER = Path(__file__).parent / "dashboard"
# Path -> file and its type.
_FILES = {
    "/": ("index.html", "text/html"),
    "/dashboard/style.css": ("style.css", "text/css"),
    "/dashboard/main.js": ("main.js", "text/javascript"),
    "/dashboard/panels.js": ("panels.js", "text/javascript"),
    "/dashboard/draw.js": ("draw.js", "text/javascript"),
    "/dashboard/stream.js": ("stream.js", "text/javascript"),
    "/dashboard/chat.js": ("chat.js", "text/javascript"),
    "/dashboard/icon.svg": ("icon.svg", "image/svg+xml"),
}
# Paths of pages, which hold no data.
PAGES = frozenset(_FILES)
# Scripts, styles and requests of this origin alone; nothing inline, no frames, no forms that are sent.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_NOT_OPERATOR = (
    "metrics and the dashboard's events tell of all apps, and are for operators: send a key made with "
    "`jaxllm keys add NAME --operator`, or call over the Unix socket as root or as the service's user"
)
Allow = Callable[[Request], Response | None]


def allow_all(request: Request) -> Response | None:
    """Lets everyone read who reaches the service."""
    del request


def allow_operators(operates: Callable[[Scope], bool]) -> Allow:
    """Lets operators read.

    Args:
      operates: `serving.server.identity.Identity.operates`; callers are identified by now.
    """

    def allow(request: Request) -> Response | None:
        if operates(request.scope):
            return None
        body = error_body(_NOT_OPERATOR, kind="permission_error", code="not_operator")
        return JSONResponse(body, 403, {"Cache-Control": "no-store"})

    return allow


def watch_routes(metrics: Metrics, feed: Feed, *, allow: Allow = allow_all) -> list[Route]:
    """The routes.

    Args:
      metrics: of the service.
      feed: of its events.
      allow: returns None for requests that may read metrics and events, else the response that refuses them.
    """

    def page(name: str, kind: str) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            del request
            return FileResponse(_FOLDER / name, media_type=kind, headers=_HEADERS)

        return answer

    def read_metrics(request: Request) -> Response:
        return allow(request) or Response(metrics.text(), media_type=CONTENT_TYPE)

    def read_events(request: Request) -> Response:
        return allow(request) or EventStream(feed)

    return [
        *(Route(path, page(*file), methods=["GET"]) for path, file in _FILES.items()),
        Route("/metrics", _in_loop(read_metrics), methods=["GET"]),
        Route("/dashboard/events", _in_loop(read_events), methods=["GET"]),
    ]


def _in_loop(answer: Callable[[Request], Response]) -> Callable:
    """An endpoint that runs in the event loop, where backends are asked, and not in a thread."""

    async def endpoint(request: Request) -> Response:
        return answer(request)

    return endpoint


class EventStream(Response):
    """Sends a feed's events until its client leaves, or is dropped because it does not read.

    Starlette's own stream waits as long as a client keeps its connection and does not read.
    """

    def __init__(self, feed: Feed) -> None:
        super().__init__(headers=_HEADERS | {"Cache-Control": "no-store"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs as an ASGI application."""
        try:
            with self._feed.reader() as reader:
                await send(
                    {"type": "http.response.start", "status": 200, "headers": self.raw_headers},
                )
                await _first(_send_all(reader.events(), send), _left(receive), reader.dropped)
        except Refused as error:
            refusal = JSONResponse({"error": {"message": str(error), "type": error.reason}}, 503)
            await refusal(scope, receive, send)


async def _send_all(events, send: Send) -> None:
    async for each in events:
        await send({"type": "http.response.body", "body": each, "more_body": True})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first(*waiting) -> None:
    """Waits until one of some awaitables has ended, and cancels the others.

    Raises:
      Exception: what the ended one raised.
    """
    futures = [asyncio.ensure_future(each) for each in waiting]
    try:
        done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
    finally:
        for each in futures:
            each.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
