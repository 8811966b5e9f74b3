"""Keeps the caches of ended answers, so that a client that sends the whole conversation again need not wait
for what was computed before."""

import dataclasses
from collections.abc import Callable, Collection

from serving.request import Session, common_prefix

# Fewer common tokens are computed as soon as found.
_LEAST_COMMON = 16


@dataclasses.dataclass(eq=False)
class _Kept:
    app: str
    key: str
    session: Session
    size_bytes: int


class PrefixSessions:
    """Ended sessions of apps, the least recently used first; for one thread. A holding of the governor (see
    `serving.server.governor.Holding`).

    A session is used for its own app alone. It is taken, not copied, so one of which the new prompt has only
    a small part is left to the conversation that it belongs to.

    Attributes:
      name: of this kind of holding.
      least_bytes: none.
      most_bytes: their budget as it was asked for.
      limit_bytes: most bytes of the caches of all sessions.
      size_bytes: of them now.
    """

    name = "prefixes"
    least_bytes = 0

    def __init__(self, most_bytes: int, app_bytes: Callable[[str], int] = lambda app: 0) -> None:
        """See the class; `app_bytes` tells most bytes of one app's sessions, 0 for no limit of its own."""
        self.most_bytes = self.limit_bytes = most_bytes
        self.size_bytes = 0
        self._app_bytes = app_bytes
        self._kept: list[_Kept] = []

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, app: str, key: str, prompt: tuple[int, ...], weights_version: tuple[int, int]) -> Session:
        """The app's session with the longest common prefix with a prompt, those with its key before others;
        an empty one where none is worth it. It is no longer kept."""
        best, most = None, (False, _LEAST_COMMON - 1)
        for each in self._kept:
            if each.app != app or each.session.weights_version != weights_version:
                continue
            common = common_prefix(each.session.tokens, prompt)
            rank = (each.key == key, common)
            if common >= _LEAST_COMMON and 2 * common >= len(each.session.tokens) and rank > most:
                best, most = each, rank
        if best is None:
            return Session()
        self._drop(best)
        return best.session

    def keep(self, app: str, key: str, session: Session) -> None:
        """Keeps the session of an answer that has ended; where a limit ends, the least recently used go, the
        app's own before others'."""
        size, own = session.size_bytes, self._app_bytes(app) or self.limit_bytes
        if not size or len(session.tokens) < _LEAST_COMMON or size > min(own, self.limit_bytes):
            return
        self._kept.append(_Kept(app, key, session, size))
        self.size_bytes += size
        self._shrink([each for each in self._kept if each.app == app], own)
        self._shrink(self._kept, self.limit_bytes)

    def forget(self, weights_versions: Collection[tuple[int, int]]) -> None:
        """Drops the sessions of weights that will not be there again."""
        for each in [each for each in self._kept if each.session.weights_version in weights_versions]:
            self._drop(each)

    def resize(self, limit_bytes: int) -> None:
        """Sets the limit; the least recently used sessions beyond it go."""
        self.limit_bytes = limit_bytes
        self._shrink(self._kept, limit_bytes)

    def _shrink(self, among: list[_Kept], limit_bytes: int) -> None:
        excess = sum(each.size_bytes for each in among) - limit_bytes
        for each in list(among):
            if excess <= 0:
                return
            self._drop(each)
            excess -= each.size_bytes

    def _drop(self, kept: _Kept) -> None:
        self._kept.remove(kept)
        self.size_bytes -= kept.size_bytes
