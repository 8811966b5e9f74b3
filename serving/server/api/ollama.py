"""Answers Ollama's /api/chat and /api/generate as a thin layer over the same calls."""

import datetime
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import msgspec

from jaxllm.serving.server.api.answers import (
    SAMPLING,
    AnswerParams,
    answer_of,
    reasoning_in,
)
from jaxllm.serving.server.api.choices import AnswerPart, Choice
from jaxllm.serving.server.api.dialect import ignore
from jaxllm.serving.server.api.errors import ApiError, ollama_body
from jaxllm.serving.server.api.fields import (
    GENERATE,
    OLLAMA_CHAT,
    Extensions,
    OllamaBody,
    OllamaChatBody,
    SamplingFields,
)
from jaxllm.serving.server.api.grammars import format_grammar
from jaxllm.serving.server.api.messages import messages_of
from jaxllm.serving.server.api.reasoning import Reasoning, Switch
from jaxllm.serving.server.api.requests import ApiRequest, ApiState
from jaxllm.serving.server.api.tool_use import ToolUse, openai_choice, tools_of
from jaxllm.serving.server.calls import CallPrompt
from jaxllm.text.answer_parts import CallEnds
from jaxllm.version import __version__

# Ollama's default.
_TEMPERATURE = 0.8


class ShowBody(msgspec.Struct, kw_only=True):
    """/api/show."""

    model: str
    verbose: bool = False


async def chat(state: ApiState, request: ApiRequest) -> Any:
    """Answers a chat."""
    body = state.body(request, OLLAMA_CHAT)
    state.model(body.model, tagged=True)
    use, reasoning = tools_of(body.tools, openai_choice(body.tool_choice, None)), _reasoning(state, body)
    messages = messages_of([_message(each, f"messages[{index}]") for index, each in enumerate(body.messages)])
    prompt = await state.conversation(request.app, messages, use.tools, template_options=reasoning.options)
    return await _answer(state, request, body, prompt, use, reasoning)


async def generate(state: ApiState, request: ApiRequest) -> Any:
    """Answers a prompt by the chat template, or continues it unchanged (`raw`)."""
    body = state.body(request, GENERATE)
    facts, _ = state.model(body.model, tagged=True)
    if body.raw or not facts.has_chat_template:
        for name in ("system", "images", "think"):
            if getattr(body, name):
                raise ApiError(f"{name} needs a chat template, which a raw prompt does not use", param=name)
        return await _answer(state, request, body, body.prompt)
    turns = [("system", body.system), ("user", body.prompt)]
    messages: list[dict[str, Any]] = [
        {"role": role, "content": text} for role, text in turns if text is not None
    ]
    if body.images:
        messages[-1]["content"] = _with_images(body.prompt, body.images, "images")
    reasoning, plain = _reasoning(state, body), messages_of(messages, "prompt")
    conversation = await state.conversation(request.app, plain, template_options=reasoning.options)
    return await _answer(state, request, body, conversation, reasoning=reasoning)


async def tags(state: ApiState, request: ApiRequest) -> dict[str, Any]:
    """Lists the models."""
    facts = state.backend.facts()
    names = [f"{facts.name}:latest", *(f"{facts.name}:{adapter}" for adapter in facts.adapters)]
    opened = _time(facts.opened_s)
    facts_of = {"modified_at": opened, "size": 0, "digest": ""}
    return {"models": [{"name": name, "model": name, **facts_of} for name in names]}


async def show(state: ApiState, request: ApiRequest) -> dict[str, Any]:
    """Facts of a model."""
    facts, _ = state.model(state.body(request, ShowBody).model, tagged=True)
    info = {"general.context_length": facts.window_tokens, "general.vocab_size": facts.vocab_size}
    answer_format = facts.answer_format
    able = ["completion", *["tools"] * facts.has_chat_template, *["vision"] * facts.images]
    able += ["thinking"] * answer_format.thinks
    own = {"details": {"family": "jaxllm"}, "template": facts.chat_template}
    return {**own, "model_info": info, "capabilities": able}


async def version(state: ApiState, request: ApiRequest) -> dict[str, Any]:
    """The version of this service."""
    return {"version": __version__}


def _reasoning(state: ApiState, body: OllamaBody) -> Reasoning:
    think = body.think
    kind = "effort" if isinstance(think, str) else "wanted"
    return reasoning_in(state, body, Switch(kind, think, "think"))


async def _answer(
    state: ApiState,
    request: ApiRequest,
    body: OllamaBody,
    prompt: CallPrompt,
    use: ToolUse | None = None,
    reasoning: Reasoning | None = None,
) -> Any:
    facts, adapter = state.model(body.model, tagged=True)
    options = body.options
    if (options.num_ctx or 0) > facts.window_tokens:
        # Clients send it for any model. The window stays, and a prompt that exceeds it is refused.
        ignore("options.num_ctx")
    fields = SamplingFields(
        **{name: getattr(options, name) for name in SAMPLING},
        **{name: getattr(body, name) for name in Extensions.__struct_fields__},
    )
    grammar, form = None, body.format
    if isinstance(form, dict):
        grammar = format_grammar("json_schema", form, "format")
    elif form:
        grammar = format_grammar("json_object" if form == "json" else form, None, "format")
    params = AnswerParams(
        adapter=adapter,
        max_tokens=options.num_predict,
        stop=options.stop,
        temperature=_TEMPERATURE,
        use=use or ToolUse(),
        reasoning=reasoning or Reasoning(),
        grammar=grammar,
    )
    answer = await answer_of(state, request, fields, (prompt,), params)
    is_chat = isinstance(body, OllamaChatBody)

    async def frames(news: AsyncIterator[Choice]) -> AsyncGenerator[bytes, None]:
        async for choice in news:
            # A call has its arguments as an object, so that it comes when it is whole.
            calls = [choice.calls[each.index] for each in choice.new if isinstance(each, CallEnds)]
            text, thought = choice.new_text, choice.new_reasoning
            if text or thought or calls:
                yield _line(_part(body.model, text, thought, calls, is_chat=is_chat))
            if choice.ended is not None:
                yield _line(_part(body.model, "", "", (), is_chat=is_chat) | _end(choice))

    if body.stream:
        return await answer.streamed(
            frames, lambda error: _line(ollama_body(error)), media_type="application/x-ndjson"
        )
    (choice,) = await answer.whole()
    calls = choice.whole_calls
    return _part(body.model, choice.text, choice.reasoning, calls, is_chat=is_chat) | _end(choice)


def _line(data: Any) -> bytes:
    return msgspec.json.encode(data) + b"\n"


def _part(
    model: str, text: str, thought: str, calls: Sequence[AnswerPart], *, is_chat: bool
) -> dict[str, Any]:
    part: dict[str, Any] = {"model": model, "created_at": _time(None), "done": False}
    thinking = {"thinking": thought} if thought else {}
    if not is_chat:
        return part | {"response": text} | thinking
    message: dict[str, Any] = {"role": "assistant", "content": text, **thinking}
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "function": {"name": call.name, "arguments": msgspec.json.decode(call.text or "{}")},
            }
            for call in calls
        ]
    return part | {"message": message}


def _end(choice: Choice) -> dict[str, Any]:
    start, end = choice.started, choice.ended
    assert start is not None
    assert end is not None
    ttft_ns, decode_ns = int(1e6 * end.ttft_ms), int(1e6 * end.tpot_ms * max(0, end.tokens - 1))
    return {
        "done": True, "done_reason": "length" if choice.finish_reason == "length" else "stop",
        "total_duration": ttft_ns + decode_ns, "load_duration": 0,
        "prompt_eval_count": start.prompt_tokens, "prompt_eval_duration": ttft_ns,
        "eval_count": end.tokens, "eval_duration": decode_ns, "jaxllm": choice.facts(),
    }  # fmt: skip


def _time(at_s: float | None) -> str:
    zone = datetime.UTC
    now = datetime.datetime.now(zone) if at_s is None else datetime.datetime.fromtimestamp(at_s, zone)
    return now.isoformat().replace("+00:00", "Z")


def _with_images(text: Any, images: Any, at: str) -> list[dict[str, Any]]:
    """A message's text after its images, which Ollama sends in base64, as parts of OpenAI's chats."""
    if not isinstance(images, list) or not all(isinstance(each, str) for each in images):
        raise ApiError(f"{at}: images is a list of images in base64", param=at)
    urls = [f"data:image/any;base64,{each}" for each in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*parts, {"type": "text", "text": text}] if text else parts


def _message(value: dict[str, Any], at: str) -> dict[str, Any]:
    known = value.keys() - {"images", "thinking"}
    plain = {"reasoning_content": value["thinking"]} if value.get("thinking") else {}
    plain |= {name: each for name, each in value.items() if name in known and each is not None}
    if value.get("images"):
        plain["content"] = _with_images(value.get("content"), value["images"], at)
    if "tool_name" in plain:
        plain["name"] = plain.pop("tool_name")
    return plain
