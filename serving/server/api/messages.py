"""Parses OpenAI's messages, tools and items of responses into a conversation; never fetches URLs."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from jaxllm.errors import ConfigError
from jaxllm.serving.guided.calls import answer_grammar
from jaxllm.serving.guided.grammar import Grammar
from jaxllm.serving.images.prompt import image_bytes, image_part
from jaxllm.serving.server.api.errors import ApiError
from jaxllm.serving.server.api.requests import convert, new_id
from jaxllm.text.answer_format import AnswerFormat, make_scanner
from jaxllm.text.answer_scanner import FormatScanner

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_TOOLS = 128
# Enough for any prompt, and fast to parse.
MAX_MESSAGES = 8192


class Function(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The function of a call in a message."""

    name: str
    arguments: str | dict[str, Any]


class CalledTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call of a tool in a message."""

    function: Function
    id: str | None = None
    type: str = "function"
    index: int | None = None


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message of OpenAI's chats."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None


class ToolFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The function of a tool."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool in OpenAI's chat format."""

    type: Literal["function"]
    function: ToolFunction


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The effect of a request's tools on its calls.

    Attributes:
      tools: tools for the conversation.
      grammar: given that of a response format, or None, the grammar of the answer, or None.
      scanner: makes a scanner of the answer; None without tools.
      markers: special tokens that the scanner reads.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    grammar: Callable[[Grammar | None], Grammar | None] = lambda schema: schema
    scanner: Callable[[], FormatScanner] | None = None
    markers: tuple[str, ...] = ()


def messages_of(values: Sequence[Any], param: str = "messages") -> tuple[dict[str, Any], ...]:
    """Messages in the templates' format: texts as one string, arguments of calls as objects. The role
    `developer` becomes `system`, since templates of open models do not know it.

    Args:
      values: JSON values.
      param: the field of the request with the messages.

    Raises:
      ApiError: there are none or too many, a message is malformed, or it has a part that is neither a text
        nor an image.
    """
    require_some(values, param)
    return tuple(_message(value, f"messages[{index}]") for index, value in enumerate(values))


def require_some(values: Sequence[Any], param: str) -> None:
    """Raises ApiError if there are no messages or too many."""
    if not 1 <= len(values) <= MAX_MESSAGES:
        raise ApiError(f"{param} has {len(values)} messages; 1 to {MAX_MESSAGES} are allowed", param=param)


def tools_of(
    values: Sequence[Any] | None, choice: Any, parallel: bool | None, answer_format: AnswerFormat
) -> ToolUse:
    """The effect of tools and `tool_choice`. Calls of strict tools match their schemas, and without
    `parallel` there is at most one call, for any choice.

    Raises:
      ApiError: a tool is malformed, or the choice is none of them.
    """
    if choice is not None and choice != "none" and not values:
        raise ApiError("tool_choice requires tools", param="tool_choice")
    if not values:
        return ToolUse()
    if len(values) > _MAX_TOOLS:
        raise ApiError(f"tools must have at most {_MAX_TOOLS} entries, got {len(values)}", param="tools")
    given = [_tool(value, f"tools[{index}]") for index, value in enumerate(values)]
    tools, strict = [tool for tool, _ in given], [name for _, name in given if name is not None]
    names = [tool["function"]["name"] for tool in tools]
    if len({*names}) < len(names):
        raise ApiError("two tools have one name", param="tools")
    if choice == "none":
        return ToolUse()
    required, several, callable_tools = choice == "required", parallel is not False, tools
    if choice not in (None, "auto", "required"):
        function = isinstance(choice, Mapping) and choice.get("type") == "function"
        function = choice.get("function", choice) if function else None
        named = function.get("name") if isinstance(function, Mapping) else None
        if named not in names:
            raise ApiError(
                'tool_choice is none, auto, required or {"type": "function", "function": {"name": NAME}} '
                f"with the name of one of the tools, got {choice!r:.80}",
                param="tool_choice",
            )
        required, several, callable_tools = True, False, [tools[names.index(named)]]

    def grammar(schema: Grammar | None) -> Grammar | None:
        return answer_grammar(
            answer_format, callable_tools, required=required, several=several, strict=strict, schema=schema
        )

    # Here, so that an unsupported schema is refused as the tool's.
    grammar(None)
    return ToolUse(
        tools=tuple(tools),
        grammar=grammar,
        scanner=lambda: make_scanner(answer_format, tools, thinking=answer_format.opened),
        markers=tuple(text for text, _ in answer_format.special),
    )


def text_of(
    content: str | Sequence[Mapping[str, Any]] | None,
    at: str,
    kinds: Sequence[str] = ("text",),
    *,
    first: int = 0,
) -> str:
    """Joins the texts of a message's content.

    Args:
      content: a text or parts.
      at: the path of the content in the body.
      kinds: types of parts that are texts.
      first: index of the first part, if there are others before it.

    Raises:
      ApiError: a part has another type.
    """
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

    Args:
      content: a text, or parts in OpenAI's format.
      at: the path of the content in the body.
      images: whether the message may have images.

    Raises:
      ApiError: a part has another type, or an image's URL does not contain it.
    """
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
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content_of(message.content, f"{at}.content", images=message.role == "user"),
    }
    if message.content is None and not message.tool_calls:
        raise ApiError(f"{at} has no content", param=at)
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    for index, call in enumerate(message.tool_calls or ()):
        arguments = arguments_of(call.function.arguments, f"{at}.tool_calls[{index}].function.arguments")
        function = {"name": call.function.name, "arguments": arguments}
        made = {"id": call.id or "", "type": "function", "function": function}
        plain.setdefault("tool_calls", []).append(made)
    return plain


def _tool(value: Any, at: str) -> tuple[dict[str, Any], str | None]:
    """A tool in the templates' format, and its name if it is strict."""
    tool = convert(value, Tool, at)
    if not _NAME.fullmatch(tool.function.name):
        raise ApiError(f"{at} has the name {tool.function.name!r:.80}; names have 1 to 64 letters", param=at)
    function = {
        "name": tool.function.name,
        "description": tool.function.description or "",
        "parameters": tool.function.parameters or {"type": "object", "properties": {}},
    }
    strict = tool.function.name if tool.function.strict else None
    return {"type": "function", "function": function}, strict


_TEXTS = ("input_text", "output_text", "text")


class Item(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
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


class OutputItem(Item, kw_only=True):
    """A function's result."""

    call_id: str
    output: str | list[dict[str, Any]]


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
            texts = [
                {"type": "image_url", "image_url": {"url": part["image_url"]}}
                if part["type"] == "input_image"
                else {"type": "text", "text": part["text"]}
                for part in item["content"]
            ]
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
            message = f"no function_call before has the call_id {item['call_id']!r:.80} of an output"
            raise ApiError(message, param="input")


_ITEMS: dict[str, tuple[type[Item], str]] = {
    "message": (MessageItem, "msg_"),
    "function_call": (CallItem, "fc_"),
    "function_call_output": (OutputItem, "fco_"),
}


def _item(value: Any, at: str) -> dict[str, Any]:
    kind = value.get("type", "message") if isinstance(value, dict) else "message"
    if not isinstance(kind, str) or kind not in _ITEMS:
        message = f"{at} is of the type {kind!r:.40}; items are {', '.join(_ITEMS)}"
        raise ApiError(message, code="unsupported_content", param=f"{at}.type")
    form, prefix = _ITEMS[kind]
    item = convert(value, form, at)
    plain: dict[str, Any] = {"id": new_id(prefix), "type": kind, "status": "completed"}
    match item:
        case CallItem():
            arguments_of(item.arguments, f"{at}.arguments")
            return plain | {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
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
