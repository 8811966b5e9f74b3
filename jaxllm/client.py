"""A thin client of a running service, over httpx. Imports neither JAX nor NumPy.

    from jaxllm.client import Client
    client = Client(socket="/run/jaxllm/socket")     or Client("http://127.0.0.1:8080", api_key="...")
    client.bind("<40,70>")                           bindLLMService in the papers
    answer = client.call("Is this a complaint? ...") callLLM
    for piece in answer: ...
    answer.text, answer.facts, answer.met
    context = client.new_context()                   newLLMCtx
    context.generate("Dear ...").result().text       callLLM
    context.delete()                                 delLLMCtx

`AsyncClient` has the same calls, each awaited: `async for piece in await client.call(...)`. Keyword
arguments become fields of the request's body: `slo`, `strict`, `shorten`, `max_tokens`, `temperature`,
`adapter` and the others of the service's guide. `client.http` (httpx) or OpenAI's client reach all else.

Calls raise the errors of one process (`ConfigError`, `ContextGone`, `ContextOverflow`, `ObjectiveMissed`,
`BudgetExceeded`, `TemplateError`), `Busy` and `ServiceError`; those of the connection are httpx's.
"""

import contextlib
import dataclasses
import json
import urllib.parse
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

try:
    import httpx
except ImportError as error:
    raise ImportError("jaxllm.client needs httpx: pip install 'jaxllm[client]'") from error

from jaxllm.errors import (
    BudgetExceeded,
    ConfigError,
    ContextGone,
    ContextOverflow,
    JaxllmError,
    ObjectiveMissed,
    TemplateError,
)

# Greedy by default; OpenAI's default is 1.
_DEFAULTS = {"max_tokens": 256, "temperature": 0.0}
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
# Fields of answers that `Answer` cannot show.
_NOT_SHOWN = {"n", "tools", "tool_choice", "logprobs", "top_logprobs", *_STREAMED}
# Any number of answers may be streamed at once.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=16)


class ServiceError(JaxllmError):
    """The service failed, refused the caller, or sent something unknown to this client.

    Attributes:
      status: HTTP status; 0 in the middle of a stream.
      code: error code; empty for none.
      retry_after_s: seconds after which to try again; None if unknown.
    """

    def __init__(
        self, message: str, *, status: int = 0, code: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after_s = status, code, retry_after_s


class Busy(ServiceError):
    """A queue or limit is full, the service is loading or draining, or the context is answering."""


_BY_CODE: dict[str | int, type[JaxllmError]] = {
    "context_not_found": ContextGone, "context_length_exceeded": ContextOverflow,
    "template_error": TemplateError, "objective_missed": ObjectiveMissed, "budget_exceeded": BudgetExceeded,
    422: ObjectiveMissed, 507: BudgetExceeded, 400: ConfigError, 404: ConfigError, 413: ConfigError,
}  # fmt: skip
_BUSY = ("BUSY", "loading", "draining", "not_ready", "context_busy", 409, 429, 503)


class Answer:
    """A streamed answer: iterate for pieces of text (by `async for` with an `AsyncClient`), then read its
    attributes. An error that ends it is raised after the text before it.

    Attributes:
      text: text so far.
      finish_reason: "stop" or "length"; None before the end.
      usage: numbers of tokens in OpenAI's format; empty before the end.
      facts: the plan and the times, by the names of the service's guide.
    """

    def __init__(self, response: httpx.Response, data: Any) -> None:
        self._response, self._data, self._rest = response, data, b""
        self._pieces: deque[str] = deque()
        self._ended = self._complete = False
        self._error: JaxllmError | None = None
        self.finish_reason: str | None = None
        self.text, self.usage, self.facts = "", dict[str, Any](), dict[str, Any]()

    @property
    def met(self) -> bool | None:
        """Whether the objective was met; None without one, or before the end."""
        return self.facts.get("met")

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        while not (self._pieces or self._ended):
            self._feed(next(self._data, None))
        return self._piece(StopIteration())

    def result(self) -> Self:
        """Runs to the end and returns itself."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """Ends the answer, in the service, too."""
        self._ended = self._complete = True
        self._response.close()

    __aiter__ = __iter__

    async def __anext__(self) -> str:
        while not (self._pieces or self._ended):
            self._feed(await anext(self._data, None))
        return self._piece(StopAsyncIteration())

    async def aresult(self) -> Self:
        """See `result`; of an `AsyncClient`."""
        async for _ in self:
            pass
        return self

    async def aclose(self) -> None:
        """See `close`; of an `AsyncClient`."""
        self._ended = self._complete = True
        await self._response.aclose()

    def __del__(self) -> None:
        # Else the service would continue without a reader.
        with contextlib.suppress(Exception):
            self._response.close()

    def _piece(self, end: Exception) -> str:
        if not self._pieces:
            raise self._error or end
        self.text += (piece := self._pieces.popleft())
        return piece

    def _feed(self, data: bytes | None) -> None:
        if data is None:
            self._ended = True
            if not self._complete:
                self._error = self._error or ServiceError("the answer broke off")
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if self._complete or self._error is not None or not line.startswith(b"data:"):
                continue
            try:
                if (event := line[5:].strip()) == b"[DONE]":
                    self._complete = True
                else:
                    self._read(json.loads(event))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                self._error = ServiceError(f"the service sent a malformed event ({error!s:.80})")

    def _read(self, event: Any) -> None:
        if event.get("error") is not None:
            self._error = _error(0, event)
            return
        self.usage |= event.get("usage") or {}
        self.facts |= event.get("jaxllm") or {}
        for choice in event.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if text := choice["delta"].get("content") if "delta" in choice else choice.get("text"):
                self._pieces.append(text)


class _Calls:
    """The calls of both clients. `_send` returns the result of `read` on the response, or its awaitable."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080",
        *,
        socket: object = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Makes a client of the service at `url` or at the path of its Unix `socket`, for the app of
        `api_key` (not needed for a Unix socket). `timeout_s` applies to each part of an answer.
        """
        client, transport = self._kinds
        self.http = client(
            base_url="http://localhost" if socket else url,
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 10.0), pool=None),
            # A proxy of the environment cannot reach this device's loopback.
            trust_env=False,
            transport=transport(uds=str(socket) if socket else None, limits=_LIMITS, trust_env=False),
        )

    _kinds: tuple[Callable[..., Any], Callable[..., Any]]
    _send: Callable[..., Any]

    def bind(self, slo: Any, *, strict: bool = False, shorten: bool = False) -> Any:
        """Binds the app, in all of its clients, to an objective for calls without their own, until it
        unbinds or the service ends (bindLLMService).

        Args:
          slo: ratios such as "<40,70>"; `{"ttft_ms": 200, "tpot_ms": 50}`; or an objective of `jaxllm`.
          strict: whether to reject calls that no level can answer in time.
          shorten: whether plans may drop words of prompts.

        Returns:
          The prompt lengths at which no level meets it on the service's device.
        """
        body = {"slo": _wire_slo(slo), "strict": strict, "shorten": shorten}
        return self._send("POST", "/v1/objective", body, lambda body: tuple(body["unmet_prompt_tokens"]))

    def unbind(self) -> Any:
        """Removes the app's objective; the one of the service's options applies again."""
        return self._send("DELETE", "/v1/objective")

    def objective(self) -> Any:
        """The app's objective: `slo`, `strict`, `shorten`, and whether it is `from` the app or options."""
        return self._send("GET", "/v1/objective")

    def call(self, prompt: str, *, instruction: str = "", **fields: Any) -> Any:
        """Answers a prompt within the objective (callLLM) by an `Answer`, after the text `instruction`."""
        system = [{"role": "system", "content": instruction}] if instruction else []
        return self.chat([*system, {"role": "user", "content": prompt}], **fields)

    def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Any:
        """Answers a conversation, oldest message first."""
        return self._answer("/v1/chat/completions", {"messages": list(messages), **fields})

    def complete(self, prompt: str, **fields: Any) -> Any:
        """Continues a text, without the model's chat template."""
        return self._answer("/v1/completions", {"prompt": prompt, **fields})

    def new_context(self, *, pinned: bool = False, **fields: Any) -> Any:
        """Creates a `Context` of the app, which outlives calls and restarts (newLLMCtx), with a `level` or an
        `adapter`; if `pinned`, its chunks are never evicted for another context."""
        return self._send("POST", "/v1/contexts", {"pinned": pinned, **fields}, partial(Context, self))

    def context(self, name: str) -> Any:
        """An existing `Context` of the app."""
        return self._send("GET", _path(name), None, partial(Context, self))

    def contexts(self) -> Any:
        """All contexts of the app."""
        return self._send(
            "GET", "/v1/contexts", None, lambda got: [*map(partial(Context, self), got["data"])]
        )

    def _answer(self, path: str, body: dict[str, Any]) -> Any:
        if refused := sorted(_NOT_SHOWN & body.keys()):
            raise ConfigError(f"the field {refused[0]!r} needs another client, such as OpenAI's")
        if "slo" in body:
            body["slo"] = _wire_slo(body["slo"])
        return self._send("POST", path, {**_DEFAULTS, **body, **_STREAMED})


class Client(_Calls):
    """A service, as called by one app. Thread-safe; closed by `close`, or at the end of its `with`."""

    _kinds = httpx.Client, httpx.HTTPTransport

    def _send(self, method: str, path: str, body: Any = None, read: Callable[[Any], Any] = dict) -> Any:
        request = self.http.build_request(method, path, json=body)
        response = self.http.send(request, stream=True)
        if _is_stream(response):
            return Answer(response, response.iter_bytes())
        response.read()
        return read(_checked(response))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections; unfinished streams are cancelled."""
        self.http.close()


class AsyncClient(_Calls):
    """See `Client`; for one event loop. Each call is awaited."""

    _kinds = httpx.AsyncClient, httpx.AsyncHTTPTransport

    async def _send(self, method: str, path: str, body: Any = None, read: Callable[[Any], Any] = dict) -> Any:
        request = self.http.build_request(method, path, json=body)
        response = await self.http.send(request, stream=True)
        if _is_stream(response):
            return Answer(response, response.aiter_bytes())
        await response.aread()
        return read(_checked(response))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """See `Client.close`."""
        await self.http.aclose()


class Context:
    """A context of the app. With an `AsyncClient` its calls are awaited.

    Attributes:
      name: name by which it is opened after a restart.
      facts: facts from the service when it was made or opened: `level`, `tokens`, `pinned`, `adapter` and
        others.
    """

    def __init__(self, client: _Calls, facts: dict[str, Any]) -> None:
        self._client, self.name, self.facts = client, str(facts["id"]), facts

    def generate(self, prompt: str | Sequence[Mapping[str, Any]], **fields: Any) -> Any:
        """Answers a prompt, or messages, after the context's tokens, by an `Answer`."""
        asked = {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
        return self._client._answer(_path(self.name, "/generate"), {**asked, **fields})

    def pin(self, pinned: bool = True) -> Any:
        """Pins its chunks in memory once they are there, or unpins them."""
        return self._client._send("POST", _path(self.name, "/pin"), {"pinned": pinned})

    def delete(self) -> Any:
        """Removes it from memory and storage (delLLMCtx)."""
        return self._client._send("DELETE", _path(self.name))


def _path(name: str, verb: str = "") -> str:
    return f"/v1/contexts/{urllib.parse.quote(name, safe='')}{verb}"


def _wire_slo(slo: Any) -> Any:
    """An objective of `jaxllm` as the service reads it; all else unchanged, for the service to check."""
    if hasattr(slo, "ttft") and hasattr(slo, "tpot"):
        return f"<{100 * slo.ttft:.10g},{100 * slo.tpot:.10g}>"
    return dataclasses.asdict(slo) if dataclasses.is_dataclass(slo) and not isinstance(slo, type) else slo


def _is_stream(response: httpx.Response) -> bool:
    return response.is_success and response.headers.get("content-type", "").startswith("text/event-stream")


def _checked(response: httpx.Response) -> dict[str, Any]:
    """The JSON object of a complete response; raises the error that it reports."""
    body = None
    with contextlib.suppress(ValueError, RecursionError):
        body = json.loads(response.content or b"{}")
    if not response.is_success:
        raise _error(response.status_code, body, response.headers.get("retry-after", ""))
    if not isinstance(body, dict):
        raise ServiceError("the service sent no JSON object; is it a jaxllm?", status=response.status_code)
    return body


def _error(status: int, body: Any, retry_after: str = "") -> JaxllmError:
    """The error in a body of OpenAI's shape; `status` is 0 in the middle of a stream."""
    facts = body.get("error") if isinstance(body, Mapping) else None
    facts = facts if isinstance(facts, Mapping) else {"message": facts}
    message = str(facts.get("message") or f"the service answered with status {status}")
    code = code if isinstance(code := facts.get("code"), str) else ""
    if (kind := _BY_CODE.get(code) or _BY_CODE.get(status)) is not None:
        return kind(message)
    kind = Busy if code in _BUSY or status in _BUSY else ServiceError
    wait_s = float(retry_after) if retry_after.isdecimal() else None
    return kind(message, status=status, code=code, retry_after_s=wait_s)
