"""Keeps where stored responses stand: each is a context of its app and a number of its tokens."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredResponse:
    """A response that another can continue.

    Attributes:
      id: of the response.
      app: that asked for it; no other can name it.
      context: the name of the context that has it.
      tokens: of the context, up to the response's end.
      owned: whether the context was made for responses, and is deleted with the last one in it.
    """

    id: str
    app: str
    context: str
    tokens: int
    owned: bool


# Called with an app and all its stored responses, oldest first, whenever they change.
Persist = Callable[[str, Sequence[StoredResponse]], None]


class ResponseStore:
    """The stored responses of all apps, so many of each at most. Contexts that no response needs any more
    are given out for deletion."""

    def __init__(
        self, per_app: int, *, entries: Iterable[StoredResponse] = (), persist: Persist | None = None
    ) -> None:
        self._per_app, self._persist = per_app, persist
        self._apps: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._unneeded: dict[str, set[str]] = {}
        for entry in entries:
            self._apps.setdefault(entry.app, OrderedDict())[entry.id] = entry

    def find(self, app: str, id: str) -> StoredResponse | None:  # noqa: A002 (the field's word)
        """A response of the app; None where it has none of this identifier."""
        return self._apps.get(app, {}).get(id)

    def add(self, entry: StoredResponse) -> None:
        """Stores a response, and forgets the app's oldest beyond the limit."""
        entries = self._apps.setdefault(entry.app, OrderedDict())
        entries[entry.id] = entry
        gone = [entries.popitem(last=False)[1] for _ in range(len(entries) - self._per_app)]
        self._forgotten(entry.app, gone)

    def forget_oldest(self, app: str) -> bool:
        """Forgets the oldest response of an app; False where it has none."""
        oldest = next(iter(self._apps.get(app, ())), None)
        return oldest is not None and self.delete(app, oldest)

    def delete(self, app: str, id: str) -> bool:  # noqa: A002
        """Forgets a response; False where the app has none of this identifier."""
        gone = self._apps.get(app, {}).pop(id, None)
        if gone is not None:
            self._forgotten(app, [gone])
        return gone is not None

    def abandon(self, app: str, context: str) -> None:
        """Says that a context was made for a response that did not come about."""
        self._unneeded.setdefault(app, set()).add(context)

    def unneeded(self, app: str) -> tuple[str, ...]:
        """Contexts to delete."""
        return tuple(self._unneeded.get(app, ()))

    def deleted(self, app: str, context: str) -> None:
        """Says that such a context is gone."""
        self._unneeded.get(app, set()).discard(context)

    def _forgotten(self, app: str, gone: Sequence[StoredResponse]) -> None:
        entries = self._apps.get(app, OrderedDict())
        needed = {entry.context for entry in entries.values()}
        for entry in gone:
            if entry.owned and entry.context not in needed:
                self.abandon(app, entry.context)
        if not entries:
            self._apps.pop(app, None)
        if self._persist is not None:
            self._persist(app, tuple(entries.values()))
