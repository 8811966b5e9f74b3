"""Defines the shared parts of all wire formats' handlers: options, requests and bodies, state, responses.

Bodies are limited in bytes, time and depth. Responses are sent in parts, and the work of
clients that disconnect is cancelled, whether they wait or read.
"""

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jaxllm.serving.contexts.encryption import Vault
from jaxllm.serving.images.prompt import IMAGES, split_images
from jaxllm.serving.server.api.background import Background
from jaxllm.serving.server.api.dialect import Body, Dialect
from jaxllm.serving.server.api.errors import ApiError
from jaxllm.serving.server.api.seals import Seals
from jaxllm.serving.server.api.stored_responses import ResponseStore
from jaxllm.serving.server.backend import Backend
from jaxllm.serving.server.calls import Conversation, ModelFacts, Refused
from jaxllm.version import __version__

_LARGE_BYTES = 1 << 16
# Names the served model, so that apps need not know it.
DEFAULT_MODEL = "default"


async def read_raw(request: Request, most: int, within_s: float) -> bytes:
    """Reads a request's body of at most `most` bytes. Raises ApiError if the body is too large (413), or
    slower than `within_s` seconds (408)."""
    too_long = ApiError(f"the body has more than {most} bytes; send less", status=413)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 18 or int(length) > most):
        raise too_long
    raw = bytearray()
    try:
        async with asyncio.timeout(within_s):
            async for part in request.stream():
                raw += part
                if len(raw) > most:
                    raise too_long
    except TimeoutError:
        raise ApiError(f"the body did not arrive within {within_s:g} s; send it faster", status=408) from None
    return bytes(raw)


async def parsed(raw: bytes, depth: int) -> dict[str, Any]:
    """A body as a JSON object, empty for no body; a large one is parsed in a thread, so that other answers go
    on meanwhile. Raises ApiError if it is no JSON object, or nests more than `depth` deep."""
    if not raw:
        return {}
    return await asyncio.to_thread(_object, raw, depth) if len(raw) > _LARGE_BYTES else _object(raw, depth)


def _object(raw: bytes, depth: int) -> dict[str, Any]:
    too_deep, values = False, None
    try:
        values = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ApiError(f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from None
    except RecursionError:
        too_deep = True
    if too_deep or _depth_exceeds(values, depth):
        raise ApiError(f"the body nests lists and objects more than {depth} deep", code="invalid_json")
    if not isinstance(values, dict):
        raise ApiError(f"the body must be a JSON object, got {type(values).__name__}", code="invalid_json")
    return values


def _depth_exceeds(value: Any, most: int) -> bool:
    layer = [value]
    for _ in range(most + 1):
        layer = [each for each in layer if isinstance(each, dict | list)]
        if not layer:
            return False
        layer = [each for outer in layer for each in (outer.values() if isinstance(outer, dict) else outer)]
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """An identified request with its complete body.

    Attributes:
      app: app of the request.
      request_id: the client's id, or a new one.
      values: the body; empty for none.
      path: values in the path.
      slo: the header X-SLO; empty for none.
      query: names and values of the query.
      operator: whether the caller may change what all apps share.
    """

    app: str
    request_id: str
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    path: Mapping[str, str] = dataclasses.field(default_factory=dict)
    slo: str = ""
    query: Sequence[tuple[str, str]] = ()
    operator: bool = False

    def call_id(self) -> str:
        """A new call id, which contains the request's id and is unique whatever the client sent."""
        return f"{self.request_id}.{uuid.uuid4().hex[:12]}"


def require_operator(request: ApiRequest, what: str) -> None:
    """Raises ApiError if the caller may not change what all apps share."""
    if not request.operator:
        raise ApiError(
            f"{what} are of all apps, and for operators to change: send a key made with `jaxllm keys add "
            "NAME --operator`, or call over the Unix socket as root or as the service's user",
            status=403,
            code="not_operator",
        )


class ApiState:
    """State of the handlers, limits and defaults.

    Attributes:
      backend: backend of the answers.
      strict_fields: whether fields that no format declares are refused.
      responses: stored responses.
      background: responses that run without a connection.
      body_bytes: size limit of a request's body.
      image_body_bytes: the same if the model supports images, which bodies contain in base64.
      body_depth: maximum nesting of lists and objects in a body.
      body_s: maximum time in seconds until a body has arrived.
      write_s: maximum time in seconds that a client may leave a part of an answer unread.
      keep_alive_s: time in seconds without a part of a stream after which a comment is sent.
      keep_alives: maximum number of such comments in a row.
      progress_s: time in seconds between two reports of a prompt's progress.
      answers_per_request: maximum number of answers per request, as prompts times `n`.
      embeddings_per_request: maximum number of inputs of a request for embeddings.
      stored_responses, stored_response_bytes: maximum number and bytes of an app's stored responses.
      max_tokens: default length of answers; completions have OpenAI's default of 16.
      temperature: default temperature.
    """

    body_bytes, image_body_bytes, body_depth = 4 << 20, 16 << 20, 64
    body_s, write_s = 30.0, 60.0
    keep_alive_s, keep_alives, progress_s = 10.0, 360, 0.5
    answers_per_request, embeddings_per_request = 16, 256
    stored_responses, stored_response_bytes = 1000, 16 << 20
    max_tokens, temperature = 1024, 1.0

    def __init__(self, backend: Backend, *, strict_fields: bool = False) -> None:
        self.backend, self.strict_fields, self.background = backend, strict_fields, Background()
        self.store_responses()

    def store_responses(self, folder: Path | None = None, vault: Vault | None = None) -> None:
        """Stores responses in a folder of contexts with its keys, or in memory (see `ResponseStore`); the key
        of thoughts, too, so that they come back after a restart."""
        most, most_bytes = self.stored_responses, self.stored_response_bytes
        self.responses = ResponseStore(most, most_bytes, folder=folder, vault=vault)
        self.seals = Seals(None if folder is None else folder / "thoughts.key")

    def body(self, request: ApiRequest, dialect: Dialect[Body] | type[Body]) -> Body:
        """The body of a request as a struct; a struct alone is of this service's own paths, whose fields are
        strict. Raises ApiError if a field is missing, refused or of a wrong type, or unknown though fields
        are strict."""
        if not isinstance(dialect, Dialect):
            return Dialect(name="own", body=dialect).read(request.values, strict=True)
        strict = request.values.get("strict_fields")
        return dialect.read(request.values, strict=self.strict_fields if strict is None else bool(strict))

    async def conversation(
        self,
        app: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        continue_final: bool | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> Conversation:
        """Messages from `messages_of`, with their images encoded; the others: see `Conversation`. Raises
        ApiError if there are too many images, and JaxllmError (see `Backend.encode_images`)."""
        plain, files = split_images(messages)
        if len(files) > IMAGES:
            message = f"the messages have {len(files)} images; at most {IMAGES} are allowed, send fewer"
            raise ApiError(message, param="messages")
        images = await self.backend.encode_images(app, files) if files else ()
        return Conversation(
            messages=tuple(plain), tools=tuple(tools), images=images, continue_final=continue_final,
            template_options=template_options or {},
        )  # fmt: skip

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: of this version and the model."""
        return f"b{__version__}-{self.backend.facts().digest[:12] or 'unknown'}"

    def most_body_bytes(self) -> int:
        """Current size limit of a request's body: larger if the model supports images."""
        with contextlib.suppress(Refused):
            if self.backend.facts().images:
                return max(self.body_bytes, self.image_body_bytes)
        return self.body_bytes

    def model(self, name: str | None, *, adapter: str | None = None) -> tuple[ModelFacts, str]:
        """Resolves a request's fields `model`, NAME, NAME:latest or NAME:ADAPTER, and `adapter` to the model
        and adapter. None or `DEFAULT_MODEL` is the served model.

        Raises:
          ApiError: another model is served, or the adapter is unknown, or the fields name two.
          Refused: the model is loading.
        """
        facts = self.backend.facts()
        for served in (facts.name, DEFAULT_MODEL):
            if name in (None, served, f"{served}:latest"):
                return facts, self.adapter(adapter or "")
            if name is not None and name.startswith(f"{served}:"):
                own = self.adapter(name[len(served) + 1 :])
                if adapter not in (None, "", own):
                    message = f"model names the adapter {own!r}, adapter {adapter!r:.80}"
                    raise ApiError(message, param="adapter")
                return facts, own
        message = f"the model {name!r:.80} is not served; {facts.name!r} is"
        raise ApiError(message, status=404, code="model_not_found", param="model")

    def adapter(self, name: str) -> str:
        """Checks and returns the name of an adapter, empty for none; raises ApiError."""
        adapters = self.backend.facts().adapters
        if name and name not in adapters:
            known = ", ".join(map(repr, adapters[:20])) or "none"
            message = f"the model has no adapter {name!r:.80}; it has {known}"
            raise ApiError(message, status=404, code="adapter_not_found", param="adapter")
        return name


def new_id(prefix: str) -> str:
    """A new id for an object of an answer."""
    return f"{prefix}{uuid.uuid4().hex}"


def now_s() -> int:
    """Seconds since 1970."""
    return int(time.time())


Result = TypeVar("Result")
DONE = b"data: [DONE]\n\n"


class ClientLeft(Exception):
    """The client has disconnected."""


def event_frame(data: Any, event: str = "") -> bytes:
    """A server-sent event."""
    named = f"event: {event}\n".encode() if event else b""
    return named + b"data: " + msgspec.json.encode(data) + b"\n\n"


def json_response(data: Any, status: int = 200) -> Response:
    """A complete response."""
    return Response(msgspec.json.encode(data), status_code=status, media_type="application/json")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled if the client disconnects first; the body must have been read.
    Raises ClientLeft if the client disconnected."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, left = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        task.cancel()
        left.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


@dataclasses.dataclass(frozen=True)
class Filler:
    """What a stream sends while its parts do not come.

    Attributes:
      pause_s: time in seconds between two looks.
      part: makes it from the time in seconds since the last part; None for nothing now.
    """

    pause_s: float
    part: Callable[[float], bytes | None]


class Streamed(Response):
    """A response in parts, which is closed however the connection ends."""

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        close: Callable[[], None],
        media_type: str,
        write_s: float,
        filler: Filler | None = None,
    ) -> None:
        # Closing a generator that has not begun runs none of it: `close` ends the calls.
        self._frames, self._close, self._write_s, self._filler = frames, close, write_s, filler
        self._sent_s = 0.0
        self.status_code, self.background = 200, None
        self.media_type = media_type
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            with contextlib.suppress(ClientLeft, TimeoutError, OSError):
                await while_connected(receive, self._send(send))
        finally:
            await self._frames.aclose()
            self._close()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await self._put(send, start)
        filling = asyncio.ensure_future(self._fill(send, self._filler)) if self._filler else None
        try:
            async for frame in self._frames:
                await self._put(send, {"type": "http.response.body", "body": frame, "more_body": True})
        finally:
            if filling is not None:
                filling.cancel()
                await asyncio.gather(filling, return_exceptions=True)
        await self._put(send, {"type": "http.response.body", "body": b""})

    async def _fill(self, send: Send, filler: Filler) -> None:
        now_s = self._sent_s
        while True:
            await asyncio.sleep(max(0.0, max(now_s, self._sent_s) + filler.pause_s - time.monotonic()))
            now_s = time.monotonic()
            quiet_s = now_s - self._sent_s
            if quiet_s >= filler.pause_s and (part := filler.part(quiet_s)) is not None:
                await self._put(send, {"type": "http.response.body", "body": part, "more_body": True})

    async def _put(self, send: Send, message: Message) -> None:
        # A client that reads nothing for so long is disconnected; only one part waits for it.
        async with asyncio.timeout(self._write_s):
            await send(message)
        self._sent_s = time.monotonic()
