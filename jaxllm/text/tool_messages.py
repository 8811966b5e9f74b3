"""Adapts tools and the messages with calls and results to a template: to the form that it requires, and to
plain texts where it knows no tools or leaves them out."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.text.answer_syntax import AnswerFormat, written

_INTRODUCTION = """You can call functions. These are their JSON schemas:
<tools>
{tools}
</tools>
To call one, write only this, once for each call, and wait for the results:
{example}"""
_EXAMPLE = {"name": "FUNCTION", "arguments": {"NAME": "VALUE"}}
_RESULT = "<tool_response>\n{text}\n</tool_response>"


def adapted(
    found: AnswerFormat, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages and tools as a template of this format requires them.

    Args:
      messages: messages, with arguments of calls as objects.
      tools: tools in OpenAI's format; none of them are returned if the messages describe them.
    """
    names = {
        call.get("id"): call.get("function", {}).get("name")
        for message in messages
        for call in message.get("tool_calls") or ()
        if isinstance(call, Mapping)
    }
    adapted_messages: list[dict[str, Any]] = []
    for message in messages:
        changed = dict(message)
        if calls := changed.get("tool_calls"):
            if not found.writes_calls:
                del changed["tool_calls"]
                functions = [{**call["function"], "id": call.get("id")} for call in calls]
                text = _text(changed.get("content"))
                changed["content"] = text + "\n" * bool(text) + written(found, functions)
            elif found.arguments_text:
                as_text = [json.dumps(call["function"]["arguments"]) for call in calls]
                changed["tool_calls"] = [
                    {**call, "function": {**call["function"], "arguments": text}}
                    for call, text in zip(calls, as_text, strict=True)
                ]
        elif changed["role"] == "tool":
            # Templates look up the name of the called tool in the result.
            if name := names.get(changed.get("tool_call_id")):
                changed.setdefault("name", name)
            if not found.writes_results:
                text = _RESULT.format(text=_text(changed.get("content")))
                last = adapted_messages[-1] if adapted_messages else {}
                if last.get("role") == "user" and last.get("results"):
                    last["content"] += f"\n{text}"
                    continue
                changed = {"role": "user", "content": text, "results": True}
        adapted_messages.append(changed)
    for message in adapted_messages:
        message.pop("results", None)
    if not (found.generic and tools):
        return adapted_messages, [dict(each) for each in tools]
    example = written(found, [_EXAMPLE])
    listed = "\n".join(json.dumps(each.get("function", each), ensure_ascii=False) for each in tools)
    text = _INTRODUCTION.format(tools=listed, example=example)
    first = adapted_messages[0] if adapted_messages else {}
    if first.get("role") == "system":
        first["content"] = f"{_text(first.get('content'))}\n\n{text}".lstrip()
    elif found.system or not adapted_messages:
        adapted_messages.insert(0, {"role": "system", "content": text})
    else:
        content = first.get("content")
        if isinstance(content, list):
            first["content"] = [{"type": "text", "text": f"{text}\n\n"}, *content]
        else:
            first["content"] = f"{text}\n\n{content or ''}"
    return adapted_messages, []


def _text(content: Any) -> str:
    """The text of a content."""
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "".join(str(each.get("text", "")) for each in content if isinstance(each, Mapping))
    return content or ""
