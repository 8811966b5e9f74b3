"""Keeps the caches of ended answers, so that who sends a whole conversation again, or another one with the
same instruction, need not wait for what was computed before."""

import dataclasses
import threading
from collections.abc import Callable, Collection
from typing import Any, Protocol

from jaxllm.serving.engine.request import Session

# Fewer common tokens are computed as soon as found.
_LEAST_COMMON = 16
# A prompt that has all tokens of a session but so many goes on with it: the last tokens of an answer may be
# encoded otherwise when they come back.
_MOST_LEFT = 16


class Forks(Protocol):
    """What copies the beginning of a cache, such as a runner."""

    @property
    def weights_version(self) -> tuple[int, int]: ...  # noqa: D102

    @property
    def lock(self) -> threading.RLock: ...  # noqa: D102

    def fork(self, cache: Any, tokens: int, /) -> Any:
        """The first `tokens` tokens of a cache, which stays as it is. Under `lock`."""
        ...


@dataclasses.dataclass(eq=False)
class _Kept:
    app: str
    key: str
    session: Session
    size_bytes: int


class PrefixSessions:
    """Ended sessions of apps, the least recently used first; for one thread. A holding of the governor (see
    `jaxllm.serving.server.memory.Holding`).

    A session is used for its own app alone. The conversation that it belongs to takes it; another prompt that
    begins in the same way, such as with the same instruction, gets a copy of what both have, which takes no
    more memory than the cache that it needs anyway.

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

    def reusable(self, app: str, prompt: tuple[int, ...]) -> dict[tuple[int, int], int]:
        """Weights version -> the tokens at a prompt's beginning that `take` would find computed by these
        weights for an app; without those of which there are too few."""
        found: dict[tuple[int, int], int] = {}
        for each in self._kept:
            if each.app == app:
                common, version = each.session.reusable(prompt), each.session.weights_version
                if common >= _LEAST_COMMON and version is not None:
                    found[version] = max(common, found.get(version, 0))
        return found

    def take(self, app: str, key: str, prompt: tuple[int, ...], runner: Forks) -> Session:
        """A session with the longest common prefix with a prompt among the app's own, of equal ones one with
        the key; an empty one where none is worth it.

        Args:
          app: that asks.
          key: of the call (see `Call.prefix_key`).
          prompt: token ids.
          runner: that computes the prompt.

        Returns:
          The session itself, which is no longer kept, or a copy of its beginning.
        """
        best, most = None, (_LEAST_COMMON - 1, True)
        for each in self._kept:
            if each.app == app and each.session.weights_version == runner.weights_version:
                rank = (each.session.reusable(prompt), each.key == key)
                if rank > most:
                    best, most = each, rank
        if best is None:
            return Session()
        if len(best.session.tokens) - most[0] <= _MOST_LEFT:
            self._drop(best)
            return best.session
        # It was of use just now.
        self._kept.remove(best)
        self._kept.append(best)
        return self._forked(best.session, most[0], runner)

    def keep(self, app: str, key: str, session: Session) -> None:
        """Keeps the session of an answer that has ended; where a limit ends, the least recently used go, the
        app's own before others'."""
        size, own = session.size_bytes, self._app_bytes(app) or self.limit_bytes
        if not size or len(session.tokens) < _LEAST_COMMON or size > min(own, self.limit_bytes):
            return
        # What it goes on with is of no further use.
        for each in [each for each in self._kept if each.app == app and _begins(session, each.session)]:
            self._drop(each)
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

    @staticmethod
    def _forked(session: Session, tokens: int, runner: Forks) -> Session:
        assert session.cache is not None
        with runner.lock:
            cache = runner.fork(session.cache, tokens)
        return Session(session.tokens[:tokens], cache, session.weights_version)

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


def _begins(session: Session, other: Session) -> bool:
    """Whether a session has all of another, and perhaps more."""
    same = session.weights_version == other.weights_version
    return same and session.tokens[: len(other.tokens)] == other.tokens
