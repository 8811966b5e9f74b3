"""Serves contexts by name: creates, lists, pins, deletes, and answers in them."""

import dataclasses
from typing import Any

import msgspec
from starlette.responses import Response

from jaxllm.errors import ContextGone
from serving.server.api.chat import chat
from serving.server.api.completions import completions
from serving.server.api.errors import ApiError
from serving.server.api.front import Front, Visit
from serving.server.api.streams import json_response
from serving.server.facts import ContextFacts


class CreateBody(msgspec.Struct, kw_only=True):
    """A new context."""

    level: int | None = None
    pinned: bool = False
    adapter: str | None = None


class PinBody(msgspec.Struct, kw_only=True):
    """Whether a context's chunks stay in memory."""

    pinned: bool = True


async def create(front: Front, visit: Visit) -> Response:
    """Creates a context (newLLMCtx)."""
    body = front.body(dataclasses.replace(visit, raw=visit.raw or b"{}"), CreateBody)
    adapter = front.adapter(front.backend.facts(), body.adapter or "")
    facts = await front.backend.create_context(
        visit.app, level=body.level, pinned=body.pinned, adapter=adapter
    )
    return json_response(_told(facts), 201)


async def listed(front: Front, visit: Visit) -> Response:
    """All contexts of the app."""
    return json_response(
        {"object": "list", "data": [_told(each) for each in await front.backend.contexts(visit.app)]}
    )


async def get(front: Front, visit: Visit) -> Response:
    """One context."""
    for each in await front.backend.contexts(visit.app):
        if each.name == visit.path["name"]:
            return json_response(_told(each))
    raise ContextGone(f"there is no context {visit.path['name']!r:.80}; it was deleted, or never made")


async def pin(front: Front, visit: Visit) -> Response:
    """Pins a context, or lets it be evicted."""
    body = front.body(dataclasses.replace(visit, raw=visit.raw or b"{}"), PinBody)
    return json_response(_told(await front.backend.pin_context(visit.app, visit.path["name"], body.pinned)))


async def delete(front: Front, visit: Visit) -> Response:
    """Deletes a context (delLLMCtx)."""
    await front.backend.delete_context(visit.app, visit.path["name"])
    return json_response({"id": visit.path["name"], "object": "context", "deleted": True})


async def generate(front: Front, visit: Visit) -> Response:
    """Answers in a context (callLLM): a chat's body with `messages`, or a completion's with `prompt`."""
    try:
        body = msgspec.json.decode(visit.raw, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        body = {}  # The format's own check says what is wrong.
    if "conversation" in body:
        raise ApiError("the path names the context; leave conversation out", param="conversation")
    body["conversation"] = msgspec.Raw(msgspec.json.encode(visit.path["name"]))
    named = dataclasses.replace(visit, raw=msgspec.json.encode(body) if len(body) > 1 else visit.raw)
    return await (completions if "prompt" in body else chat)(front, named)


def _told(facts: ContextFacts) -> dict[str, Any]:
    told = dataclasses.asdict(facts)
    return {"id": told.pop("name"), "object": "context", "created": int(told.pop("created_s")), **told}
