"""Serves OpenAI's /v1/chat/completions and /v1/completions, with log-probabilities of shown text."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

from starlette.responses import Response

from jaxllm.config import FULL_LEVEL
from jaxllm.errors import ContextOverflow
from jaxllm.serving.server.api.answers import (
    Answer,
    AnswerParams,
    answer_of,
    filled_in,
    prompt_ids_of,
    reasoning_in,
)
from jaxllm.serving.server.api.choices import AnswerPart, Choice
from jaxllm.serving.server.api.errors import ApiError, openai_body
from jaxllm.serving.server.api.fields import (
    CHAT,
    COMPLETION,
    ChatBody,
    CompletionBody,
    OpenAIBody,
    ReasoningFields,
    StreamOptions,
)
from jaxllm.serving.server.api.grammars import format_grammar
from jaxllm.serving.server.api.logprobs import (
    LoggedText,
    chat_logprobs,
    completion_logprobs,
    requested_logprobs,
)
from jaxllm.serving.server.api.messages import messages_of
from jaxllm.serving.server.api.reasoning import Switch
from jaxllm.serving.server.api.requests import (
    DONE,
    ApiRequest,
    ApiState,
    Streamed,
    event_frame,
    new_id,
    now_s,
)
from jaxllm.serving.server.api.scores import ScoredPrompt, scored_prompts
from jaxllm.serving.server.api.tool_use import ToolUse, openai_choice, tools_of
from jaxllm.serving.server.calls import CallPrompt, TextToScore
from jaxllm.text.answer_parts import CallArguments, CallBegins


async def chat(state: ApiState, request: ApiRequest) -> Response | dict[str, Any]:
    """Answers a chat, as a whole or as server-sent events."""
    body = state.body(request, CHAT)
    facts, adapter = state.model(body.model, adapter=body.adapter)
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise ApiError("max_tokens and max_completion_tokens differ; send one", param="max_tokens")
    options = body.usage_options
    top_logprobs = requested_logprobs(body.top_logprobs, body.logprobs, "logprobs to be true")
    use = tools_of(body.tools, openai_choice(body.tool_choice, body.parallel_tool_calls))
    also = body.reasoning or ReasoningFields()
    reasoning = reasoning_in(
        state, body,
        Switch("effort", body.reasoning_effort, "reasoning_effort"),
        Switch("effort", also.effort, "reasoning.effort"),
        Switch("budget", also.max_tokens, "reasoning.max_tokens"),
        Switch("wanted", also.enabled, "reasoning.enabled"),
    )  # fmt: skip
    form: dict[str, Any] = {"type": "text"} if body.response_format is None else body.response_format
    schema = form["json_schema"] if isinstance(form.get("json_schema"), dict) else {}
    params = AnswerParams(
        n=body.n,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        stop=body.stop, logit_bias=body.logit_bias, use=use, reasoning=reasoning,
        grammar=format_grammar(form.get("type"), schema.get("schema", form.get("schema")), "response_format"),
        top_logprobs=top_logprobs,
    )  # fmt: skip
    messages, continues = messages_of(body.messages), _continues(body)
    if continues is not False and [each["role"] for each in messages[-2:]] == ["assistant", "assistant"]:
        message = "two messages of the assistant are last, and the answer continues one: join them"
        raise ApiError(message, param="messages")
    prompt = await state.conversation(
        request.app, messages, use.tools, continue_final=continues, template_options=reasoning.options
    )
    scores: dict[str, Any] = {"prompt_logprobs": None}
    if (top := body.prompt_logprobs) is not None:
        if body.stream:
            raise ApiError("prompt_logprobs cannot be streamed", param="stream")
        text = TextToScore(tokens=(), top=top, adapter=adapter, keep=True)
        (scored,) = await scored_prompts(state, request, (prompt,), text)
        scores = {"prompt_logprobs": scored.prompt_logprobs(top)}
    answer = await answer_of(state, request, body, (prompt,), params)
    base: dict[str, Any] = {"id": new_id("chatcmpl-"), "created": now_s(), "model": body.model or facts.name}
    base |= {"system_fingerprint": state.fingerprint}
    base |= {} if body.service_tier is None else {"service_tier": body.service_tier}
    if body.stream:
        base |= {"object": "chat.completion.chunk"} | ({"usage": None} if options.include_usage else {})
        logged = [LoggedText(state) if body.logprobs else None for _ in answer.choices]
        return await _streamed(answer, base, _chat_deltas(logged, use), body, options)
    choices = []
    for choice in await answer.whole():
        called = {"tool_calls": [_called(call) for call in choice.calls]} if choice.calls else {}
        content = choice.text or (None if called else "")
        logprobs = await LoggedText(state).take(choice, whole=True)
        entry = {
            "index": choice.index,
            "message": {"role": "assistant", "content": content, "refusal": None, **called}
            | _reasoned(choice.reasoning),
            "logprobs": {"content": chat_logprobs(logprobs), "refusal": None} if body.logprobs else None,
            "finish_reason": _finish_reason(choice, use),
        }
        choices.append(entry)
    return _whole(answer, {**base, "object": "chat.completion"}, choices) | scores


async def count_tokens(state: ApiState, request: ApiRequest) -> dict[str, Any]:
    """Counts the tokens of a chat."""
    body = state.body(request, CHAT)
    state.model(body.model)
    use = tools_of(body.tools, openai_choice(body.tool_choice, body.parallel_tool_calls))
    prompt = await state.conversation(request.app, messages_of(body.messages), use.tools)
    return {"object": "chat.completion.input_tokens", "input_tokens": len(await prompt_ids_of(state, prompt))}


def _usage(answer: Answer) -> dict[str, Any]:
    prompt, cached, completion = answer.usage()
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
    }


def _whole(answer: Answer, base: dict[str, Any], choices: list[dict[str, Any]]) -> dict[str, Any]:
    own = {"jaxllm": answer.facts(), "timings": answer.choices[0].timings()}
    return {**base, "choices": choices, "usage": _usage(answer), **own}


# Makes the choices of the chunks that report an answer's news, without their indices.
_Deltas = Callable[[Choice], AsyncGenerator[dict[str, Any], None]]


async def _streamed(
    answer: Answer, base: dict[str, Any], deltas: _Deltas, body: OpenAIBody, options: StreamOptions
) -> Streamed:
    continuous = options.include_usage and options.continuous_usage_stats

    async def frames(news: AsyncIterator[Choice]) -> AsyncGenerator[bytes, None]:
        async for choice in news:
            async for entry in deltas(choice):
                more = {"jaxllm": choice.facts()} if entry["finish_reason"] else {}
                # Of one token there is no rate yet.
                if entry["finish_reason"] or (body.timings_per_token and len(choice.tokens) > 1):
                    more["timings"] = choice.timings()
                more |= {"usage": _usage(answer)} if continuous else {}
                yield event_frame({**base, "choices": [{"index": choice.index, **entry}], **more})
        if options.include_usage:
            yield event_frame(_whole(answer, base, []))

    return await answer.streamed(
        frames,
        lambda error: event_frame(openai_body(error)),
        end=DONE,
        progressed=lambda progress: event_frame({**base, "choices": [], "prompt_progress": progress}),
    )


def _chat_deltas(logged: Sequence[LoggedText | None], use: ToolUse) -> _Deltas:
    begun: set[int] = set()

    async def deltas(choice: Choice) -> AsyncGenerator[dict[str, Any], None]:
        index, delta = choice.index, dict[str, Any]()
        if index not in begun:
            begun.add(index)
            delta |= {"role": "assistant", "content": None}
        delta |= _reasoned(choice.new_reasoning)
        if choice.new_text:
            delta["content"] = choice.new_text
        calls: dict[int, dict[str, Any]] = {}
        for part in choice.new:
            # Names first, then pieces of the arguments, which clients join by the index.
            if isinstance(part, CallBegins):
                calls[part.index] = {"index": part.index, **_called(choice.calls[part.index], "")}
            elif isinstance(part, CallArguments):
                call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += part.text
        if calls:
            delta["tool_calls"] = list(calls.values())
        log = logged[index]
        tokens = () if log is None else await log.take(choice)
        if delta or tokens:
            logprobs = {"content": chat_logprobs(tokens), "refusal": None} if tokens else None
            yield {"delta": delta, "logprobs": logprobs, "finish_reason": None}
        if choice.ended is not None:
            yield {"delta": {}, "logprobs": None, "finish_reason": _finish_reason(choice, use)}

    return deltas


def _reasoned(text: str) -> dict[str, str]:
    """Reasoning by both names that clients read: DeepSeek's, and that of OpenRouter and vLLM."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _finish_reason(choice: Choice, use: ToolUse) -> str:
    """OpenAI's own ends with "stop" where the caller named the tool, because the model did not choose."""
    reason = choice.finish_reason
    return "stop" if reason == "tool_calls" and use.named else reason


def _called(call: AnswerPart, arguments: str | None = None) -> dict[str, Any]:
    text = call.text if arguments is None else arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": text}}


def _continues(body: ChatBody) -> bool | None:
    """Whether the answer continues the last message, by vLLM's two fields; None if neither is given."""
    continues, adds = body.continue_final_message, body.add_generation_prompt
    if continues is None:
        return None if adds is None else not adds
    if continues is adds:
        message = "continue_final_message and add_generation_prompt are opposites: send one"
        raise ApiError(message, param="continue_final_message")
    return continues


# OpenAI's default.
_MAX_TOKENS = 16


async def completions(state: ApiState, request: ApiRequest) -> Response | dict[str, Any]:
    """Continues texts, as a whole or as server-sent events."""
    body = state.body(request, COMPLETION)
    facts, adapter = state.model(body.model, adapter=body.adapter)
    options = body.usage_options
    params = AnswerParams(
        n=body.n, max_tokens=_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        stop=body.stop, logit_bias=body.logit_bias, top_logprobs=body.logprobs,
    )  # fmt: skip
    most = state.answers_per_request
    prompts = prompts_of(body.prompt, "prompt", window_tokens=facts.window_tokens, most=most)
    prompts = tuple(filled_in(facts, each, body.suffix) for each in prompts)
    base = {"id": new_id("cmpl-"), "object": "text_completion", "created": now_s()}
    base |= {"model": body.model or facts.name, "system_fingerprint": state.fingerprint}
    prompts, scored = await _scored(state, request, body, prompts, adapter)
    if body.scores_only:
        choices = [
            {"index": index, **_after({"text": "", "logprobs": None, "finish_reason": "length"}, each, body)}
            for index, each in enumerate(scored)
        ]
        tokens = sum(len(each.ids) for each in scored)
        usage = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
        return {**base, "choices": choices, "usage": usage, "jaxllm": {"level": body.level or FULL_LEVEL}}
    answer = await answer_of(state, request, body, prompts, params)
    logged, begun = [LoggedText(state) for _ in answer.choices], set[int]()

    async def entry(choice: Choice, text: str, *, whole: bool) -> dict[str, Any]:
        tokens = None if body.logprobs is None else await logged[choice.index].take(choice, whole=whole)
        logprobs = completion_logprobs(tokens) if tokens or (whole and tokens is not None) else None
        reason = choice.finish_reason if choice.ended else None
        found = {"text": text, "logprobs": logprobs, "finish_reason": reason}
        found |= {} if body.stream else {"prompt_logprobs": None}
        if not scored:
            return found
        prompt = scored[choice.index // body.n]
        if logprobs is not None and body.echo:
            logprobs["text_offset"] = [len(prompt.text) + each for each in logprobs["text_offset"]]
        if choice.index in begun:
            return found
        begun.add(choice.index)
        return _after(found, prompt, body)

    async def deltas(choice: Choice) -> AsyncGenerator[dict[str, Any], None]:
        part = await entry(choice, choice.new_text, whole=False)
        if any(part.values()):
            yield part

    if body.stream:
        return await _streamed(answer, base, deltas, body, options)
    ended = await answer.whole()
    choices = [{"index": each.index, **await entry(each, each.text, whole=True)} for each in ended]
    return _whole(answer, base, choices)


async def _scored(
    state: ApiState,
    request: ApiRequest,
    body: CompletionBody,
    prompts: tuple[CallPrompt, ...],
    adapter: str,
) -> tuple[tuple[CallPrompt, ...], list[ScoredPrompt]]:
    """The prompts, as ids if they were scored, and what the response says about them; nothing if it says
    nothing. Raises ApiError if fields exclude each other."""
    if body.level is not None and not body.scores_only:
        message = "level is that of scores: send max_tokens 0, too, or an objective (slo) for an answer"
        raise ApiError(message, param="level")
    if not (body.echo or body.with_scores or body.scores_only):
        return prompts, []
    for name, given, why in (
        ("stream", body.stream and body.scores_only, "max_tokens 0 gives no text to stream"),
        ("stream", body.stream and body.prompt_logprobs is not None, "prompt_logprobs cannot be streamed"),
        ("n", body.n > 1 and body.scores_only, "max_tokens 0 gives no answers; leave n out"),
        ("conversation", body.conversation, "echo and scores are of whole prompts, not of turns"),
        ("shorten", body.shorten, "echo and scores are of whole prompts; leave shorten out"),
    ):
        if given:
            raise ApiError(why, param=name)
    shown = max(body.prompt_logprobs or 0, (body.logprobs or 0) * body.echo)
    # Without scores a prompt is computed for the next call that begins with it.
    keep = not (body.with_scores and body.scores_only)
    text = TextToScore(tokens=(), top=shown, level=body.level, adapter=adapter, keep=keep)
    wanted = body.with_scores or body.scores_only
    found = await scored_prompts(state, request, prompts, text, scored=wanted)
    return tuple(each.ids for each in found) if wanted else prompts, found


def _after(entry: dict[str, Any], prompt: ScoredPrompt, body: CompletionBody) -> dict[str, Any]:
    """The entry of an answer's first text, after what was asked for of its prompt."""
    if body.echo:
        entry["text"] = prompt.text + entry["text"]
        if body.logprobs is not None:
            before = prompt.completion_logprobs(body.logprobs)
            own = entry["logprobs"] or {name: [] for name in before}
            entry["logprobs"] = {name: [*each, *own[name]] for name, each in before.items()}
    if body.prompt_logprobs is not None:
        entry["prompt_logprobs"] = prompt.prompt_logprobs(body.prompt_logprobs)
    return entry


def prompts_of(
    value: str | list[Any], param: str, *, window_tokens: int, most: int
) -> tuple[CallPrompt, ...]:
    """Parses OpenAI's four forms of prompts: a text, texts, token ids, lists of token ids. Sizes are checked
    first: millions of ids would keep other answers waiting.

    Raises:
      ApiError: it has another form, is empty, or has more than `most` prompts.
      ContextOverflow: a prompt has more ids than the window.
    """
    if isinstance(value, str):
        return (value,)
    prompts: list[Any] = [value] if value and type(value[0]) is int else value
    if len(prompts) > most:
        raise ApiError(f"{param} must have at most {most} entries, got {len(prompts)}", param=param)
    if (longest := max((len(each) for each in prompts if isinstance(each, list)), default=0)) > window_tokens:
        raise ContextOverflow(f"{param} has {longest} tokens; at most {window_tokens} fit; shorten it")
    if prompts and all(isinstance(each, str) for each in prompts):
        return tuple(prompts)
    lists = [each for each in prompts if isinstance(each, list) and each]
    ids = (token for each in lists for token in each)
    if len(lists) == len(prompts) > 0 and all(type(each) is int and 0 <= each < 1 << 31 for each in ids):
        return tuple(map(tuple, lists))
    raise ApiError(f"{param} is a text, a list of texts, of token ids, or of lists of token ids", param=param)
