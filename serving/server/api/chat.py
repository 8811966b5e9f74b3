"""Answers OpenAI's /v1/chat/completions."""

import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import Response

from serving.server.api.answering import Answer, Delta, first_delta
from serving.server.api.asking import (
    Asked,
    SamplingFields,
    StreamOptions,
    calls_of,
    config_of,
    format_grammar,
)
from serving.server.api.bodies import Neutral
from serving.server.api.errors import ApiError, api_error, openai_body
from serving.server.api.front import Front, Visit, new_id, now_s
from serving.server.api.logprobs import chat_logprobs
from serving.server.api.messages import messages_of, tools_of
from serving.server.api.streams import DONE, Streamed, event_frame, json_response
from serving.server.api.tools.scanner import ToolCall

MAX_TOP_LOGPROBS = 20


class ChatBody(SamplingFields, kw_only=True):
    """The fields of a chat that are supported."""

    messages: list[Any]
    n: int = 1
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None


NEUTRAL: Neutral = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


async def chat(front: Front, visit: Visit) -> Response:
    """Answers a chat, whole or as server-sent events."""
    body = front.body(visit, ChatBody, NEUTRAL)
    facts, adapter = front.model(body.model)
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise ApiError("max_tokens and max_completion_tokens differ; send one", param="max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if not 0 <= (body.top_logprobs or 0) <= MAX_TOP_LOGPROBS:
        raise ApiError(
            f"top_logprobs is 0 to {MAX_TOP_LOGPROBS}, got {body.top_logprobs}", param="top_logprobs"
        )
    if body.stream_options is not None and not body.stream:
        raise ApiError("stream_options needs stream to be true", param="stream_options")
    use = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls, facts.chat_template)
    grammar = _response_grammar(body.response_format)
    if use.tools and (grammar or body.grammar):
        raise ApiError("tools cannot stand beside a response format or grammar", param="tools")
    asked = Asked(
        prompts=(await front.conversation(visit.app, messages_of(body.messages), use.tools),),
        n=body.n,
        config=config_of(
            front,
            body,
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            stop=body.stop,
            logit_bias=body.logit_bias,
        ),
        grammar=use.grammar or grammar,
        scanner=use.scanner,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    calls = calls_of(front, visit, asked, body, adapter=adapter, tier=body.service_tier)
    answer = Answer.open(front.backend, calls, use.scanner)
    written = _Chat(front, answer, body, body.model or facts.name)
    if not body.stream:
        await answer.whole()
        return json_response(await written.whole())
    return Streamed(
        written.frames(await first_delta(answer)), answer.close, "text/event-stream", front.options.write_s
    )


def usage_of(answer: Answer) -> dict[str, Any]:
    """OpenAI's `usage`."""
    prompt, cached, completion = answer.usage()
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


@dataclasses.dataclass
class _Chat:
    front: Front
    answer: Answer
    body: ChatBody
    model: str

    def __post_init__(self) -> None:
        self.base = {
            "id": new_id("chatcmpl-"),
            "created": now_s(),
            "model": self.model,
            "system_fingerprint": None,
        }
        if self.body.service_tier is not None:
            self.base["service_tier"] = self.body.service_tier

    async def whole(self) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(self.answer.choices):
            calls = [_called(call) for call in choice.tool_calls]
            message: dict[str, Any] = {
                "role": "assistant",
                "content": choice.text or (None if calls else ""),
                "refusal": None,
            }
            if calls:
                message["tool_calls"] = calls
            logprobs = await chat_logprobs(self.front, choice.logprobs) if self.body.logprobs else None
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": logprobs,
                    "finish_reason": choice.finish_reason,
                }
            )
        usage, facts = usage_of(self.answer), self.answer.facts()
        return {**self.base, "object": "chat.completion", "choices": choices, "usage": usage, "jaxllm": facts}

    async def frames(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[bytes, None]:
        base = {**self.base, "object": "chat.completion.chunk"}
        with_usage = self.body.stream_options is not None and self.body.stream_options.include_usage
        if with_usage:
            base["usage"] = None
        begun: set[int] = set()
        called: dict[int, int] = {}
        try:
            async for delta in deltas:
                told: dict[str, Any] = {}
                if delta.index not in begun:
                    begun.add(delta.index)
                    told |= {"role": "assistant", "content": ""}
                if delta.text:
                    told["content"] = delta.text
                if delta.tool_calls:
                    first = called.get(delta.index, 0)
                    called[delta.index] = first + len(delta.tool_calls)
                    told["tool_calls"] = [
                        {"index": first + place, **_called(call)}
                        for place, call in enumerate(delta.tool_calls)
                    ]
                if told or delta.logprobs:
                    choice = {"index": delta.index, "delta": told, "logprobs": None, "finish_reason": None}
                    if self.body.logprobs and delta.logprobs:
                        choice["logprobs"] = await chat_logprobs(self.front, delta.logprobs)
                    yield event_frame({**base, "choices": [choice]})
                if delta.ended is not None:
                    reason = self.answer.choices[delta.index].finish_reason
                    choice = {"index": delta.index, "delta": {}, "logprobs": None, "finish_reason": reason}
                    facts = self.answer.choices[delta.index].facts()
                    yield event_frame({**base, "choices": [choice], "jaxllm": facts})
            if with_usage:
                facts = self.answer.facts()
                yield event_frame({**base, "choices": [], "usage": usage_of(self.answer), "jaxllm": facts})
        except Exception as error:  # The status is sent already, so that an event must tell of it.
            yield event_frame(openai_body(api_error(error)))
        finally:
            await deltas.aclose()
        yield DONE


def _called(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _response_grammar(value: dict[str, Any] | None) -> Any:
    if value is None:
        return None
    schema = value.get("json_schema")
    inner = schema.get("schema") if isinstance(schema, dict) else None
    return format_grammar(value.get("type"), inner, "response_format")
