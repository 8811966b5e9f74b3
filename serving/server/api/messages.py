"""Parses OpenAI's messages and items of responses into a conversation; never fetches URLs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from jaxllm.errors import ConfigError
from jaxllm.serving.images.prompt import image_bytes, image_part
from jaxllm.serving.server.api.dialect import convert
from jaxllm.serving.server.api.errors import ApiError
from jaxllm.serving.server.api.requests import new_id

# Enough for any prompt, and fast to parse.
MAX_MESSAGES = 8192


class Function(msgspec.Struct, kw_only=True):
    """The function of a call in a message."""

    name: str
    arguments: str | dict[str, Any]


class CalledTool(msgspec.Struct, kw_only=True):
    """A call of a tool in a message."""

    function: Function
    id: str | None = None
    type: str = "function"
    index: int | None = None


class Message(msgspec.Struct, kw_only=True):
    """A message of OpenAI's chats."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None


def messages_of(values: Sequence[Any], param: str = "messages") -> tuple[dict[str, Any], ...]:
    """Messages in the templates' format: texts as one string, arguments of calls as objects. The role
    `developer` becomes `system`, since templates of open models do not know it; an assistant's reasoning is
    `reasoning_content`, by either name, which the template leaves out where it does. Raises ApiError if there
    are none or too many, a message is malformed, or it has a part that is neither a text nor an image.
    `param`: the field with the messages."""
    require_some(values, param)
    return tuple(_message(value, f"messages[{index}]") for index, value in enumerate(values))


def require_some(values: Sequence[Any], param: str) -> None:
    """Raises ApiError if there are no messages or too many."""
    if not 1 <= len(values) <= MAX_MESSAGES:
        raise ApiError(f"{param} has {len(values)} messages; 1 to {MAX_MESSAGES} are allowed", param=param)


def text_of(
    content: str | Sequence[Mapping[str, Any]] | None,
    at: str,
    kinds: Sequence[str] = ("text",),
    *,
    first: int = 0,
) -> str:
    """Joins the texts of a message's content. Raises ApiError if a part has another type. `at`: path of the
    content; `kinds`: types of parts that are texts; `first`: index of the first part."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content, first):
        kind, text = part.get("type"), part.get("text")
        if kind not in kinds or not isinstance(text, str):
            message = f"{at}[{index}] is of the type {kind!r:.40}; only texts and images (image_url) are read"
            raise ApiError(message, code="unsupported_content", param=at)
        texts.append(text)
    return "".join(texts)


def content_of(
    content: str | Sequence[Mapping[str, Any]] | None, at: str, *, images: bool
) -> str | list[dict[str, Any]]:
    """A message's content: its text, or its parts if it has images (see `jaxllm.serving.images.prompt`).
    Raises ApiError if a part has another type, or an image's URL does not contain it. `at`: path of the
    content; `images`: whether the message may have some."""
    if isinstance(content, str | None) or not any(each.get("type") == "image_url" for each in content):
        return text_of(content, at)
    if not images:
        raise ApiError(f"{at} has an image; images are allowed in users' messages only", param=at)
    parts = []
    for index, part in enumerate(content):
        if part.get("type") == "image_url":
            url = part.get("image_url")
            parts.append(image_of(url.get("url") if isinstance(url, Mapping) else url, f"{at}[{index}]"))
        else:
            parts.append({"type": "text", "text": text_of([part], at, first=index)})
    return parts


def image_of(url: Any, at: str) -> dict[str, Any]:
    """The message part of the image in a data: URL; raises ApiError."""
    try:
        return image_part(image_bytes(url))
    except ConfigError as error:
        raise ApiError(str(error), code="invalid_image", param=at) from None


def arguments_of(value: str | Mapping[str, Any], at: str) -> Mapping[str, Any]:
    """The arguments of a call as an object; raises ApiError."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value or "{}")
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            value = ""
    if not isinstance(value, Mapping):
        raise ApiError(f"{at} must be a JSON object, as text", param=at)
    return value


def _message(value: Any, at: str) -> dict[str, Any]:
    message = convert(value, Message, at)
    thought = message.reasoning_content or message.reasoning
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content_of(message.content, f"{at}.content", images=message.role == "user"),
    }
    if message.content is None and not message.tool_calls and not thought:
        raise ApiError(f"{at} has no content", param=at)
    if thought:
        if message.role != "assistant":
            raise ApiError(f"{at} has reasoning, which only the assistant's messages have", param=at)
        plain["reasoning_content"] = thought
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    for index, call in enumerate(message.tool_calls or ()):
        arguments = arguments_of(call.function.arguments, f"{at}.tool_calls[{index}].function.arguments")
        function = {"name": call.function.name, "arguments": arguments}
        made = {"id": call.id or "", "type": "function", "function": function}
        plain.setdefault("tool_calls", []).append(made)
    return plain


_TEXTS = ("input_text", "output_text", "text")


class Item(msgspec.Struct, kw_only=True):
    """An item of a response; `id`, `status` and `phase` come back with a response's own items, and have no
    effect."""

    type: str = "message"
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(Item, kw_only=True):
    """A message."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]
    phase: str | None = None


class CallItem(Item, kw_only=True):
    """A call of a function."""

    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class ReasoningItem(Item, kw_only=True):
    """Reasoning of the model: as texts, or as `encrypted_content` of this service (see
    `jaxllm.serving.server.api.seals`)."""

    summary: list[dict[str, Any]] = msgspec.field(default_factory=list)
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None


class OutputItem(Item, kw_only=True):
    """A function's result."""

    call_id: str
    output: str | list[dict[str, Any]]


def items_of(
    value: str | Sequence[Any], opened: Callable[[str], str | None] = lambda sealed: None
) -> list[dict[str, Any]]:
    """A request's input as items with ids. Raises ApiError if there are no items or too many, or one is
    malformed, of an unsupported type, or has a part that is neither a text nor an image. `opened` decrypts an
    `encrypted_content` of this service; None for a foreign one."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    require_some(value, "input")
    return [_item(each, f"input[{index}]", opened) for index, each in enumerate(value)]


def conversation_of(items: Sequence[Mapping[str, Any]], instructions: str = "") -> tuple[dict[str, Any], ...]:
    """Converts items to messages: `instructions` first; the assistant's reasoning, text and calls share a
    message. A call that was cut is left out: its arguments are not whole. Raises ApiError if there are too
    many messages."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})

    def answer(*without: str) -> dict[str, Any]:
        """The assistant's message that goes on, if it has none of these yet, else a new one."""
        last = messages[-1] if messages else {"role": ""}
        if last["role"] != "assistant" or any(last.get(name) for name in without):
            messages.append({"role": "assistant", "content": []})
        return messages[-1]

    for item in items:
        kind = item["type"]
        if kind == "message":
            texts = [
                {"type": "image_url", "image_url": {"url": part["image_url"]}}
                if part["type"] == "input_image"
                else {"type": "text", "text": part["text"]}
                for part in item["content"]
            ]
            if item["role"] != "assistant":
                messages.append({"role": item["role"], "content": texts})
            else:
                last = messages[-1] if messages else {}
                joins = "tool_calls" in last or ("reasoning_content" in last and not last["content"])
                answer(*() if joins else ("role",))["content"] += texts
        elif kind == "function_call_output":
            output = item["output"]
            text = output if isinstance(output, str) else "".join(part["text"] for part in output)
            messages.append({"role": "tool", "content": text, "tool_call_id": item["call_id"]})
        elif kind == "reasoning":
            # Empty for one that could not be opened.
            if thought := thought_of(item):
                said = answer("content", "tool_calls")
                said["reasoning_content"] = said.get("reasoning_content", "") + thought
        elif item["status"] != "incomplete":
            name = ".".join(filter(None, (item.get("namespace"), item["name"])))
            function = {"name": name, "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            answer().setdefault("tool_calls", []).append(call)
    return messages_of(messages, "input")


def thought_of(item: Mapping[str, Any]) -> str:
    """The text of an item of reasoning."""
    return "".join(part["text"] for part in item.get("content") or item["summary"])


def require_calls(items: Sequence[Mapping[str, Any]]) -> None:
    """Raises ApiError if an output belongs to no earlier call."""
    called: set[str] = set()
    for item in items:
        if item["type"] == "function_call":
            called.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in called:
            message = f"no function_call before has the call_id {item['call_id']!r:.80} of an output"
            raise ApiError(message, param="input")


_ITEMS: dict[str, tuple[type[Item], str]] = {
    "message": (MessageItem, "msg_"),
    "reasoning": (ReasoningItem, "rs_"),
    "function_call": (CallItem, "fc_"),
    "function_call_output": (OutputItem, "fco_"),
}


def _item(value: Any, at: str, opened: Callable[[str], str | None]) -> dict[str, Any]:
    kind = value.get("type", "message") if isinstance(value, dict) else "message"
    if not isinstance(kind, str) or kind not in _ITEMS:
        message = f"{at} is of the type {kind!r:.40}; items are {', '.join(_ITEMS)}"
        raise ApiError(message, code="unsupported_content", param=f"{at}.type")
    form, prefix = _ITEMS[kind]
    item = convert(value, form, at)
    plain: dict[str, Any] = {"id": new_id(prefix), "type": kind, "status": "completed"}
    match item:
        case ReasoningItem():
            kinds = ("summary_text", "reasoning_text", "text")
            texts = text_of(item.content or item.summary, at, kinds)
            if not item.content and item.encrypted_content is not None:
                # As it was said; what is not this service's has at most a summary.
                texts = opened(item.encrypted_content) or texts
            return plain | {"summary": [], "content": [{"type": "reasoning_text", "text": texts}]}
        case CallItem():
            if item.status == "incomplete":
                plain["status"] = item.status
            else:
                arguments_of(item.arguments, f"{at}.arguments")
            of = {} if item.namespace is None else {"namespace": item.namespace}
            return plain | {"call_id": item.call_id, "name": item.name, "arguments": item.arguments, **of}
        case OutputItem():
            output = item.output if isinstance(item.output, str) else _parts(item.output, f"{at}.output")
            return plain | {"call_id": item.call_id, "output": output}
    assert isinstance(item, MessageItem)
    text, user = item.content, item.role == "user"
    parts = [{"type": "text", "text": text}] if isinstance(text, str) else text
    content = _parts(parts, f"{at}.content", images=user)
    if item.role == "assistant":
        content = [output_text(part["text"]) for part in content]
    return plain | {"role": item.role, "content": content}


def output_text(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """A text part of the model's message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _parts(parts: Sequence[Any], at: str, *, images: bool = False) -> list[dict[str, Any]]:
    found = []
    for index, part in enumerate(parts):
        if images and isinstance(part, Mapping) and part.get("type") == "input_image":
            if part.get("file_id") is not None:
                message = f"{at}[{index}] names a file, and the service stores none; send its bytes"
                raise ApiError(message, param=at)
            image_of(part.get("image_url"), f"{at}[{index}]")
            found.append({"type": "input_image", "image_url": part["image_url"], "detail": "auto"})
        else:
            found.append({"type": "input_text", "text": text_of([part], at, _TEXTS, first=index)})
    return found
