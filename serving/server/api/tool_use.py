"""Reads the tools of a request and which of them the answer may or must call, in each format's form."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from jaxllm.serving.server.api.dialect import convert
from jaxllm.serving.server.api.errors import ApiError

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_TOOLS = 128


class ToolFunction(msgspec.Struct, kw_only=True):
    """The function of a tool."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool in OpenAI's chat format."""

    type: Literal["function"]
    function: ToolFunction


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolChoice:
    """Which tools an answer may or must call, whatever the request's format.

    Attributes:
      mode: "none", "auto" or "required".
      names: the tools that may be called; None for all.
      named: whether the one tool was named, rather than a list with it.
      several: whether an answer may have more than one call.
    """

    mode: str = "auto"
    names: tuple[str, ...] | None = None
    named: bool = False
    several: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The effect of a request's tools on its answers.

    Attributes:
      tools: tools for the template, in OpenAI's format.
      called: those of them that the answer may call.
      strict: names of the tools whose arguments must match their schemas.
      required, named, several: see `ToolChoice`.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    called: tuple[Mapping[str, Any], ...] = ()
    strict: tuple[str, ...] = ()
    required: bool = False
    named: bool = False
    several: bool = True


def openai_choice(value: Any, parallel: bool | None) -> ToolChoice:
    """`tool_choice` of chats and responses: none, auto, required, a function by its name, or allowed tools.
    Raises ApiError if it is none of them."""
    several = parallel is not False
    if value is None or value in ("none", "auto", "required"):
        return ToolChoice(mode=value or "auto", several=several)
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "function":
        return ToolChoice(mode="required", names=(_named(value),), named=True, several=False)
    if kind == "allowed_tools":
        inner = value.get("allowed_tools", value)
        inner = inner if isinstance(inner, Mapping) else {}
        mode, tools = inner.get("mode"), inner.get("tools")
        if (
            mode not in ("auto", "required")
            or not isinstance(tools, list)
            or not 1 <= len(tools) <= _MAX_TOOLS
        ):
            message = 'tool_choice of the type allowed_tools has a mode, "auto" or "required", and tools'
            raise ApiError(message, param="tool_choice")
        for index, each in enumerate(tools):
            require_function(each, f"tool_choice.tools[{index}]")
        return ToolChoice(mode=mode, names=tuple(map(_named, tools)), several=several)
    if isinstance(kind, str):
        require_function(value, "tool_choice")
    message = "tool_choice is none, auto, required, a function by its name, or allowed_tools"
    raise ApiError(f"{message}; got {value!r:.80}", param="tool_choice")


def require_function(value: Any, at: str) -> None:
    """Refuses, by its type, a tool that is no function of the caller's. Raises ApiError if it has another
    type."""
    kind = value.get("type") if isinstance(value, Mapping) else "function"
    if kind != "function":
        message = (
            f"{at} is of the type {kind!r:.40}, which this service does not run: leave it out, or give the "
            "model a tool of the type 'function', which the caller runs"
        )
        raise ApiError(message, code="unsupported_tool", param=f"{at}.type")


def tools_of(values: Sequence[Any] | None, choice: ToolChoice | None = None) -> ToolUse:
    """The effect of tools in OpenAI's chat format.

    Allowed tools that need not be called are the only ones that the template gets, so that the model does not
    call others; if one must be called, a grammar sees to it, and the prompt stays that of all tools. Raises
    ApiError if a tool is malformed or no function, or the choice requires or names one that is not given.
    """
    choice = choice or ToolChoice()
    if not values:
        if choice.mode == "required" or choice.names is not None:
            raise ApiError("tool_choice requires tools", param="tool_choice")
        return ToolUse()
    if len(values) > _MAX_TOOLS:
        raise ApiError(f"tools must have at most {_MAX_TOOLS} entries, got {len(values)}", param="tools")
    given = [_tool(value, f"tools[{index}]") for index, value in enumerate(values)]
    by_name = {tool["function"]["name"]: tool for tool, _ in given}
    if len(by_name) < len(given):
        raise ApiError("two tools have one name", param="tools")
    if choice.mode == "none":
        return ToolUse()
    names = tuple(by_name) if choice.names is None else tuple(dict.fromkeys(choice.names))
    if missing := [name for name in names if name not in by_name]:
        raise ApiError(f"tool_choice names {missing[0]!r:.80}, which is none of tools", param="tool_choice")
    called, required = tuple(by_name[name] for name in names), choice.mode == "required"
    return ToolUse(
        tools=tuple(by_name.values()) if required else called, called=called,
        strict=tuple(tool["function"]["name"] for tool, strict in given if strict), required=required,
        named=choice.named, several=choice.several,
    )  # fmt: skip


def _named(value: Mapping[str, Any]) -> str:
    """The name in a choice: within `function` in chats, beside `type` in responses."""
    function = value.get("function", value)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ApiError("tool_choice of the type function has a name", param="tool_choice")
    return name


def _tool(value: Any, at: str) -> tuple[dict[str, Any], bool]:
    """A tool in the templates' format, and whether it is strict."""
    require_function(value, at)
    tool = convert(value, Tool, at)
    if not _NAME.fullmatch(tool.function.name):
        message = (
            f"{at} has the name {tool.function.name!r:.80}; names have 1 to 64 letters, digits, _, . or -"
        )
        raise ApiError(message, param=at)
    function = {
        "name": tool.function.name,
        "description": tool.function.description or "",
        "parameters": tool.function.parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}, bool(tool.function.strict)
