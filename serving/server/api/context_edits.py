"""Applies Anthropic's `context_management` to a conversation: clears old thoughts and results of tools."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from jaxllm.serving.server.api.errors import ApiError
from jaxllm.serving.server.backend import Backend
from jaxllm.serving.server.calls import Conversation

# Anthropic's defaults.
_TRIGGER_TOKENS, _KEPT_USES, _KEPT_THOUGHTS = 100_000, 3, 1
_CLEARED = "[cleared to save context]"


class Amount(msgspec.Struct, kw_only=True):
    """A number of tokens or of turns."""

    type: Literal["input_tokens", "tool_uses", "thinking_turns", "all"]
    value: int = 0


class Edit(msgspec.Struct, kw_only=True):
    """What to clear, and when."""

    type: Literal["clear_thinking_20251015", "clear_tool_uses_20250919"]
    keep: Literal["all"] | Amount | None = None
    trigger: Amount | None = None
    clear_at_least: Amount | None = None
    exclude_tools: list[str] = msgspec.field(default_factory=list)
    clear_tool_inputs: bool | list[str] = False


class ContextManagement(msgspec.Struct, kw_only=True):
    """Anthropic's `context_management`."""

    edits: Sequence[Edit] = ()


async def edited(
    backend: Backend, prompt: Conversation, management: ContextManagement
) -> tuple[Conversation, list[dict[str, Any]]]:
    """The conversation after its edits, and those that were applied, in Anthropic's format. Raises ApiError
    if an edit's amounts are of a wrong type, and JaxllmError (see `Backend.tokenize`)."""
    applied = []
    for edit in management.edits:
        tools = edit.type == "clear_tool_uses_20250919"
        messages, counts = _without_tool_uses(prompt, edit) if tools else _without_thoughts(prompt, edit)
        if messages is None:
            continue
        before = len(await backend.tokenize(prompt, longer=True))
        uses = sum(len(each.get("tool_calls", ())) for each in prompt.messages)
        trigger = edit.trigger or Amount(type="input_tokens", value=_TRIGGER_TOKENS)
        if tools and (before if trigger.type == "input_tokens" else uses) <= trigger.value:
            continue
        after = dataclasses.replace(prompt, messages=messages)
        cleared = before - len(await backend.tokenize(after, longer=True))
        if edit.clear_at_least is not None and cleared < edit.clear_at_least.value:
            continue
        prompt = after
        applied.append({"type": edit.type, "cleared_input_tokens": cleared, **counts})
    return prompt, applied


def _kept(edit: Edit, kind: str, default: int) -> int | None:
    """The number of a kind that an edit keeps; None for all. Raises ApiError for another kind."""
    if not isinstance(keep := edit.keep, Amount):
        return None if keep == "all" else default
    if keep.type not in (kind, "all"):
        raise ApiError(f"context_management keeps {kind} or all", param="context_management.edits")
    return None if keep.type == "all" else max(0, keep.value)


def _without_thoughts(prompt: Conversation, edit: Edit) -> tuple[tuple[Any, ...] | None, dict[str, int]]:
    """The messages without all but the last thoughts; None if there are no others."""
    if (keep := _kept(edit, "thinking_turns", _KEPT_THOUGHTS)) is None:
        return None, {}
    found = [index for index, each in enumerate(prompt.messages) if each.get("reasoning_content")]
    cleared = {*found[: len(found) - keep]}
    messages = tuple(
        {name: value for name, value in each.items() if name != "reasoning_content"}
        if index in cleared
        else each
        for index, each in enumerate(prompt.messages)
    )
    return messages if cleared else None, {"cleared_thinking_turns": len(cleared)}


def _without_tool_uses(prompt: Conversation, edit: Edit) -> tuple[tuple[Any, ...] | None, dict[str, int]]:
    """The messages with placeholders for all but the last results of tools; None if there are no others."""
    if (keep := _kept(edit, "tool_uses", _KEPT_USES)) is None:
        return None, {}
    calls = [call for each in prompt.messages for call in each.get("tool_calls", ())]
    may = [call["id"] for call in calls if call["function"]["name"] not in edit.exclude_tools]
    answered = {each.get("tool_call_id") for each in prompt.messages if each.get("content") != _CLEARED}
    cleared = {each for each in may[: len(may) - keep] if each in answered}
    inputs = edit.clear_tool_inputs

    def call_of(call: dict[str, Any]) -> dict[str, Any]:
        name = call["function"]["name"]
        if call["id"] in cleared and (inputs is True or (inputs and name in inputs)):
            return call | {"function": {"name": name, "arguments": {}}}
        return call

    messages = []
    for each in prompt.messages:
        if each.get("tool_call_id") in cleared:
            each = {**each, "content": _CLEARED}
        elif "tool_calls" in each:
            each = {**each, "tool_calls": [call_of(call) for call in each["tool_calls"]]}
        messages.append(each)
    return tuple(messages) if cleared else None, {"cleared_tool_uses": len(cleared)}
