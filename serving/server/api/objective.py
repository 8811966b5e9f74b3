"""Serves the objective that an app is bound to (bindLLMService): tells it, sets it, and ends it."""

from typing import Any

import msgspec
from starlette.responses import Response

from serving.planning.objectives import Binding
from serving.server.api.asking import objective_of
from serving.server.api.errors import ApiError
from serving.server.api.front import Front, Visit
from serving.server.api.streams import json_response
from serving.server.objectives import written


class BindBody(msgspec.Struct, kw_only=True):
    """The objective of the app's calls that name none."""

    slo: str | dict[str, Any] | None = None
    strict: bool | None = None
    shorten: bool = False


async def get(front: Front, visit: Visit) -> Response:
    """The objective of the app that asks."""
    return json_response(_told(front, visit.app))


async def bind(front: Front, visit: Visit) -> Response:
    """Binds the app that asks, and tells the prompt lengths at which no choice is in time on this device."""
    body = front.body(visit, BindBody)
    objective, strict = objective_of(body.slo, body.strict, visit.slo)
    if objective is None:
        raise ApiError("send the objective as slo, or in the header X-SLO", param="slo")
    missed = await front.backend.bind(visit.app, Binding(objective, bool(strict), body.shorten))
    return json_response(_told(front, visit.app) | {"unmet_prompt_tokens": missed})


async def unbind(front: Front, visit: Visit) -> Response:
    """Ends what the app has bound itself to."""
    front.backend.unbind(visit.app)
    return json_response(_told(front, visit.app))


def _told(front: Front, app: str) -> dict[str, Any]:
    binding, own = front.backend.binding(app)
    return {
        "object": "objective",
        "slo": None if binding is None else written(binding.objective),
        "strict": binding is not None and binding.strict,
        "shorten": binding is not None and binding.shorten,
        "from": None if binding is None else "app" if own else "options",
    }
