"""Holds what all wire formats share: the backend, limits, and a request as the handlers get it."""

import contextlib
import dataclasses
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from serving.images.files import IMAGES
from serving.images.messages import taken_apart
from serving.server.api.bodies import Neutral, read_body
from serving.server.api.errors import ApiError
from serving.server.api.options import ApiOptions
from serving.server.api.response_store import ResponseStore
from serving.server.calls import Backend, Conversation, Refused
from serving.server.facts import ModelFacts

Body = TypeVar("Body", bound=msgspec.Struct)
_MOST_TEXTS = 1 << 18


@dataclasses.dataclass(frozen=True, kw_only=True)
class Visit:
    """A request whose app is known and whose body has arrived.

    Attributes:
      app: that asks.
      request_id: of the client, or made here.
      raw: the body.
      path: values in the path.
      slo: the header X-SLO; empty for none.
      query: names and values behind the path.
      operator: whether who asks may change what all apps have.
    """

    app: str
    request_id: str
    raw: bytes = b""
    path: Mapping[str, str] = dataclasses.field(default_factory=dict)
    slo: str = ""
    query: Sequence[tuple[str, str]] = ()
    operator: bool = False

    def call_id(self) -> str:
        """A new identifier of a call, which names the request and is unique whatever the client sent."""
        return f"{self.request_id}.{uuid.uuid4().hex[:12]}"


class Front:
    """What handlers work with.

    Attributes:
      backend: that answers.
      options: limits and defaults.
      responses: that are stored.
    """

    def __init__(self, backend: Backend, options: ApiOptions) -> None:
        self.backend, self.options = backend, options
        self.responses = ResponseStore(options.stored_responses, options.stored_response_bytes)
        self._texts: dict[int, str] = {}

    def body(self, visit: Visit, kind: type[Body], neutral: Neutral | None = None) -> Body:
        """The body of a request; raises ApiError."""
        return read_body(visit.raw, kind, self.options, neutral)

    async def conversation(
        self, app: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Conversation:
        """Messages as `messages_of` makes them, with their images encoded.

        Raises:
          ApiError: there are too many images.
          JaxllmError: see `Backend.encode_images`.
        """
        plain, files = taken_apart(messages)
        if len(files) > IMAGES:
            raise ApiError(
                f"the messages have {len(files)} images; at most {IMAGES} are taken, send fewer",
                param="messages",
            )
        images = await self.backend.encode_images(app, files) if files else ()
        return Conversation(messages=tuple(plain), tools=tuple(tools), images=images)

    def body_bytes(self) -> int:
        """Most bytes of a request's body now: more where the model reads images."""
        with contextlib.suppress(Refused):
            if self.backend.facts().images:
                return max(self.options.body_bytes, self.options.image_body_bytes)
        return self.options.body_bytes

    def model(self, name: str | None, *, tagged: bool = False) -> tuple[ModelFacts, str]:
        """The model of a request's field `model`, NAME or NAME:ADAPTER, and its adapter.

        Args:
          name: None for the model that is served.
          tagged: whether NAME:latest is the model, too.

        Raises:
          ApiError: another model is served, or it has no such adapter.
          Refused: the model is loading.
        """
        facts = self.backend.facts()
        if name is None or name == facts.name or (tagged and name == f"{facts.name}:latest"):
            return facts, ""
        if name.startswith(f"{facts.name}:"):
            return facts, self.adapter(facts, name[len(facts.name) + 1 :])
        raise ApiError(
            f"the model {name!r:.80} is not served; {facts.name!r} is",
            status=404,
            code="model_not_found",
            param="model",
        )

    def adapter(self, facts: ModelFacts, name: str) -> str:
        """The name of an adapter that is there; raises ApiError."""
        if name and name not in facts.adapters:
            known = ", ".join(map(repr, facts.adapters[:20])) or "none"
            raise ApiError(
                f"the model has no adapter {name!r:.80}; it has {known}",
                status=404,
                code="adapter_not_found",
                param="adapter",
            )
        return name

    async def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token by itself."""
        if len(self._texts) > _MOST_TEXTS:
            self._texts.clear()
        for token in ids:
            if token not in self._texts:
                self._texts[token] = await self.backend.detokenize((token,))
        return [self._texts[token] for token in ids]


def new_id(prefix: str) -> str:
    """An identifier for an object of an answer."""
    return f"{prefix}{uuid.uuid4().hex}"


def now_s() -> int:
    """Seconds since 1970."""
    return int(time.time())
