"""Reads what a service sends: events of a stream, facts, and errors, as the classes of one process."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from jaxllm.errors import (
    BudgetExceeded,
    ConfigError,
    ContextGone,
    ContextOverflow,
    JaxllmError,
    ObjectiveMissed,
    TemplateError,
)

# No event or error is longer.
_MOST_BYTES = 16 << 20


class ServiceError(JaxllmError):
    """The service failed, or sent what this client does not know.

    Attributes:
      status: of HTTP; 0 where there was no answer, or it was told in the middle of one.
      code: for programs; empty for none.
      retry_after_s: when to try again; None where that is not known.
    """

    def __init__(
        self, message: str, *, status: int = 0, code: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after_s = status, code, retry_after_s


class Unreachable(ServiceError):
    """There is no service at the address, or the connection broke or took too long."""


class Unauthorized(ServiceError):
    """The service does not know who calls, or does not let it in."""


class Busy(ServiceError):
    """The service does not take the call now: a queue or limit is full, it is loading or draining, or the
    context is answering."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextFacts:
    """A context, as the service told of it last.

    Attributes:
      name: of the context.
      tokens: number of its tokens.
      level: that answers in it, in percent.
      pinned: whether its chunks stay in memory.
      stored_bytes: of its chunks on storage.
      created: when it was made, in seconds since 1970; 0 where that is not known.
      adapter: the low-rank adapter that answers in it; empty for none.
    """

    name: str
    tokens: int
    level: int
    pinned: bool
    stored_bytes: int
    created: int
    adapter: str


_BY_CODE: dict[str, type[JaxllmError]] = {
    "context_not_found": ContextGone,
    "context_length_exceeded": ContextOverflow,
    "template_error": TemplateError,
    "objective_missed": ObjectiveMissed,
    "budget_exceeded": BudgetExceeded,
}
_BY_STATUS: dict[int, type[JaxllmError]] = {422: ObjectiveMissed, 507: BudgetExceeded}
_OF_SERVICE = {401: Unauthorized, 403: Unauthorized, 409: Busy, 429: Busy, 503: Busy}
# Codes of errors in the middle of a stream, which have no status.
_BUSY_CODES = ("queue_full", "loading", "draining", "not_ready", "context_busy")


def error_of(status: int, body: Any, retry_after: str | None = None) -> JaxllmError:
    """The error in a body of OpenAI's shape.

    Args:
      status: of HTTP; 0 in the middle of a stream.
      body: any JSON value.
      retry_after: the header of that name.
    """
    told = body.get("error") if isinstance(body, Mapping) else None
    told = told if isinstance(told, Mapping) else {"message": told}
    message, code = str(told.get("message") or f"the service answered with status {status}"), told.get("code")
    code = code if isinstance(code, str) else ""
    if (kind := _BY_CODE.get(code) or _BY_STATUS.get(status)) is not None:
        return kind(message)
    wait_s = None
    with contextlib.suppress(TypeError, ValueError):
        wait_s = max(0.0, float(retry_after or ""))
    of_service = Busy if code in _BUSY_CODES else _OF_SERVICE.get(status, ServiceError)
    if of_service is ServiceError and (400 <= status < 500 or told.get("type") == "invalid_request_error"):
        return ConfigError(message)
    return of_service(message, status=status, code=code, retry_after_s=wait_s)


def checked(response: httpx.Response) -> Any:
    """The JSON object of a whole response.

    Raises:
      JaxllmError: it tells of an error, or is no JSON object.
    """
    try:
        body = json.loads(response.content)
    except (ValueError, RecursionError):
        body = None
    if not response.is_success:
        raise error_of(response.status_code, body, response.headers.get("retry-after"))
    if not isinstance(body, dict):
        raise ServiceError("the service sent no JSON object; is it a jaxllm?", status=response.status_code)
    return body


def health_of(response: httpx.Response) -> dict[str, Any]:
    """What a service tells of its health; one that is not ready has status 503, and tells why."""
    with contextlib.suppress(ValueError, RecursionError):
        body = json.loads(response.content)
        if response.status_code == 503 and isinstance(body, dict) and "error" not in body:
            return body
    return checked(response)


def context_facts(body: Any) -> ContextFacts:
    """A context's facts from the service.

    Raises:
      ServiceError: they are malformed.
    """
    try:
        names = {field.name: field.name for field in dataclasses.fields(ContextFacts)} | {"name": "id"}
        return ContextFacts(**{field: body[name] for field, name in names.items()})
    except (KeyError, TypeError) as error:
        raise ServiceError(
            f"the service told of no context ({error!s:.80}); is it another version?"
        ) from error


def missed_of(body: Any) -> tuple[int, ...]:
    """The prompt lengths at which an objective is missed.

    Raises:
      ServiceError: they are not told.
    """
    found = body.get("unmet_prompt_tokens")
    if not isinstance(found, list):
        raise ServiceError("the service bound no objective; is it another version?")
    return tuple(found)


def list_of(body: Any) -> list[Any]:
    """The items of a list in OpenAI's shape.

    Raises:
      ServiceError: it is none.
    """
    found = body.get("data")
    if not isinstance(found, list):
        raise ServiceError("the service sent no list; is it another version?")
    return found


@contextlib.contextmanager
def reaching(url: object) -> Iterator[None]:
    """Turns errors of the connection into `Unreachable`."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise Unreachable(
            f"{url}: the service did not answer in time; try again, or raise timeout_s"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        reason = str(error)[:200] or type(error).__name__
        raise Unreachable(f"{url}: the service cannot be reached ({reason}); is it running?") from error


class EventReader:
    """Splits a stream of server-sent events, whatever pieces it comes in."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[str]:
        """The data of the lines that are complete now.

        Raises:
          ServiceError: a line is too long, or is not text.
        """
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > _MOST_BYTES:
            raise ServiceError("the service sent an event without an end")
        fields = [line.rstrip(b"\r") for line in lines]
        try:
            return [each[5:].strip().decode() for each in fields if each.startswith(b"data:")]
        except UnicodeDecodeError as error:
            raise ServiceError("the service sent an event that is not UTF-8") from error
