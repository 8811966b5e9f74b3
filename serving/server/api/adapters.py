"""Serves low-rank adapters by name: lists them to all apps; operators load and unload them."""

import msgspec
from starlette.responses import Response

from jaxllm.errors import CheckpointError
from serving.server.api.errors import ApiError
from serving.server.api.front import Front, Visit
from serving.server.api.streams import json_response
from serving.server.facts import AdapterFacts


class LoadBody(msgspec.Struct, kw_only=True):
    """An adapter to load.

    Attributes:
      name: for calls.
      folder: in PEFT's layout, within the service's folder of adapters; None for that of the name.
    """

    name: str
    folder: str | None = None


async def listed(front: Front, visit: Visit) -> Response:
    """The adapters that requests may name."""
    return json_response({"object": "list", "data": [_told(each) for each in front.backend.adapters()]})


async def load(front: Front, visit: Visit) -> Response:
    """Loads an adapter."""
    _require_operator(visit)
    body = front.body(visit, LoadBody)
    try:
        facts = await front.backend.load_adapter(visit.app, body.name, body.folder or body.name)
    except CheckpointError as error:
        raise ApiError(str(error), code="adapter_unreadable", param="folder") from error
    return json_response(_told(facts), 201)


async def unload(front: Front, visit: Visit) -> Response:
    """Forgets an adapter that no call uses."""
    _require_operator(visit)
    await front.backend.unload_adapter(visit.app, visit.path["name"])
    return json_response({"id": visit.path["name"], "object": "adapter", "deleted": True})


def _require_operator(visit: Visit) -> None:
    if not visit.operator:
        raise ApiError(
            "adapters are of all apps, and for operators to change: send a key made with `jaxllm keys add "
            "NAME --operator`, or call over the Unix socket as root or as the service's user",
            status=403,
            code="not_operator",
        )


def _told(facts: AdapterFacts) -> dict[str, object]:
    return {
        "id": facts.name,
        "object": "adapter",
        "created": int(facts.loaded_s),
        "digest": facts.digest,
        "size_bytes": facts.size_bytes,
    }
