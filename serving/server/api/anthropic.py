"""Answers Anthropic's /v1/messages as a thin layer over the same calls."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from jaxllm.serving.server.api.answers import AnswerParams, Choice, SamplingFields, ToolCall, answer_of
from jaxllm.serving.server.api.errors import ApiError, anthropic_body
from jaxllm.serving.server.api.messages import ToolUse, messages_of, text_of, tools_of
from jaxllm.serving.server.api.requests import ApiRequest, ApiState, Neutral, event_frame, new_id
from jaxllm.serving.server.calls import Conversation

# With a value of Anthropic's own.
_Tier = Literal["auto", "default", "flex", "priority", "standard_only"]


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Anthropic's `tool_choice`; `name` is the name of a tool."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool in Anthropic's format, other than those of its servers."""

    name: Any = None
    description: Any = None
    input_schema: Any = None
    type: Literal["custom"] | None = None
    cache_control: Any = None
    strict: Any = None


class CountBody(SamplingFields, kw_only=True):
    """Fields of both paths."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    service_tier: _Tier | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


class MessagesBody(CountBody, kw_only=True):
    """/v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None


NEUTRAL: Neutral = {"thinking": ({"type": "disabled"},), "container": (), "mcp_servers": ([],)}


async def create(state: ApiState, request: ApiRequest) -> Response | dict[str, Any]:
    """Answers messages, as a whole or as events."""
    body = state.body(request, MessagesBody, NEUTRAL)
    facts, adapter = state.model(body.model)
    conversation, use = await _conversation(state, request, body)
    params = AnswerParams(adapter=adapter, max_tokens=body.max_tokens, stop=body.stop_sequences, use=use)
    answer = answer_of(state, request, body, (conversation,), params)
    model = body.model or facts.name
    if body.stream:
        return await answer.streamed(
            lambda news: _frames(news, model), lambda error: event_frame(anthropic_body(error), "error")
        )
    (choice,) = await answer.whole()
    content: list[dict[str, Any]] = [{"type": "text", "text": choice.text}] if choice.text else []
    content += [_tool_use(one) | {"input": msgspec.json.decode(one.arguments)} for one in choice.tool_calls]
    message = _message(model, choice) | {"content": content, **_stop(choice), "jaxllm": choice.facts()}
    message["usage"]["output_tokens"] = choice.ended.tokens if choice.ended else 0
    return message


async def count_tokens(state: ApiState, request: ApiRequest) -> dict[str, int]:
    """Counts the tokens of messages."""
    body = state.body(request, CountBody, NEUTRAL)
    state.model(body.model)
    conversation, _ = await _conversation(state, request, body)
    return {"input_tokens": len(await state.backend.tokenize(conversation))}


async def _conversation(
    state: ApiState, request: ApiRequest, body: CountBody
) -> tuple[Conversation, ToolUse]:
    messages: list[dict[str, Any]] = []
    if body.system is not None:
        messages.append({"role": "system", "content": text_of(body.system, "system")})
    for index, value in enumerate(body.messages):
        messages += _messages(value, f"messages[{index}]")
    tools = []
    for each in body.tools or ():
        function = {name: getattr(each, name) for name in ("name", "description", "strict")}
        tools.append({"type": "function", "function": function | {"parameters": each.input_schema}})
    choice = body.tool_choice or ToolChoice(type="auto")
    named = {"type": "function", "function": {"name": choice.name}} if choice.type == "tool" else None
    chosen = named or {"any": "required"}.get(choice.type, choice.type if body.tool_choice else None)
    parallel = not choice.disable_parallel_tool_use
    use = tools_of(tools, chosen, parallel, state.backend.facts().answer_format)
    return await state.conversation(request.app, messages_of(messages), use.tools), use


def _messages(value: Mapping[str, Any], at: str) -> list[dict[str, Any]]:
    """A message in OpenAI's format; several if it has results of tools."""
    role, content = value.get("role"), value.get("content")
    if {*value} - {"role", "content"} or role not in ("user", "assistant"):
        raise ApiError(f"{at} has a role, user or assistant, and a content", param=at)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not content:
        raise ApiError(f"{at}.content is a text or a list of blocks", param=at)
    results, texts, calls = [], [], []
    for place, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            inner = block.get("content")
            blocks = inner if isinstance(inner, list) else []
            if not isinstance(inner, str | list | None) or not all(isinstance(each, dict) for each in blocks):
                raise ApiError(f"{at}.content[{place}] has no text", param=at)
            text = text_of(inner, f"{at}.content[{place}].content")
            results.append({"role": "tool", "content": text, "tool_call_id": block.get("tool_use_id")})
        elif kind == "image" and role == "user":
            source = block.get("source")
            source = source if isinstance(source, dict) else {}
            if (kind := source.get("type")) != "base64":
                wrong = f"{at}.content[{place}].source is base64, got {kind!r:.40}: nothing is fetched"
                raise ApiError(wrong, param=f"{at}.content[{place}]")
            url = f"data:{source.get('media_type')};base64,{source.get('data')}"
            texts.append({"type": "image_url", "image_url": {"url": url}})
        elif isinstance(block, dict):
            texts.append({"type": "text", "text": text_of([block], f"{at}.content")})
        else:
            raise ApiError(f"{at}.content[{place}] is no block", param=at)
    if not texts and not calls:
        return results
    message: dict[str, Any] = {"role": role, "content": texts}
    return [*results, message | ({"tool_calls": calls} if calls else {})]


def _message(model: str, choice: Choice) -> dict[str, Any]:
    start = choice.started
    assert start is not None
    usage = {
        "input_tokens": start.prompt_tokens - start.reused_tokens,
        "cache_read_input_tokens": start.reused_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": 0,
    }
    message = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model, "content": []}
    return message | {"stop_reason": None, "stop_sequence": None, "usage": usage}


def _stop(choice: Choice) -> dict[str, Any]:
    end = choice.ended
    assert end is not None
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    usual = "end_turn" if end.stop_string is None else "stop_sequence"
    return {"stop_reason": reasons.get(choice.finish_reason, usual), "stop_sequence": end.stop_string}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


async def _frames(news: AsyncIterator[Choice], model: str) -> AsyncGenerator[bytes, None]:
    def event(kind: str, **fields: Any) -> bytes:
        return event_frame({"type": kind, **fields}, kind)

    block, is_text, choice = -1, False, None
    async for each in news:
        if choice is None:
            choice = each
            yield event("message_start", message=_message(model, choice))
        if choice.new_text:
            if not is_text:
                block, is_text = block + 1, True
                yield event("content_block_start", index=block, content_block={"type": "text", "text": ""})
            delta = {"type": "text_delta", "text": choice.new_text}
            yield event("content_block_delta", index=block, delta=delta)
        for call in choice.new_calls:
            if is_text:
                yield event("content_block_stop", index=block)
            block, is_text = block + 1, False
            yield event("content_block_start", index=block, content_block=_tool_use(call) | {"input": {}})
            part = {"type": "input_json_delta", "partial_json": call.arguments}
            yield event("content_block_delta", index=block, delta=part)
            yield event("content_block_stop", index=block)
    if is_text:
        yield event("content_block_stop", index=block)
    assert choice is not None
    assert choice.ended is not None
    usage = {"output_tokens": choice.ended.tokens}
    yield event("message_delta", delta=_stop(choice), usage=usage, jaxllm=choice.facts())
    yield event("message_stop")
