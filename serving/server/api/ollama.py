"""Serves Ollama's paths as a thin layer over the same calls. One model is served, and stays loaded."""

import asyncio
import dataclasses
import datetime
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from jaxllm.errors import CheckpointError, JaxllmError
from jaxllm.formats import HUB
from jaxllm.serving.server.api.answers import (
    SAMPLING,
    AnswerParams,
    answer_of,
    filled_in,
    prompt_ids_of,
    reasoning_in,
)
from jaxllm.serving.server.api.choices import AnswerPart, Choice
from jaxllm.serving.server.api.dialect import ignore
from jaxllm.serving.server.api.errors import ApiError, api_error, ollama_body
from jaxllm.serving.server.api.fields import (
    EMBED,
    GENERATE,
    OLLAMA_CHAT,
    PULL,
    SHOW,
    Extensions,
    GenerateBody,
    OllamaBody,
    OllamaChatBody,
    SamplingFields,
)
from jaxllm.serving.server.api.grammars import format_grammar
from jaxllm.serving.server.api.messages import messages_of
from jaxllm.serving.server.api.openai import LoggedText, chat_logprobs, requested_logprobs
from jaxllm.serving.server.api.reasoning import Reasoning, Switch
from jaxllm.serving.server.api.requests import ApiRequest, ApiState, Streamed, require_operator
from jaxllm.serving.server.api.resources import embedded
from jaxllm.serving.server.api.tool_use import ToolUse, openai_choice, tools_of
from jaxllm.serving.server.calls import CallPrompt, Conversation, ModelFacts
from jaxllm.text.answer_parts import CallEnds
from jaxllm.version import __version__

# Ollama's default.
_TEMPERATURE = 0.8
_LINES = "application/x-ndjson"
_FOREVER_S = 100 * 365 * 86_400


async def chat(state: ApiState, request: ApiRequest) -> Any:
    """Answers a chat."""
    body = state.body(request, OLLAMA_CHAT)
    state.model(body.model)
    if not body.messages:
        return _loaded(body, is_chat=True)
    use, reasoning = tools_of(body.tools, openai_choice(body.tool_choice, None)), _reasoning(state, body)
    messages = messages_of([_message(each, f"messages[{index}]") for index, each in enumerate(body.messages)])
    prompt = await state.conversation(request.app, messages, use.tools, template_options=reasoning.options)
    return await _answer(state, request, body, prompt, use, reasoning)


async def generate(state: ApiState, request: ApiRequest) -> Any:
    """Answers a prompt by the chat template, or continues it unchanged (`raw`)."""
    body = state.body(request, GENERATE)
    facts, _ = state.model(body.model)
    if not (body.prompt or body.images or body.suffix):
        return _loaded(body, is_chat=False)
    if body.raw or body.suffix or not facts.has_chat_template:
        for name in ("system", "images", "think"):
            if getattr(body, name):
                raise ApiError(f"{name} needs a chat template, which this prompt does not use", param=name)
        return await _answer(state, request, body, filled_in(facts, body.prompt, body.suffix))
    turns = [("system", body.system), ("user", body.prompt)]
    messages: list[dict[str, Any]] = [
        {"role": role, "content": text} for role, text in turns if text is not None
    ]
    if body.images:
        messages[-1]["content"] = _with_images(body.prompt, body.images, "images")
    reasoning, plain = _reasoning(state, body), messages_of(messages, "prompt")
    conversation = await state.conversation(request.app, plain, template_options=reasoning.options)
    return await _answer(state, request, body, conversation, reasoning=reasoning)


async def embed(state: ApiState, request: ApiRequest) -> dict[str, Any]:
    """Embeds texts."""
    body, began_s = state.body(request, EMBED), time.perf_counter()
    _, adapter = state.model(body.model)
    texts = [body.input] if isinstance(body.input, str) else body.input
    vectors, tokens = [], 0
    if texts:
        vectors, tokens = await embedded(
            state, request, texts, adapter, truncate=-1 if body.truncate else None
        )
    took_ns = int(1e9 * (time.perf_counter() - began_s))
    return {
        "model": body.model, "embeddings": vectors, "total_duration": took_ns, "load_duration": 0,
        "prompt_eval_count": tokens,
    }  # fmt: skip


async def embeddings(state: ApiState, request: ApiRequest) -> dict[str, Any]:
    """Embeds a text, by the older path."""
    values = {**request.values, "input": request.values.get("prompt") or []}
    (vector,) = (await embed(state, dataclasses.replace(request, values=values)))["embeddings"] or [[]]
    return {"embedding": vector}


async def tags(state: ApiState, request: ApiRequest) -> dict[str, Any]:
    """Lists the model, and the model with each adapter."""
    facts = state.backend.facts()
    names = [f"{facts.name}:latest", *(f"{facts.name}:{adapter}" for adapter in facts.adapters)]
    return {"models": [_listed(facts, name) | {"modified_at": _time(facts.opened_s)} for name in names]}


async def running(state: ApiState, request: ApiRequest) -> dict[str, Any]:
    """Lists the loaded model."""
    facts = state.backend.facts()
    # Of a model that stays loaded Ollama gives a time that far away.
    loaded = {"expires_at": _time(facts.opened_s + _FOREVER_S), "size_vram": 0}
    loaded |= {"context_length": facts.window_tokens}
    return {"models": [_listed(facts, f"{facts.name}:latest") | loaded]}


async def show(state: ApiState, request: ApiRequest) -> dict[str, Any]:
    """Facts of a model."""
    facts, _ = state.model(state.body(request, SHOW).model)
    answer_format, shape, kind = facts.answer_format, facts.shape, facts.architecture
    able = ["completion", *["tools"] * facts.has_chat_template, *["insert"] * bool(facts.infill)]
    able += [*["vision"] * facts.images, *["thinking"] * answer_format.thinks]
    info = {
        "general.architecture": kind, "general.basename": facts.name,
        "general.parameter_count": shape.get("parameters"),
        f"{kind}.context_length": facts.window_tokens, f"{kind}.vocab_size": facts.vocab_size,
        f"{kind}.embedding_length": shape.get("hidden_size"), f"{kind}.block_count": shape.get("layers"),
        f"{kind}.attention.head_count": shape.get("heads"),
        f"{kind}.attention.head_count_kv": shape.get("kv_heads"),
    }  # fmt: skip
    options = {"num_ctx": facts.window_tokens, **facts.sampling}
    return {
        "modelfile": f"FROM {facts.name}", "license": "", "template": facts.chat_template,
        "parameters": "\n".join(f"{name} {value}" for name, value in options.items()),
        "details": _details(facts), "modified_at": _time(facts.opened_s),
        "model_info": {name: value for name, value in info.items() if value is not None},
        "capabilities": able,
    }  # fmt: skip


async def pull(state: ApiState, request: ApiRequest) -> Any:
    """Downloads a model of the hub for a later start; reports that the served one is there."""
    body = state.body(request, PULL)
    name = re.sub(r"^(https://)?(hf\.co|huggingface\.co)/", HUB, body.model)
    if name.startswith(HUB):
        require_operator(request, "models")
        steps = _downloaded(name)
    else:
        try:
            facts, _ = state.model(name)
        except ApiError as error:
            message = f"{error}; this service has one model: pull others of the hub as {HUB}OWNER/NAME"
            raise ApiError(message, status=404, code="model_not_found", param="model") from None
        layer = {"status": f"pulling {facts.digest[:12]}", "digest": f"sha256:{facts.digest}"}
        layer |= {"total": facts.size_bytes, "completed": facts.size_bytes}
        steps = _present(layer)
    if not body.stream:
        return [step async for step in steps][-1]

    async def lines() -> AsyncGenerator[bytes, None]:
        try:
            async for step in steps:
                yield _line(step)
        except JaxllmError as error:
            yield _line(ollama_body(api_error(error)))

    return Streamed(lines(), lambda: None, _LINES, state.write_s)


async def _present(layer: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    for step in ({"status": "pulling manifest"}, layer, {"status": "success"}):
        yield step


async def _downloaded(name: str) -> AsyncGenerator[dict[str, Any], None]:
    """Downloads a model of the hub; reports its progress. A download whose client leaves goes on."""
    # Imported here: exported programs know no hub.
    from jaxllm.serving.sources.hub import find_at_hub

    yield {"status": "pulling manifest"}
    loop, news = asyncio.get_running_loop(), asyncio.Queue[dict[str, int] | None]()

    def report(_stage: str, done: int, total: int) -> None:
        loop.call_soon_threadsafe(news.put_nowait, {"completed": done, "total": total})

    work = asyncio.ensure_future(asyncio.to_thread(find_at_hub, name, report))
    work.add_done_callback(lambda _: news.put_nowait(None))
    while (progress := await news.get()) is not None:
        # Of many reports the last.
        if news.empty():
            yield {"status": f"pulling {name}", "digest": name, **progress}
    try:
        await work
    except CheckpointError as error:
        raise ApiError(str(error), code="model_unavailable", param="model") from error
    yield {"status": f"downloaded; start `jaxllm serve --model {name}` to serve it"}
    yield {"status": "success"}


async def refuse(state: ApiState, request: ApiRequest) -> Any:
    """Refuses to change the models of the service."""
    message = "the service has one model, which its operator chooses: see `jaxllm prepare` and `jaxllm serve`"
    raise ApiError(message, code="unsupported")


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
    facts, _ = state.model(body.model)
    options = body.options
    if (options.num_ctx or 0) > facts.window_tokens:
        # Clients send it for any model. The window stays, and a prompt that exceeds it is refused.
        ignore("options.num_ctx")
    fields = SamplingFields(
        model=body.model,
        **{name: getattr(options, name) for name in SAMPLING},
        **{name: getattr(body, name) for name in Extensions.__struct_fields__},
    )
    grammar, form = None, body.format
    if isinstance(form, dict):
        grammar = format_grammar("json_schema", form, "format")
    elif form:
        grammar = format_grammar("json_object" if form == "json" else form, None, "format")
    params = AnswerParams(
        max_tokens=options.num_predict, stop=options.stop, temperature=_TEMPERATURE,
        use=use or ToolUse(), reasoning=reasoning or Reasoning(), grammar=grammar,
        top_logprobs=requested_logprobs(body.top_logprobs, body.logprobs, "logprobs to be true"),
        prefix=tuple(body.context) if isinstance(body, GenerateBody) else (),
    )  # fmt: skip
    answer = await answer_of(state, request, fields, (prompt,), params)
    is_chat, logged = isinstance(body, OllamaChatBody), LoggedText(state)

    async def part(choice: Choice, *, whole: bool) -> dict[str, Any]:
        """What is new, or all of it, and at the end what the answer cost."""
        calls = choice.whole_calls
        if not whole:
            # A call has its arguments as an object, so that it comes when it is whole.
            calls = [choice.calls[each.index] for each in choice.new if isinstance(each, CallEnds)]
        text = choice.text if whole else choice.new_text
        thought = choice.reasoning if whole else choice.new_reasoning
        logprobs = chat_logprobs(await logged.take(choice, whole=whole)) if body.logprobs else []
        found = _part(body.model, text, thought, calls, is_chat=is_chat)
        return found | ({"logprobs": logprobs} if logprobs else {})

    async def end(choice: Choice) -> dict[str, Any]:
        found = _end(choice)
        if isinstance(body, GenerateBody) and isinstance(prompt, Conversation) and not prompt.images:
            ids = [*body.context, *await prompt_ids_of(state, prompt), *choice.tokens]
            found["context"] = ids
        return found

    async def frames(news: AsyncIterator[Choice]) -> AsyncGenerator[bytes, None]:
        async for choice in news:
            now = await part(choice, whole=False)
            called = "tool_calls" in now.get("message", ())
            if choice.new_text or choice.new_reasoning or "logprobs" in now or called:
                yield _line(now)
            if choice.ended is not None:
                yield _line(_part(body.model, "", "", (), is_chat=is_chat) | await end(choice))

    if body.stream:
        return await answer.streamed(frames, lambda error: _line(ollama_body(error)), media_type=_LINES)
    (choice,) = await answer.whole()
    return await part(choice, whole=True) | await end(choice)


def _loaded(body: OllamaBody, *, is_chat: bool) -> Any:
    """The answer to a request without a prompt, which loads a model, or unloads it with `keep_alive` 0: the
    model stays."""
    unload = body.keep_alive in (0, "0", "0s")
    if unload:
        ignore("keep_alive")
    part = _part(body.model, "", "", (), is_chat=is_chat)
    part |= {"done": True, "done_reason": "unload" if unload else "load"}
    return Response(_line(part), media_type=_LINES) if body.stream else part


def _listed(facts: ModelFacts, name: str) -> dict[str, Any]:
    facts_of = {"size": facts.size_bytes, "digest": facts.digest, "details": _details(facts)}
    return {"name": name, "model": name, **facts_of}


def _details(facts: ModelFacts) -> dict[str, Any]:
    count = facts.shape.get("parameters", 0)
    size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"
    return {
        "parent_model": "", "format": "jaxllm", "family": facts.architecture,
        "families": [facts.architecture], "parameter_size": size, "quantization_level": facts.weights.upper(),
    }  # fmt: skip


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
