"""Maps errors to HTTP statuses and to the bodies that OpenAI's, Anthropic's and Ollama's clients expect."""

import contextvars
import logging
import math
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response

from jaxllm.errors import (
    BudgetExceeded,
    BundleError,
    CheckpointError,
    ConfigError,
    ContextGone,
    ContextOverflow,
    JaxllmError,
    ObjectiveMissed,
    TemplateError,
    Unreadable,
)
from jaxllm.serving.guided.matcher import GrammarLate
from jaxllm.serving.server.calls import AdapterBusy, AdapterGone, ContextBusy, Refused

_log = logging.getLogger(__name__)
_MOST_CHARACTERS = 1000
_RETRY_S = 5.0


class ApiError(JaxllmError):
    """A request refused by the front.

    Attributes:
      status: HTTP status.
      code: error code; empty for the status's default.
      param: the invalid field; empty for none.
      retry_after_s: time until a retry is useful; None if unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "",
        param: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after_s = status, code, param, retry_after_s


# The errors that the request of this context was answered with, for its record; None outside of requests.
REPORTED: contextvars.ContextVar[list[ApiError] | None] = contextvars.ContextVar("reported", default=None)

# Status -> OpenAI's type, default code, Anthropic's type.
_KINDS = {
    400: ("invalid_request_error", "invalid_request", "invalid_request_error"),
    401: ("authentication_error", "invalid_api_key", "authentication_error"),
    403: ("permission_error", "forbidden", "permission_error"),
    404: ("invalid_request_error", "not_found", "not_found_error"),
    405: ("invalid_request_error", "method_not_allowed", "invalid_request_error"),
    408: ("invalid_request_error", "request_timeout", "invalid_request_error"),
    409: ("conflict_error", "context_busy", "invalid_request_error"),
    413: ("invalid_request_error", "request_too_large", "request_too_large"),
    422: ("invalid_request_error", "objective_missed", "invalid_request_error"),
    429: ("rate_limit_error", "BUSY", "rate_limit_error"),
    500: ("server_error", "internal_error", "api_error"),
    503: ("server_error", "not_ready", "overloaded_error"),
    507: ("server_error", "budget_exceeded", "api_error"),
}
# Reason of a refusal -> status and code; names in capitals are those of Android's AICore.
_REFUSALS = {
    "full": (429, "BUSY"), "quota": (429, "PER_APP_BATTERY_USE_QUOTA_EXCEEDED"),
    "background": (403, "BACKGROUND_USE_BLOCKED"), "hot": (503, "BUSY"), "loading": (503, "loading"),
    "draining": (503, "draining"),
}  # fmt: skip
# Errors -> status, code, and the text for clients; None for their own.
_ERRORS: tuple[tuple[type[BaseException], int, str, str | None], ...] = (
    (GrammarLate, 503, "grammar_late", None),
    (ContextBusy, 409, "", None),
    (AdapterBusy, 409, "adapter_busy", None),
    (AdapterGone, 404, "adapter_not_found", None),
    (ContextGone, 404, "context_not_found", None),
    (ContextOverflow, 400, "context_length_exceeded", None),
    (ObjectiveMissed, 422, "", None),
    (BudgetExceeded, 507, "", None),
    (TemplateError, 400, "template_error", None),
    (ConfigError, 400, "", None),
    # The texts of these name files, which must not reach clients.
    (
        BundleError, 503, "model_failed",
        "the model's file was changed or cannot be read; the service tests itself now, and ends where it "
        "cannot answer, so that it is started again: send the request again then",
    ),
    (
        Unreadable, 503, "storage_failed",
        "the storage of contexts cannot be read or written now, and nothing is said of whether the context "
        "is there: send the request again",
    ),
    (
        CheckpointError, 500, "storage_failed",
        "the context could not be read or written: its storage failed or has damage; ask the operator",
    ),
    (BaseException, 500, "", "the service failed at this request; its log says why"),
)  # fmt: skip


def api_error(error: BaseException) -> ApiError:
    """The error for the client. Unexpected errors are logged, and reported without their text."""
    found = _api_error(error)
    if (reported := REPORTED.get()) is not None:
        reported.append(found)
    return found


def code_of(error: ApiError) -> str:
    """The error's code: its own, or its status's default."""
    return error.code or _KINDS.get(error.status, _KINDS[400])[1]


def _api_error(error: BaseException) -> ApiError:
    if isinstance(error, ApiError):
        return error
    text = str(error)[:_MOST_CHARACTERS]
    if isinstance(error, Refused):
        (status, code), wait = _REFUSALS.get(error.reason, (503, "")), error.retry_after_s
        # Clients retry these after the given time.
        wait = 1.0 if wait is None and status in (429, 503) else wait
        return ApiError(text, status=status, code=code, retry_after_s=wait)
    _, status, code, public = next(each for each in _ERRORS if isinstance(error, each[0]))
    if public is None:
        return ApiError(text, status=status, code=code, retry_after_s=1.0 if status == 503 else None)
    # With a traceback of unexpected ones.
    _log.error("a request failed (%s): %s", code, error, exc_info=None if code else error)
    return ApiError(public, status=status, code=code, retry_after_s=_RETRY_S if status == 503 else None)


def overflowed(error: ContextOverflow, window_tokens: int, path: str) -> ApiError:
    """The error of a prompt that does not fit, in the words by which clients of a path's format know it."""
    known = f"This model's maximum context length is {window_tokens} tokens."
    if path.startswith("/v1/messages"):
        known = f"prompt is too long: at most {window_tokens} tokens fit."
    refusal = api_error(error)
    return ApiError(f"{known} {refusal}", code=refusal.code)


Shape = Callable[[ApiError], dict[str, Any]]


def openai_body(error: ApiError) -> dict[str, Any]:
    """An error in OpenAI's format."""
    kind = _KINDS.get(error.status, _KINDS[400])[0]
    fields = {"message": str(error), "type": kind, "param": error.param or None, "code": code_of(error)}
    return {"error": fields}


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """An error in Anthropic's format."""
    return {
        "type": "error",
        "error": {"type": _KINDS.get(error.status, _KINDS[400])[2], "message": str(error)},
    }


def ollama_body(error: ApiError) -> dict[str, Any]:
    """An error in Ollama's format."""
    return {"error": str(error)}


def shape_of(path: str) -> Shape:
    """The error format of a path."""
    if path.startswith("/v1/messages"):
        return anthropic_body
    return ollama_body if path.startswith("/api/") else openai_body


def error_response(error: ApiError, shape: Shape) -> Response:
    """The complete response to a refused or failed request."""
    reported, headers = REPORTED.get(), {}
    if reported is not None and error not in reported:
        reported.append(error)
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(min(error.retry_after_s, 3600))))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413):
        # The rest of the body was not read, and must not be parsed as the next request.
        headers["connection"] = "close"
    content = msgspec.json.encode(shape(error))
    return Response(content, status_code=error.status, headers=headers, media_type="application/json")
