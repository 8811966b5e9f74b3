"""Answers OpenAI's /v1/completions: texts or token ids to continue."""

from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import Response

from serving.server.api.answering import Answer, Delta, first_delta
from serving.server.api.asking import Asked, Prompt, SamplingFields, StreamOptions, calls_of, config_of
from serving.server.api.bodies import Neutral
from serving.server.api.chat import usage_of
from serving.server.api.errors import ApiError, api_error, openai_body
from serving.server.api.front import Front, Visit, new_id, now_s
from serving.server.api.logprobs import completion_logprobs
from serving.server.api.streams import DONE, Streamed, event_frame, json_response

# OpenAI's.
DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 20


class CompletionBody(SamplingFields, kw_only=True):
    """The fields of a completion that are supported."""

    prompt: str | list[Any]
    n: int = 1
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    stream_options: StreamOptions | None = None


NEUTRAL: Neutral = {"best_of": (1,), "echo": (False,), "suffix": ("",)}


async def completions(front: Front, visit: Visit) -> Response:
    """Continues texts, whole or as server-sent events."""
    body = front.body(visit, CompletionBody, NEUTRAL)
    facts, adapter = front.model(body.model)
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
        raise ApiError(f"logprobs is 0 to {MAX_LOGPROBS}, got {body.logprobs}", param="logprobs")
    if body.stream_options is not None and not body.stream:
        raise ApiError("stream_options needs stream to be true", param="stream_options")
    asked = Asked(
        prompts=prompts_of(body.prompt, "prompt"),
        n=body.n,
        config=config_of(
            front,
            body,
            max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
            stop=body.stop,
            logit_bias=body.logit_bias,
        ),
        top_logprobs=body.logprobs,
    )
    calls = calls_of(front, visit, asked, body, adapter=adapter, tier=body.service_tier)
    answer = Answer.open(front.backend, calls, None, prompts=len(asked.prompts))
    base = {
        "id": new_id("cmpl-"),
        "object": "text_completion",
        "created": now_s(),
        "model": body.model or facts.name,
    }
    if body.stream:
        frames = _frames(front, answer, await first_delta(answer), base, body)
        return Streamed(frames, answer.close, "text/event-stream", front.options.write_s)
    await answer.whole()
    choices = []
    for index, choice in enumerate(answer.choices):
        logprobs = None
        if body.logprobs is not None:
            logprobs = await completion_logprobs(front, choice.logprobs)
        told = {
            "index": index,
            "text": choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }
        choices.append(told)
    return json_response({**base, "choices": choices, "usage": usage_of(answer), "jaxllm": answer.facts()})


def prompts_of(value: str | list[Any], param: str) -> tuple[Prompt, ...]:
    """OpenAI's four forms of prompts: a text, texts, token ids, lists of token ids.

    Raises:
      ApiError: it is none of them, or empty.
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
    front: Front,
    answer: Answer,
    deltas: AsyncGenerator[Delta, None],
    base: dict[str, Any],
    body: CompletionBody,
) -> AsyncGenerator[bytes, None]:
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    offsets = [0] * len(answer.choices)
    try:
        async for delta in deltas:
            if not (delta.text or delta.logprobs or delta.ended):
                continue
            choice: dict[str, Any] = {"index": delta.index, "text": delta.text, "logprobs": None}
            if delta.logprobs:
                choice["logprobs"] = await completion_logprobs(front, delta.logprobs, offsets[delta.index])
            offsets[delta.index] += len(delta.text)
            choice["finish_reason"] = answer.choices[delta.index].finish_reason if delta.ended else None
            facts = {"jaxllm": answer.choices[delta.index].facts()} if delta.ended else {}
            yield event_frame({**base, "choices": [choice], **facts})
        if with_usage:
            yield event_frame({**base, "choices": [], "usage": usage_of(answer), "jaxllm": answer.facts()})
    except Exception as error:  # The status is sent already, so that an event must tell of it.
        yield event_frame(openai_body(api_error(error)))
    finally:
        await deltas.aclose()
    yield DONE
