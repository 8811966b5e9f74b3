"""Tells of the model and the service: models, props, health, ready; texts, tokens, embeddings."""

import base64
import struct
from typing import Any

import msgspec
from starlette.responses import Response

from jaxllm.errors import ContextOverflow
from serving.server.api.completions import prompts_of
from serving.server.api.errors import ApiError
from serving.server.api.front import Front, Visit
from serving.server.api.messages import messages_of, tools_of
from serving.server.api.streams import json_response
from serving.server.calls import Conversation
from serving.server.facts import ModelFacts


class TokenizeBody(msgspec.Struct, kw_only=True):
    """A text or a conversation."""

    content: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    add_special: bool = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Token ids."""

    tokens: list[int]


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """The fields of a request for embeddings that are supported."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: str = "float"
    user: str | None = None


async def models(front: Front, visit: Visit) -> Response:
    """The model, and the model with each adapter."""
    facts = front.backend.facts()
    if (name := visit.path.get("name")) is not None:
        front.model(name)
        return json_response(_model(facts, name))
    names = [facts.name, *(f"{facts.name}:{adapter}" for adapter in facts.adapters)]
    return json_response({"object": "list", "data": [_model(facts, name) for name in names]})


async def props(front: Front, visit: Visit) -> Response:
    """The model's facts and the front's limits."""
    facts, options = front.backend.facts(), front.options
    return json_response(
        {
            **_model(facts, facts.name)["jaxllm"],
            "model": facts.name,
            "chat_template": facts.chat_template or None,
            "limits": {
                "body_bytes": front.body_bytes(),
                "answers_per_request": options.answers_per_request,
                "embeddings_per_request": options.embeddings_per_request,
                "stored_responses": options.stored_responses,
                "stored_response_bytes": options.stored_response_bytes,
            },
            "defaults": {"max_tokens": options.max_tokens, "temperature": options.temperature},
        }
    )


async def health(front: Front, visit: Visit) -> Response:
    """200 while the engine lives; which profile of the device is planned by."""
    told = front.backend.health()
    alive = bool(told.get("alive"))
    profile = {"profile": told["profile"]} if "profile" in told else {}
    return json_response({"status": "ok" if alive else "stuck", **profile}, 200 if alive else 503)


async def ready(front: Front, visit: Visit) -> Response:
    """200 while calls are taken."""
    told = front.backend.health()
    is_ready = bool(told.get("ready"))
    return json_response({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)


async def tokenize(front: Front, visit: Visit) -> Response:
    """The token ids of a text or a conversation."""
    body = front.body(visit, TokenizeBody)
    if (body.content is None) == (body.messages is None):
        raise ApiError("send either content or messages")
    if body.content is not None:
        ids = await front.backend.tokenize(body.content, special=body.add_special)
    else:
        ids = await front.backend.tokenize(await _conversation(front, visit, body))
    return json_response({"tokens": [int(each) for each in ids]})


async def detokenize(front: Front, visit: Visit) -> Response:
    """The text of token ids."""
    body = front.body(visit, DetokenizeBody)
    vocab = front.backend.facts().vocab_size
    if any(not 0 <= each < vocab for each in body.tokens):
        raise ApiError(f"token ids of this model are 0 to {vocab - 1}", param="tokens")
    return json_response({"content": await front.backend.detokenize(body.tokens)})


async def apply_template(front: Front, visit: Visit) -> Response:
    """The text of a conversation by the chat template."""
    body = front.body(visit, TokenizeBody)
    if body.messages is None or body.content is not None:
        raise ApiError("send messages", param="messages")
    return json_response({"prompt": await front.backend.render(await _conversation(front, visit, body))})


async def embeddings(front: Front, visit: Visit) -> Response:
    """The mean of the last layer's hidden states over each input's tokens, of length 1."""
    body = front.body(visit, EmbeddingBody, {"dimensions": ()})
    facts, adapter = front.model(body.model)
    if adapter:
        raise ApiError("embeddings are of the model without adapters", param="model")
    if body.encoding_format not in ("float", "base64"):
        raise ApiError("encoding_format is float or base64", param="encoding_format")
    inputs, most = prompts_of(body.input, "input"), front.options.embeddings_per_request
    if len(inputs) > most:
        raise ApiError(f"at most {most} inputs are taken, got {len(inputs)}", param="input")
    ids = []
    for each in inputs:
        ids.append([*(each if isinstance(each, tuple) else await front.backend.tokenize(each))])
        if not ids[-1] or max(ids[-1]) >= facts.vocab_size:
            raise ApiError("an input has no token, or one outside the vocabulary", param="input")
        if len(ids[-1]) > facts.window_tokens:
            raise ContextOverflow(
                f"an input has {len(ids[-1])} tokens; at most {facts.window_tokens} fit; shorten it"
            )
    vectors = await front.backend.embed(visit.app, ids)
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    tokens = sum(map(len, ids))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return json_response({"object": "list", "data": data, "model": body.model or facts.name, "usage": usage})


async def _conversation(front: Front, visit: Visit, body: TokenizeBody) -> Conversation:
    use = tools_of(body.tools, None, None, front.backend.facts().chat_template)
    return await front.conversation(visit.app, messages_of(body.messages or ()), use.tools)


def _model(facts: ModelFacts, name: str) -> dict[str, Any]:
    told = {
        "window_tokens": facts.window_tokens,
        "vocab_size": facts.vocab_size,
        "levels": facts.levels,
        "has_chat_template": facts.has_chat_template,
        "adapters": facts.adapters,
        "images": facts.images,
    }
    return {
        "id": name,
        "object": "model",
        "created": int(facts.opened_s),
        "owned_by": "jaxllm",
        "jaxllm": told,
    }


def _encoded(vector: Any, form: str) -> Any:
    values = [float(each) for each in vector]
    return values if form == "float" else base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
