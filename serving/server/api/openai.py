"""Serves OpenAI's /v1/chat/completions and /v1/completions, with log-probabilities of shown text."""

import codecs
import collections
import dataclasses
import math
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.responses import Response

from jaxllm.serving.server.api.errors import ApiError, api_error, openai_body
from jaxllm.serving.server.api.messages import messages_of, tools_of
from jaxllm.serving.server.api.params import (
    Prompt,
    SamplingFields,
    StreamOptions,
    call_of,
    calls_of,
    config_of,
    format_grammar,
)
from jaxllm.serving.server.api.requests import (
    DONE,
    ApiRequest,
    ApiState,
    Neutral,
    Streamed,
    event_frame,
    json_response,
    new_id,
    now_s,
)
from jaxllm.serving.server.api.streaming import Answer, Choice, Delta, first_delta
from jaxllm.serving.server.api.tools import ToolCall
from jaxllm.serving.server.calls import TokenLogprob

# JSON has no infinity; OpenAI's value for impossible tokens.
_LEAST = -9999.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggedToken:
    """A token of an answer's text.

    Attributes:
      token: its id and log-probability, and those of the most likely tokens.
      data: bytes of its text.
      top: bytes of the texts of the most likely tokens.
      offset: number of characters of the answer's text before it, or before the character that it is part of.
    """

    token: TokenLogprob
    data: bytes
    top: Sequence[bytes]
    offset: int


class LoggedText:
    """The tokens of one answer whose text is shown: possible beginnings of stop strings are withheld, and
    tokens from a stop string on are not part of the text."""

    def __init__(self, state: ApiState) -> None:
        self._state = state
        self._waiting: collections.deque[LoggedToken] = collections.deque()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begins, self._characters = True, 0

    async def take(self, news: Delta | Choice) -> list[LoggedToken]:
        """Adds new events of an answer, or all of it, and returns the tokens whose text is shown now."""
        for each in news.logprobs or ():
            ids = [each.token, *(token for token, _ in each.top)]
            data, *top = await self._state.token_bytes(ids, begins=self._begins)
            self._begins = False
            self._waiting.append(LoggedToken(token=each, data=data, top=top, offset=self._characters))
            self._characters += len(self._decoder.decode(data))
        ended, stopped = news.ended is not None, news.ended is not None and news.ended.stop_string is not None
        shown = []
        while self._waiting and (self._waiting[0].offset < news.characters or (ended and not stopped)):
            shown.append(self._waiting.popleft())
        if ended:
            self._waiting.clear()
        return shown


def chat_logprobs(tokens: Sequence[LoggedToken]) -> list[dict[str, Any]]:
    """The entries of tokens in chats and responses. If most likely tokens are requested, the sampled token is
    appended to them unless it is one."""
    return [
        _entry(each.data, each.token.logprob)
        | {"top_logprobs": [_entry(data, value) for _, data, value in _top(each, always=False)]}
        for each in tokens
    ]


def completion_logprobs(tokens: Sequence[LoggedToken]) -> dict[str, Any]:
    """`logprobs` of a completion's choice. The sampled token is always included; a token with the text of a
    likelier one is named by its id, because texts are the keys."""
    told: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for each in tokens:
        top: dict[str, float] = {}
        for token, data, value in _top(each, always=True):
            name = _name(data)
            top[f"token_id:{token}" if name in top else name] = _finite(value)
        told["tokens"].append(_name(each.data))
        told["token_logprobs"].append(_finite(each.token.logprob))
        told["top_logprobs"].append(top)
        told["text_offset"].append(each.offset)
    return told


def _top(each: LoggedToken, *, always: bool) -> list[tuple[int, bytes, float]]:
    """Ids, bytes and log-probabilities of the most likely tokens and the sampled one."""
    token = each.token
    top = [(id_, data, value) for (id_, value), data in zip(token.top, each.top, strict=True)]
    if (top or always) and all(id_ != token.token for id_, _, _ in top):
        top.append((token.token, each.data, token.logprob))
    return top


def _entry(data: bytes, value: float) -> dict[str, Any]:
    return {"token": data.decode(errors="replace"), "logprob": _finite(value), "bytes": list(data)}


def _name(data: bytes) -> str:
    """The text of a token; for a part of a character its bytes, in OpenAI's format."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(rf"\x{byte:02x}" for byte in data)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LEAST


MAX_TOP_LOGPROBS = 20


class ChatBody(SamplingFields, kw_only=True):
    """The supported fields of a chat."""

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
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None


CHAT_NEUTRAL: Neutral = {
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


async def chat(state: ApiState, request: ApiRequest) -> Response:
    """Answers a chat, as a whole or as server-sent events."""
    body = state.body(request, ChatBody, CHAT_NEUTRAL)
    facts, adapter = state.model(body.model)
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
    messages = messages_of(body.messages)
    prompt = await state.conversation(request.app, messages, use.tools, continue_final=_continues(body))
    config = config_of(
        state,
        body,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        stop=body.stop,
        logit_bias=body.logit_bias,
    )
    grammar = use.grammar or grammar
    call = call_of(state, request, body, config, adapter=adapter, tier=body.service_tier, grammar=grammar)
    if body.logprobs:
        call = dataclasses.replace(call, top_logprobs=body.top_logprobs or 0)
    answer = Answer.open(state.backend, calls_of(state, request, call, (prompt,), body.n), use.scanner)
    written = _Chat(state, answer, body, body.model or facts.name)
    if not body.stream:
        await answer.whole()
        return json_response(await written.whole())
    return Streamed(
        written.frames(await first_delta(answer)), answer.close, "text/event-stream", state.options.write_s
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
    state: ApiState
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
            logprobs = _logprobs(await LoggedText(self.state).take(choice)) if self.body.logprobs else None
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
        logged = [LoggedText(self.state) for _ in self.answer.choices]
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
                tokens = await logged[delta.index].take(delta) if self.body.logprobs else ()
                if told or tokens:
                    choice = {"index": delta.index, "delta": told, "logprobs": None, "finish_reason": None}
                    if tokens:
                        choice["logprobs"] = _logprobs(tokens)
                    yield event_frame({**base, "choices": [choice]})
                if delta.ended is not None:
                    reason = self.answer.choices[delta.index].finish_reason
                    choice = {"index": delta.index, "delta": {}, "logprobs": None, "finish_reason": reason}
                    facts = self.answer.choices[delta.index].facts()
                    yield event_frame({**base, "choices": [choice], "jaxllm": facts})
            if with_usage:
                facts = self.answer.facts()
                yield event_frame({**base, "choices": [], "usage": usage_of(self.answer), "jaxllm": facts})
        except Exception as error:  # The status is sent already, so an event must report it.
            yield event_frame(openai_body(api_error(error)))
        finally:
            await deltas.aclose()
        yield DONE


def _continues(body: ChatBody) -> bool | None:
    """Whether the answer continues the last message, by vLLM's two fields; None if neither is given."""
    continues, adds = body.continue_final_message, body.add_generation_prompt
    if continues is None:
        return None if adds is None else not adds
    if continues is adds:
        raise ApiError(
            "continue_final_message and add_generation_prompt are opposites: an answer continues the "
            "last message or begins a new one",
            param="continue_final_message",
        )
    return continues


def _logprobs(tokens: Sequence[LoggedToken]) -> dict[str, Any]:
    return {"content": chat_logprobs(tokens), "refusal": None}


def _called(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _response_grammar(value: dict[str, Any] | None) -> Any:
    if value is None:
        return None
    schema = value.get("json_schema")
    wrapped = schema if isinstance(schema, dict) else {}
    strict = wrapped.get("strict") is True
    return format_grammar(value.get("type"), wrapped.get("schema"), "response_format", strict=strict)


# OpenAI's defaults.
DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 20


class CompletionBody(SamplingFields, kw_only=True):
    """The supported fields of a completion."""

    prompt: str | list[Any]
    n: int = 1
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    stream_options: StreamOptions | None = None


_COMPLETION_NEUTRAL: Neutral = {"best_of": (1,), "echo": (False,), "suffix": ("",)}


async def completions(state: ApiState, request: ApiRequest) -> Response:
    """Continues texts, as a whole or as server-sent events."""
    body = state.body(request, CompletionBody, _COMPLETION_NEUTRAL)
    facts, adapter = state.model(body.model)
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
        raise ApiError(f"logprobs is 0 to {MAX_LOGPROBS}, got {body.logprobs}", param="logprobs")
    if body.stream_options is not None and not body.stream:
        raise ApiError("stream_options needs stream to be true", param="stream_options")
    prompts = prompts_of(body.prompt, "prompt")
    config = config_of(
        state,
        body,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        stop=body.stop,
        logit_bias=body.logit_bias,
    )
    call = call_of(state, request, body, config, adapter=adapter, tier=body.service_tier)
    call = dataclasses.replace(call, top_logprobs=body.logprobs)
    calls = calls_of(state, request, call, prompts, body.n)
    answer = Answer.open(state.backend, calls, None, prompts=len(prompts))
    base = {
        "id": new_id("cmpl-"),
        "object": "text_completion",
        "created": now_s(),
        "model": body.model or facts.name,
    }
    if body.stream:
        frames = _frames(state, answer, await first_delta(answer), base, body)
        return Streamed(frames, answer.close, "text/event-stream", state.options.write_s)
    await answer.whole()
    choices = []
    for index, choice in enumerate(answer.choices):
        logprobs = None
        if body.logprobs is not None:
            logprobs = completion_logprobs(await LoggedText(state).take(choice))
        told = {
            "index": index,
            "text": choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }
        choices.append(told)
    return json_response({**base, "choices": choices, "usage": usage_of(answer), "jaxllm": answer.facts()})


def prompts_of(value: str | list[Any], param: str) -> tuple[Prompt, ...]:
    """Parses OpenAI's four forms of prompts: a text, texts, token ids, lists of token ids.

    Raises:
      ApiError: it has another form, or is empty.
    """
    if isinstance(value, str):
        return (value,)
    if value and all(isinstance(each, str) for each in value):
        return tuple(value)
    if value and _ids(value):
        return (tuple(value),)
    if value and all(isinstance(each, list) and each and _ids(each) for each in value):
        return tuple(tuple(each) for each in value)
    raise ApiError(f"{param} is a text, a list of texts, of token ids, or of lists of token ids", param=param)


def _ids(values: list[Any]) -> bool:
    return all(type(each) is int and 0 <= each < 1 << 31 for each in values)


async def _frames(
    state: ApiState,
    answer: Answer,
    deltas: AsyncGenerator[Delta, None],
    base: dict[str, Any],
    body: CompletionBody,
) -> AsyncGenerator[bytes, None]:
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    logged = [LoggedText(state) for _ in answer.choices]
    try:
        async for delta in deltas:
            tokens = () if body.logprobs is None else await logged[delta.index].take(delta)
            if not (delta.text or tokens or delta.ended):
                continue
            choice: dict[str, Any] = {"index": delta.index, "text": delta.text, "logprobs": None}
            if tokens:
                choice["logprobs"] = completion_logprobs(tokens)
            choice["finish_reason"] = answer.choices[delta.index].finish_reason if delta.ended else None
            facts = {"jaxllm": answer.choices[delta.index].facts()} if delta.ended else {}
            yield event_frame({**base, "choices": [choice], **facts})
        if with_usage:
            yield event_frame({**base, "choices": [], "usage": usage_of(answer), "jaxllm": answer.facts()})
    except Exception as error:  # The status is sent already, so an event must report it.
        yield event_frame(openai_body(api_error(error)))
    finally:
        await deltas.aclose()
    yield DONE
