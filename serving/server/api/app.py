"""Makes the ASGI app of the HTTP front: routes, request ids, and errors in each format."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.errors import JaxllmError
from jaxllm.serving.server.api import anthropic, ollama, openai, resources, responses
from jaxllm.serving.server.api.errors import ApiError, api_error, error_response, shape_of
from jaxllm.serving.server.api.requests import (
    ApiOptions,
    ApiRequest,
    ApiState,
    ClientLeft,
    read_raw,
    while_connected,
)
from jaxllm.serving.server.calls import Backend
from jaxllm.serving.server.logs import request_id_of

Handler = Callable[[ApiState, ApiRequest], Awaitable[Response]]
Identify = Callable[[Scope], str]
Operates = Callable[[Scope], bool]

_LEFT = 499
# Path -> handlers by method. Health and readiness need no identification.
_OPEN: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/health", resources.health),
    ("GET", "/ready", resources.ready),
)
_ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", openai.chat),
    ("POST", "/v1/completions", openai.completions),
    ("POST", "/v1/responses", responses.create),
    ("GET", "/v1/responses/{name}", responses.get),
    ("DELETE", "/v1/responses/{name}", responses.delete),
    ("POST", "/v1/responses/{name}/cancel", responses.cancel),
    ("GET", "/v1/responses/{name}/input_items", responses.input_items),
    ("POST", "/v1/embeddings", resources.embeddings),
    ("GET", "/v1/models", resources.models),
    ("GET", "/v1/models/{name}", resources.models),
    ("GET", "/v1/adapters", resources.list_adapters),
    ("POST", "/v1/adapters", resources.load_adapter),
    ("DELETE", "/v1/adapters/{name}", resources.unload_adapter),
    ("GET", "/v1/objective", resources.get_objective),
    ("POST", "/v1/objective", resources.bind_objective),
    ("DELETE", "/v1/objective", resources.unbind_objective),
    ("POST", "/v1/contexts", resources.create_context),
    ("GET", "/v1/contexts", resources.list_contexts),
    ("GET", "/v1/contexts/{name}", resources.get_context),
    ("DELETE", "/v1/contexts/{name}", resources.delete_context),
    ("POST", "/v1/contexts/{name}/pin", resources.pin_context),
    ("POST", "/v1/contexts/{name}/generate", resources.generate_in_context),
    ("POST", "/v1/messages", anthropic.create),
    ("POST", "/v1/messages/count_tokens", anthropic.count_tokens),
    ("POST", "/api/chat", ollama.chat),
    ("POST", "/api/generate", ollama.generate),
    ("GET", "/api/tags", ollama.tags),
    ("POST", "/api/show", ollama.show),
    ("GET", "/api/version", ollama.version),
    ("POST", "/tokenize", resources.tokenize),
    ("POST", "/detokenize", resources.detokenize),
    ("POST", "/apply-template", resources.apply_template),
    ("GET", "/props", resources.props),
)


def make_app(
    backend: Backend,
    *,
    identify: Identify,
    operates: Operates = lambda scope: False,
    options: ApiOptions | None = None,
    extra_routes: Sequence[BaseRoute] = (),
) -> Starlette:
    """Makes the ASGI app.

    Args:
      backend: backend of the answers.
      identify: returns the app of a connection by its scope; raises a JaxllmError if it is unknown, whose
        attribute `code`, if any, is sent.
      operates: whether an identified connection may change what all apps share.
      options: limits and defaults.
      extra_routes: additional routes, with precedence.
    """
    options = options or ApiOptions()
    state = ApiState(backend, options)
    routes = [Route(path, _open(state, handler), methods=[method]) for method, path, handler in _OPEN]
    by_path: dict[str, dict[str, Handler]] = {}
    for method, path, handler in _ROUTES:
        by_path.setdefault(path, {})[method] = handler
    for path, handlers in by_path.items():
        routes.append(Route(path, _endpoint(state, handlers, identify, operates), methods=[*handlers]))
    return Starlette(
        routes=[*extra_routes, *routes],
        middleware=[Middleware(RequestIds)],
        exception_handlers={HTTPException: _unrouted, Exception: _failed},
    )


class RequestIds:
    """Assigns every request an id, the client's or a new one, and returns it in a header; answers unhandled
    errors."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        # The access log may have assigned the id, and sends it back.
        named, begun = "request_id" in state, False
        request_id = state["request_id"] if named else request_id_of(scope)
        state["request_id"] = request_id

        async def sending(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                if not named:
                    message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except ClientDisconnect:
            pass
        except Exception as error:
            if begun:
                raise
            await error_response(api_error(error), shape_of(scope["path"]))(scope, receive, sending)


def _open(state: ApiState, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(state, ApiRequest(app="", request_id=request.state.request_id))

    return endpoint


def _endpoint(
    state: ApiState, handlers: dict[str, Handler], identify: Identify, operates: Operates
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            app = _identified(request.scope, identify)
            raw = await read_raw(request, state.options, state.body_bytes())
            visit = ApiRequest(
                app=app,
                request_id=request.state.request_id,
                raw=raw,
                path=request.path_params,
                slo=request.headers.get("x-slo", ""),
                query=request.query_params.multi_items(),
                operator=operates(request.scope),
            )
            handler = handlers["GET" if request.method == "HEAD" else request.method]
            return await while_connected(request, _run(handler, state, visit))
        except (ClientLeft, ClientDisconnect):
            return Response(status_code=_LEFT)
        except Exception as error:
            return error_response(api_error(error), shape_of(request.url.path))

    return endpoint


async def _run(handler: Handler, state: ApiState, visit: ApiRequest) -> Response:
    return await handler(state, visit)


def _identified(scope: Scope, identify: Identify) -> str:
    try:
        return identify(scope)
    except JaxllmError as error:
        raise ApiError(str(error), status=401, code=getattr(error, "code", "")) from error


async def _unrouted(request: Request, error: Any) -> Response:
    texts = {404: "there is no such path", 405: f"this path does not take {request.method}"}
    told = ApiError(texts.get(error.status_code, str(error.detail)), status=error.status_code)
    response = error_response(told, shape_of(request.url.path))
    response.headers.update(error.headers or {})
    return response


async def _failed(request: Request, error: Exception) -> Response:
    return error_response(api_error(error), shape_of(request.url.path))
