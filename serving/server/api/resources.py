"""Serves the routes of a service's resources: models, adapters, contexts and apps' objectives."""

import base64
import dataclasses
import datetime
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxllm.errors import CheckpointError
from jaxllm.serving.elastic.objectives import Binding
from jaxllm.serving.server.api.answers import objective_of, prompt_ids_of, sampling_of, truncated
from jaxllm.serving.server.api.errors import ApiError
from jaxllm.serving.server.api.fields import EMBEDDING, SamplingFields
from jaxllm.serving.server.api.logprobs import text_of
from jaxllm.serving.server.api.messages import messages_of
from jaxllm.serving.server.api.openai import chat, completions, prompts_of
from jaxllm.serving.server.api.requests import ApiRequest, ApiState, json_response, require_operator
from jaxllm.serving.server.api.tool_use import tools_of
from jaxllm.serving.server.calls import AdapterFacts, ContextFacts, Conversation, ModelFacts
from jaxllm.serving.server.device_state import Thermal, Trim
from jaxllm.serving.server.limits import written


class TokenizeBody(msgspec.Struct, kw_only=True):
    """A text, by llama.cpp's names or vLLM's (`prompt`, `add_special_tokens`), or a conversation."""

    content: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    model: str | None = None
    add_special: bool = False
    add_special_tokens: bool = True
    with_pieces: bool = False
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Token ids; with a `model` as vLLM's."""

    tokens: list[int]
    model: str | None = None


async def models(state: ApiState, request: ApiRequest) -> Any:
    """Lists the model, and the model with each adapter."""
    facts = state.backend.facts()
    if (name := request.path.get("name")) is not None:
        state.model(name)
        return _model(facts, name)
    names = [facts.name, *(f"{facts.name}:{adapter}" for adapter in facts.adapters)]
    # The last three are Anthropic's.
    pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return {"object": "list", "data": [_model(facts, name) for name in names], **pages}


async def props(state: ApiState, request: ApiRequest) -> Any:
    """The model's facts and the front's limits."""
    facts = state.backend.facts()
    limits = ("answers_per_request", "embeddings_per_request", "stored_responses", "stored_response_bytes")
    return _model(facts, facts.name)["jaxllm"] | {
        "model": facts.name,
        "chat_template": facts.chat_template or None,
        "limits": {"body_bytes": state.most_body_bytes()} | {name: getattr(state, name) for name in limits},
        "defaults": {"max_tokens": state.max_tokens, **sampling_of(state, SamplingFields())},
        "model_sampling": dict(facts.sampling),
    }


async def health(state: ApiState, request: ApiRequest) -> Any:
    """Liveness: 200 while the engine is alive; with the device's state and the kind of its profile in use."""
    found = state.backend.health()
    facts = {name: found[name] for name in ("profile", "device") if name in found}
    status, code = ("ok", 200) if found["alive"] else ("stuck", 503)
    return json_response({"status": status, **facts}, code)


async def ready(state: ApiState, request: ApiRequest) -> Any:
    """Readiness: 200 while calls are accepted and answered; with the progress of the start before."""
    found = await state.backend.readiness()
    status, code = ("ready", 200) if found["ready"] else ("not ready", 503)
    return json_response(
        {"status": status} | {name: found[name] for name in ("start",) if name in found}, code
    )


async def tokenize(state: ApiState, request: ApiRequest) -> Any:
    """The token ids of a text or a conversation."""
    body = state.body(request, TokenizeBody)
    facts, _ = state.model(body.model)
    if sum(each is not None for each in (body.content, body.prompt, body.messages)) != 1:
        raise ApiError("send one of content, prompt and messages")
    text, special = body.content, body.add_special
    if body.prompt is not None:
        text, special = body.prompt, body.add_special_tokens
    prompt = await _conversation(state, request, body) if text is None else text
    ids = await state.backend.tokenize(prompt, special=special)
    wanted = ids if body.with_pieces or body.return_token_strs else ()
    pieces = [text_of(each) for each in await state.backend.token_bytes(wanted)]
    named = [{"id": token, "piece": piece} for token, piece in zip(ids, pieces, strict=False)]
    return {
        "tokens": named if body.with_pieces else ids, "count": len(ids),
        "max_model_len": facts.window_tokens, "token_strs": pieces if body.return_token_strs else None,
    }  # fmt: skip


async def detokenize(state: ApiState, request: ApiRequest) -> Any:
    """The text of token ids."""
    body = state.body(request, DetokenizeBody)
    vocab = state.model(body.model)[0].vocab_size
    if min(body.tokens, default=0) < 0 or max(body.tokens, default=0) >= vocab:
        raise ApiError(f"token ids of this model are 0 to {vocab - 1}", param="tokens")
    return {"content" if body.model is None else "prompt": await state.backend.detokenize(body.tokens)}


async def apply_template(state: ApiState, request: ApiRequest) -> Any:
    """The text of a conversation by the chat template."""
    body = state.body(request, TokenizeBody)
    if body.messages is None:
        raise ApiError("send messages", param="messages")
    return {"prompt": await state.backend.render(await _conversation(state, request, body))}


async def embeddings(state: ApiState, request: ApiRequest) -> Any:
    """The mean of the last layer's hidden states over each input's tokens, normalized."""
    body = state.body(request, EMBEDDING)
    facts, adapter = state.model(body.model)
    vectors, tokens = await embedded(
        state, request, body.input, adapter, truncate=body.truncate_prompt_tokens
    )
    data = []
    for index, vector in enumerate(vectors):
        coded = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        embedding = vector if body.encoding_format == "float" else coded
        data.append({"object": "embedding", "index": index, "embedding": embedding})
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": body.model or facts.name, "usage": usage}


async def embedded(
    state: ApiState,
    request: ApiRequest,
    inputs: str | list[Any],
    adapter: str,
    *,
    truncate: int | None = None,
) -> tuple[Sequence[Sequence[float]], int]:
    """Embeddings of texts or token ids, and the number of their tokens. Raises ApiError if there are too many
    inputs, or one has no token, or one outside of the vocabulary. `adapter`: the one that the model's name
    gives, which is refused; `truncate`: see `truncate_prompt_tokens`, None to refuse longer inputs."""
    if adapter:
        raise ApiError("embeddings are of the model without adapters", param="model")
    facts, ids = state.backend.facts(), list[Sequence[int]]()
    most, window = state.embeddings_per_request, facts.window_tokens
    for each in prompts_of(inputs, "input", window_tokens=window, most=most):
        prompt = each if truncate is None else await truncated(state, each, truncate)
        ids.append(await prompt_ids_of(state, prompt))
        if not ids[-1] or max(ids[-1]) >= facts.vocab_size:
            raise ApiError("an input has no token, or one outside the vocabulary", param="input")
    return await state.backend.embed(request.app, ids), sum(map(len, ids))


async def _conversation(state: ApiState, request: ApiRequest, body: TokenizeBody) -> Conversation:
    messages, tools = messages_of(body.messages or ()), tools_of(body.tools).tools
    options = body.chat_template_kwargs
    return await state.conversation(request.app, messages, tools, template_options=options)


def _model(facts: ModelFacts, name: str) -> dict[str, Any]:
    names = ("window_tokens", "vocab_size", "levels", "has_chat_template", "adapters", "images")
    own = {name: getattr(facts, name) for name in names}
    window, opened_s = facts.window_tokens, int(facts.opened_s)
    at = datetime.datetime.fromtimestamp(opened_s, datetime.UTC).isoformat().replace("+00:00", "Z")
    return {
        "id": name, "object": "model", "created": opened_s, "owned_by": "jaxllm",
        # Anthropic's, vLLM's and llama.cpp's.
        "type": "model", "display_name": name, "created_at": at, "lifecycle": "active",
        "max_input_tokens": window, "max_tokens": window, "max_model_len": window,
        "meta": {"n_ctx": window, "n_vocab": facts.vocab_size, "size": facts.size_bytes},
        "jaxllm": own,
    }  # fmt: skip


class DeviceBody(msgspec.Struct, kw_only=True):
    """The state of the device; what is missing stays as it was, and no `foreground` ends its rule."""

    thermal: Thermal | None = None
    trim: Trim | None = None
    foreground: list[str] | msgspec.UnsetType | None = msgspec.UNSET


async def get_device(state: ApiState, request: ApiRequest) -> Any:
    """The state of the device, as its system reported it."""
    require_operator(request, "states of the device")
    return dataclasses.asdict(state.backend.require_executor().device)


async def report_device(state: ApiState, request: ApiRequest) -> Any:
    """Takes a report of the device's system: heat, memory that it wants back, apps in the foreground."""
    require_operator(request, "states of the device")
    body = msgspec.to_builtins(state.body(request, DeviceBody))
    changed = {name: each for name, each in body.items() if each is not None or name == "foreground"}
    executor = state.backend.require_executor()
    executor.device = dataclasses.replace(executor.device, **changed)
    return dataclasses.asdict(executor.device)


class LoadBody(msgspec.Struct, kw_only=True):
    """An adapter to load: its name in calls, and a folder in PEFT's layout within the service's folder of
    adapters; None for that of the name."""

    name: str
    folder: str | None = None


async def list_adapters(state: ApiState, request: ApiRequest) -> Any:
    """Lists the adapters that requests may name."""
    return {"object": "list", "data": [_listed(each, "adapter") for each in state.backend.adapters()]}


async def load_adapter(state: ApiState, request: ApiRequest) -> Any:
    """Loads an adapter."""
    require_operator(request, "adapters")
    body = state.body(request, LoadBody)
    try:
        facts = await state.backend.load_adapter(request.app, body.name, body.folder or body.name)
    except CheckpointError as error:
        raise ApiError(str(error), code="adapter_unreadable", param="folder") from error
    return json_response(_listed(facts, "adapter"), 201)


async def unload_adapter(state: ApiState, request: ApiRequest) -> Any:
    """Unloads an adapter that no call uses."""
    require_operator(request, "adapters")
    await state.backend.unload_adapter(request.app, request.path["name"])
    return {"id": request.path["name"], "object": "adapter", "deleted": True}


def _listed(facts: AdapterFacts | ContextFacts, kind: str) -> dict[str, Any]:
    fields = dataclasses.asdict(facts)
    return {"id": fields.pop("name"), "object": kind, "created": int(fields.pop("created_s")), **fields}


class CreateBody(msgspec.Struct, kw_only=True):
    """A new context."""

    level: int | None = None
    pinned: bool = False
    adapter: str | None = None


class PinBody(msgspec.Struct, kw_only=True):
    """Whether a context's chunks stay in memory."""

    pinned: bool = True


async def create_context(state: ApiState, request: ApiRequest) -> Any:
    """Creates a context (newLLMCtx)."""
    body, app = state.body(request, CreateBody), request.app
    options = {"level": body.level, "pinned": body.pinned, "adapter": state.adapter(body.adapter or "")}
    facts = await state.backend.contexts(app, lambda each: each.create(app, **options))
    return json_response(_listed(facts, "context"), 201)


async def list_contexts(state: ApiState, request: ApiRequest) -> Any:
    """Lists all contexts of the app."""
    found = await state.backend.list_contexts(request.app)
    return {"object": "list", "data": [_listed(each, "context") for each in found]}


async def get_context(state: ApiState, request: ApiRequest) -> Any:
    """One context."""
    app, name = request.app, request.path["name"]
    return _listed(await state.backend.contexts(app, lambda each: each.found(app, name)), "context")


async def pin_context(state: ApiState, request: ApiRequest) -> Any:
    """Pins a context, or unpins it."""
    body, app, name = state.body(request, PinBody), request.app, request.path["name"]
    facts = await state.backend.contexts(app, lambda each: each.pin(app, name, body.pinned))
    return _listed(facts, "context")


async def delete_context(state: ApiState, request: ApiRequest) -> Any:
    """Deletes a context (delLLMCtx)."""
    await state.backend.delete_context(request.app, request.path["name"])
    return {"id": request.path["name"], "object": "context", "deleted": True}


async def generate_in_context(state: ApiState, request: ApiRequest) -> Any:
    """Answers in a context (callLLM): a chat's body with `messages`, or a completion's with `prompt`."""
    values = request.values
    if "conversation" in values:
        raise ApiError("the path names the context; leave conversation out", param="conversation")
    named = dataclasses.replace(request, values={**values, "conversation": request.path["name"]})
    return await (completions if "prompt" in values else chat)(state, named)


class BindBody(msgspec.Struct, kw_only=True):
    """The default objective of the app's calls."""

    slo: str | dict[str, Any] | None = None
    strict: bool | None = None
    shorten: bool = False


async def get_objective(state: ApiState, request: ApiRequest) -> Any:
    """The objective of the calling app."""
    return _objective_json(state, request.app)


async def bind_objective(state: ApiState, request: ApiRequest) -> Any:
    """Binds the calling app, and returns the prompt lengths at which no choice meets it on this device."""
    body = state.body(request, BindBody)
    objective, strict = objective_of(body.slo, body.strict, request.slo)
    if objective is None:
        raise ApiError("send the objective as slo, or in the header X-SLO", param="slo")
    missed = await state.backend.bind(request.app, Binding(objective, bool(strict), body.shorten))
    return _objective_json(state, request.app) | {"unmet_prompt_tokens": missed}


async def unbind_objective(state: ApiState, request: ApiRequest) -> Any:
    """Removes the app's own binding."""
    state.backend.bindings.unbind(request.app)
    return _objective_json(state, request.app)


def _objective_json(state: ApiState, app: str) -> dict[str, Any]:
    binding, own = state.backend.bindings.of(app), state.backend.bindings.is_own(app)
    if binding is None:
        return {"object": "objective", "slo": None, "strict": False, "shorten": False, "from": None}
    facts = {"slo": written(binding.objective), "strict": binding.strict, "shorten": binding.shorten}
    return {"object": "objective", **facts, "from": "app" if own else "options"}
