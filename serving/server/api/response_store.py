"""Keeps responses in memory, each with all that was said before it.

What an app may have is bounded: its oldest responses are dropped for new ones. A restart forgets all of them.
"""

import dataclasses
from typing import Any

import msgspec

from serving.server.api.errors import ApiError


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredResponse:
    """A response that has ended.

    Attributes:
      id: of it.
      response: the response object, in JSON.
      items: what was said before it, as a list of items in JSON.
      context: the name of the context that has the conversation; empty where the items are all there is.
      context_tokens: number of the context's tokens when the response had ended.
    """

    id: str
    response: bytes
    items: bytes
    context: str = ""
    context_tokens: int = 0

    @property
    def size_bytes(self) -> int:
        """Of what counts against the app's bytes."""
        return len(self.response) + len(self.items)

    def said(self) -> list[dict[str, Any]]:
        """The items before it and its own: what the next response continues."""
        return [*msgspec.json.decode(self.items), *map(_plain, msgspec.json.decode(self.response)["output"])]


class ResponseStore:
    """The responses of all apps; for one thread.

    Every response has its whole conversation, so that dropping or deleting one breaks no other.

    Attributes:
      most: responses of an app.
      most_bytes: of all responses of an app.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self.most, self.most_bytes = most, most_bytes
        self._apps: dict[str, dict[str, StoredResponse]] = {}
        self._sizes: dict[str, int] = {}

    def keep(self, app: str, stored: StoredResponse) -> bool:
        """Keeps a response of an app, in the place of the app's oldest ones where there is no more room.

        Returns:
          False where it is too large by itself; then nothing has changed.
        """
        if stored.size_bytes > self.most_bytes:
            return False
        kept = self._apps.setdefault(app, {})
        kept[stored.id] = stored
        self._sizes[app] = self._sizes.get(app, 0) + stored.size_bytes
        while len(kept) > self.most or self._sizes[app] > self.most_bytes:
            self._drop(app, next(iter(kept)))
        return True

    def get(self, app: str, name: str, *, param: str = "") -> StoredResponse:
        """A response of an app.

        Args:
          app: that asks.
          name: the response's id.
          param: the field that has it.

        Raises:
          ApiError: the app has none of this id, whether or not another app has.
        """
        stored = self._apps.get(app, {}).get(name)
        if stored is None:
            raise ApiError(
                f"there is no response {name!r:.80}: it was not stored, was deleted, or dropped for newer "
                "ones, or the service was restarted",
                status=404,
                code="previous_response_not_found" if param else "response_not_found",
                param=param,
            )
        return stored

    def delete(self, app: str, name: str) -> None:
        """Forgets a response of an app; raises ApiError where there is none."""
        self.get(app, name)
        self._drop(app, name)

    def _drop(self, app: str, name: str) -> None:
        self._sizes[app] -= self._apps[app].pop(name).size_bytes
        if not self._apps[app]:
            del self._apps[app], self._sizes[app]


def _plain(item: dict[str, Any]) -> dict[str, Any]:
    """An item of an output without log-probabilities, which no later response needs."""
    if item["type"] != "message":
        return item
    return item | {"content": [part | {"logprobs": []} for part in item["content"]]}
