"""Parses items of OpenAI's responses, and converts them to messages for chat templates."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxllm.serving.server.api.errors import ApiError
from jaxllm.serving.server.api.messages import arguments_of, image_of, messages_of, require_some, text_of
from jaxllm.serving.server.api.requests import convert, new_id

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text")
_STATUSES = (None, "in_progress", "completed", "incomplete")


class MessageItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message; `id`, `status` and `phase` come back with a response's own items, and have no effect."""

    role: str
    content: str | list[dict[str, Any]]
    type: str = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call of a function."""

    type: str
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class OutputItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function's result."""

    type: str
    call_id: str
    output: str | list[dict[str, Any]]
    id: str | None = None
    status: str | None = None


def items_of(value: str | Sequence[Any]) -> list[dict[str, Any]]:
    """A request's input as items with ids.

    Raises:
      ApiError: there are no items or too many, or one is malformed, of an unsupported type, or has a part
        that is neither a text nor an image.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    require_some(value, "input")
    return [_item(each, f"input[{index}]") for index, each in enumerate(value)]


def conversation_of(items: Sequence[Mapping[str, Any]], instructions: str = "") -> tuple[dict[str, Any], ...]:
    """Converts items to messages: `instructions` first; the assistant's text and calls share a message.

    Args:
      items: items from `items_of`, oldest first.
      instructions: system message; empty for none.

    Raises:
      ApiError: there are too many messages.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        if item["type"] == "message":
            texts = [_for_chat(part) for part in item["content"]]
            if item["role"] == "assistant" and messages and "tool_calls" in messages[-1]:
                messages[-1]["content"] += texts
            else:
                messages.append({"role": item["role"], "content": texts})
        elif item["type"] == "function_call_output":
            output = item["output"]
            text = output if isinstance(output, str) else "".join(part["text"] for part in output)
            messages.append({"role": "tool", "content": text, "tool_call_id": item["call_id"]})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": []})
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
    return messages_of(messages, "input")


def require_calls(items: Sequence[Mapping[str, Any]]) -> None:
    """Raises ApiError if an output belongs to no earlier call."""
    called: set[str] = set()
    for item in items:
        if item["type"] == "function_call":
            called.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in called:
            raise ApiError(
                f"no function_call before has the call_id {item['call_id']!r:.80} of a function_call_output",
                param="input",
            )


def _item(value: Any, at: str) -> dict[str, Any]:
    kind = value.get("type", "message") if isinstance(value, dict) else "message"
    if kind == "message":
        return _message(convert(value, MessageItem, at), at)
    if kind == "function_call":
        call = convert(value, CallItem, at)
        _check_status(call.status, at)
        arguments_of(call.arguments, f"{at}.arguments")
        told = {"call_id": call.call_id, "name": call.name, "arguments": call.arguments}
        return {"id": new_id("fc_"), "type": kind, "status": "completed", **told}
    if kind == "function_call_output":
        given = convert(value, OutputItem, at)
        _check_status(given.status, at)
        output = given.output if isinstance(given.output, str) else _parts(given.output, f"{at}.output")
        told = {"call_id": given.call_id, "output": output}
        return {"id": new_id("fco_"), "type": kind, "status": "completed", **told}
    raise ApiError(
        f"{at} is of the type {kind!r:.40}; items are messages, function_calls and function_call_outputs",
        code="unsupported_content",
        param=f"{at}.type",
    )


def _message(message: MessageItem, at: str) -> dict[str, Any]:
    if message.role not in _ROLES:
        raise ApiError(
            f"{at}.role is one of {', '.join(_ROLES)}, got {message.role!r:.40}", param=f"{at}.role"
        )
    _check_status(message.status, at)
    given = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else None
    content = _parts(given or message.content, f"{at}.content", images=message.role == "user")
    if message.role == "assistant":
        content = [output_text(part["text"]) for part in content]
    told = {"role": message.role, "status": "completed", "content": content}
    return {"id": new_id("msg_"), "type": "message", **told}


def output_text(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """A text part of the model's message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _parts(parts: Sequence[Any], at: str, *, images: bool = False) -> list[dict[str, Any]]:
    told = []
    for index, part in enumerate(parts):
        if images and isinstance(part, Mapping) and part.get("type") == "input_image":
            if part.get("file_id") is not None:
                raise ApiError(f"{at}[{index}] names a file, and none are kept; send its bytes", param=at)
            image_of(part.get("image_url"), f"{at}[{index}]")
            told.append({"type": "input_image", "image_url": part["image_url"], "detail": "auto"})
        else:
            told.append({"type": "input_text", "text": text_of([part], at, _TEXTS, first=index)})
    return told


def _for_chat(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part of an item in the chat format."""
    if part["type"] == "input_image":
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    return {"type": "text", "text": part["text"]}


def _check_status(status: str | None, at: str) -> None:
    if status not in _STATUSES:
        raise ApiError(
            f"{at}.status is in_progress, completed or incomplete, got {status!r:.40}", param=f"{at}.status"
        )
