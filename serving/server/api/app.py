"""Makes the ASGI app of the HTTP front: routes, guard, access log, and errors in each format.

The guard keeps out web pages and unknown callers: a browser on this machine can reach a loopback port from
any page. `Host` reveals a page whose name resolves to this machine (DNS rebinding), `Origin` a page of
another site. Neither can reach a Unix socket.
"""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.errors import ContextOverflow
from jaxllm.serving.server.api import anthropic, fields, ollama, openai, resources, responses, scores
from jaxllm.serving.server.api.errors import ApiError, api_error, error_response, overflowed, shape_of
from jaxllm.serving.server.api.openapi import docs_routes, hint
from jaxllm.serving.server.api.requests import (
    ApiRequest,
    ApiState,
    ClientLeft,
    json_response,
    parsed,
    read_raw,
    while_connected,
)
from jaxllm.serving.server.backend import Backend
from jaxllm.serving.server.identity import is_operator
from jaxllm.serving.server.logs import AccessLogged
from jaxllm.serving.server.sockets import HOST, OPEN_PATHS, GuardOptions, peer_of

# Gives a response, or the JSON values of a usual one.
Handler = Callable[[ApiState, ApiRequest], Coroutine[Any, Any, Any]]
Identify = Callable[[Scope], str]

_LEFT = 499
_PREFLIGHT = (
    (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
    (b"access-control-max-age", b"600"),
)
# Clients in pages send headers of their own, such as x-stainless-os.
_HEADER_NAMES = re.compile(r"[a-zA-Z0-9_-]{1,64}(?: ?, ?[a-zA-Z0-9_-]{1,64}){0,63}")
# Maximum bytes that are read of a refused request's body, and time for them.
_MOST_DROPPED_BYTES = 8 << 20
_DROP_S = 10.0
# Methods, paths, handlers, and types of bodies for the description; None for none, or any.
_ROUTES: tuple[tuple[str, str, Handler, type[msgspec.Struct] | None], ...] = (
    ("GET", "/health", resources.health, None),
    ("GET", "/ready", resources.ready, None),
    ("POST", "/v1/chat/completions", openai.chat, fields.ChatBody),
    ("POST", "/v1/chat/completions/input_tokens", openai.count_tokens, fields.ChatBody),
    ("POST", "/v1/completions", openai.completions, fields.CompletionBody),
    ("POST", "/v1/responses", responses.create, fields.ResponseBody),
    ("POST", "/v1/responses/input_tokens", responses.count_tokens, fields.ResponseBody),
    ("GET", "/v1/responses/{name}", responses.get, None),
    ("DELETE", "/v1/responses/{name}", responses.delete, None),
    ("POST", "/v1/responses/{name}/cancel", responses.cancel, None),
    ("GET", "/v1/responses/{name}/input_items", responses.input_items, None),
    ("POST", "/v1/embeddings", resources.embeddings, fields.EmbeddingBody),
    ("POST", "/v1/score", scores.score, scores.ScoreBody),
    ("GET", "/v1/models", resources.models, None),
    ("GET", "/v1/models/{name}", resources.models, None),
    ("GET", "/v1/adapters", resources.list_adapters, None),
    ("POST", "/v1/adapters", resources.load_adapter, resources.LoadBody),
    ("DELETE", "/v1/adapters/{name}", resources.unload_adapter, None),
    ("GET", "/v1/device", resources.get_device, None),
    ("POST", "/v1/device", resources.report_device, resources.DeviceBody),
    ("GET", "/v1/objective", resources.get_objective, None),
    ("POST", "/v1/objective", resources.bind_objective, resources.BindBody),
    ("DELETE", "/v1/objective", resources.unbind_objective, None),
    ("POST", "/v1/contexts", resources.create_context, resources.CreateBody),
    ("GET", "/v1/contexts", resources.list_contexts, None),
    ("GET", "/v1/contexts/{name}", resources.get_context, None),
    ("DELETE", "/v1/contexts/{name}", resources.delete_context, None),
    ("POST", "/v1/contexts/{name}/pin", resources.pin_context, resources.PinBody),
    ("POST", "/v1/contexts/{name}/generate", resources.generate_in_context, None),
    ("POST", "/v1/messages", anthropic.create, fields.MessagesBody),
    ("POST", "/v1/messages/count_tokens", anthropic.count_tokens, fields.CountBody),
    ("POST", "/api/chat", ollama.chat, fields.OllamaChatBody),
    ("POST", "/api/generate", ollama.generate, fields.GenerateBody),
    ("GET", "/api/tags", ollama.tags, None),
    ("POST", "/api/show", ollama.show, fields.ShowBody),
    ("GET", "/api/version", ollama.version, None),
    ("GET", "/api/ps", ollama.running, None),
    ("POST", "/api/embed", ollama.embed, fields.EmbedBody),
    ("POST", "/api/embeddings", ollama.embeddings, fields.EmbedBody),
    ("POST", "/api/pull", ollama.pull, fields.PullBody),
    ("POST", "/api/push", ollama.refuse, None),
    ("POST", "/api/create", ollama.refuse, None),
    ("POST", "/api/copy", ollama.refuse, None),
    ("DELETE", "/api/delete", ollama.refuse, None),
    ("POST", "/api/blobs/{name}", ollama.refuse, None),
    ("POST", "/tokenize", resources.tokenize, resources.TokenizeBody),
    ("POST", "/detokenize", resources.detokenize, resources.DetokenizeBody),
    ("POST", "/apply-template", resources.apply_template, resources.TokenizeBody),
    ("GET", "/props", resources.props, None),
)


def make_app(
    backend: Backend,
    *,
    identify: Identify,
    guard: GuardOptions | None = None,
    extra_routes: Sequence[BaseRoute] = (),
    on_request: Callable[[Mapping[str, Any]], None] = lambda record: None,
) -> Starlette:
    """Makes the ASGI app.

    Args:
      backend: backend of the answers.
      identify: returns the app of a connection by its scope; raises ApiError if it is unknown.
      guard: options of the guard; None for no guard.
      extra_routes: additional routes, with precedence.
      on_request: called with the record of each request (see `AccessLogged`).
    """
    state = ApiState(backend)
    by_path: dict[str, dict[str, Handler]] = {}
    for method, path, handler, _ in _ROUTES:
        by_path.setdefault(path, {})[method] = handler
    routes = []
    for path, handlers in by_path.items():
        who = (lambda scope: "") if path in OPEN_PATHS else identify
        routes.append(Route(path, _endpoint(state, handlers, who), methods=[*handlers]))
    middleware = [Middleware(AccessLogged, on_request)]
    if guard is not None:
        middleware.append(Middleware(Guard, identify, guard))
    app = Starlette(
        routes=[*extra_routes, *docs_routes(_ROUTES), *routes],
        middleware=middleware,
        exception_handlers={HTTPException: _unrouted},
    )
    app.state.api = state
    return app


def _endpoint(
    state: ApiState, handlers: dict[str, Handler], identify: Identify
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            app = identify(request.scope)
            raw = await read_raw(request, state.most_body_bytes(), state.body_s)
            api_request = ApiRequest(
                app=app, request_id=request.state.request_id,
                values=await parsed(raw, state.body_depth) if request.method == "POST" else {},
                path=request.path_params, slo=request.headers.get("x-slo", ""),
                query=request.query_params.multi_items(), operator=is_operator(request.scope),
            )  # fmt: skip
            handler = handlers["GET" if request.method == "HEAD" else request.method]
            answer = await while_connected(request.receive, handler(state, api_request))
            return answer if isinstance(answer, Response) else json_response(answer)
        except (ClientLeft, ClientDisconnect):
            return Response(status_code=_LEFT)
        except ContextOverflow as error:
            refusal = overflowed(error, state.backend.facts().window_tokens, request.url.path)
            return error_response(refusal, shape_of(request.url.path))
        except Exception as error:
            return error_response(api_error(error), shape_of(request.url.path))

    return endpoint


async def _unrouted(request: Request, error: Any) -> Response:
    known = [getattr(each, "path", "") for each in request.app.routes]
    allowed = (error.headers or {}).get("Allow", "other methods")
    texts = {
        404: f"there is no such path; {hint(request.url.path, known)}",
        405: f"this path does not support {request.method}, but {allowed}",
    }
    refusal = ApiError(texts.get(error.status_code, str(error.detail)), status=error.status_code)
    response = error_response(refusal, shape_of(request.url.path))
    response.headers.update(error.headers or {})
    return response


class Guard:
    """ASGI middleware that admits authorized callers and refuses others with the reason."""

    def __init__(self, app: ASGIApp, identify: Identify, options: GuardOptions | None = None) -> None:
        """Guards an app; `identify` returns the app of a request's scope, or raises ApiError."""
        self._app, self._identify, self._options = app, identify, options or GuardOptions()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        origin, problem = self._checked(scope)
        if problem is not None:
            await _refuse(scope, receive, send, ApiError(problem, status=403))
            return
        if origin:
            send = _with_cors(send, origin)
            if scope["method"] == "OPTIONS" and _header(scope, b"access-control-request-method"):
                # Browsers send preflights without a key.
                private = bool(_header(scope, b"access-control-request-private-network"))
                headers = [*_PREFLIGHT, *[(b"access-control-allow-private-network", b"true")] * private]
                asked = _header(scope, b"access-control-request-headers")
                names = [each.encode() for each in asked if _HEADER_NAMES.fullmatch(each)]
                headers += [(b"access-control-allow-headers", each) for each in names]
                await send({"type": "http.response.start", "status": 204, "headers": headers})
                await send({"type": "http.response.body", "body": b""})
                return
        if scope["path"] not in self._options.open_paths:
            try:
                self._identify(scope)
            except ApiError as error:
                await _refuse(scope, receive, send, error)
                return
        await self._app(scope, receive, send)

    def _checked(self, scope: Scope) -> tuple[str, str | None]:
        """The origin of an allowed page of another site, or empty; and the reason of a refusal."""
        peer = peer_of(scope)
        over_socket = peer is not None and peer.credentials is not None
        hosts = _header(scope, b"host")
        found = HOST.fullmatch(hosts[0].lower()) if len(hosts) == 1 else None
        if not over_socket and (found is None or found["name"] not in self._options.hosts):
            return "", "the Host header does not name this service; allow the name in the service's options"
        origins = _header(scope, b"origin")
        if not origins:
            return "", None
        origin = origins[0].lower()
        if len(origins) == 1 and self._options.allows(origin):
            return origin, None
        # Our own pages; there are none if the host was not checked.
        if len(origins) == 1 and not over_socket and origin == f"{scope.get('scheme')}://{hosts[0].lower()}":
            return "", None
        return "", (
            "pages of this Origin may not call; allow it in the service's options (origins), or pages of "
            "this machine (--localhost-pages)"
        )


async def _refuse(scope: Scope, receive: Receive, send: Send, error: ApiError) -> None:
    """Answers in the path's own format, after the request's body is read and discarded, within limits: with
    unread bytes the system resets the connection on close, and a client that still sends sees no answer."""
    # A client that waits for "continue" sends nothing until told to.
    waits = any(each.lower() == "100-continue" for each in _header(scope, b"expect"))
    left = 0 if waits else _MOST_DROPPED_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DROP_S):
            while left > 0:
                message = await receive()
                left = left - len(message.get("body", b"")) if message.get("more_body", False) else 0
    response = error_response(error, shape_of(scope["path"]))
    # The rest of the request's body must not be parsed as the next request.
    response.headers["connection"] = "close"
    await response(scope, receive, send)


def _with_cors(send: Send, origin: str) -> Send:
    """Wraps `send` so that a page of an origin may read the answer."""
    added = [
        (b"access-control-allow-origin", origin.encode()),
        (b"access-control-expose-headers", b"retry-after, x-request-id"),
        (b"vary", b"Origin"),
    ]

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *added]
        await send(message)

    return sending


def _header(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key == name]
