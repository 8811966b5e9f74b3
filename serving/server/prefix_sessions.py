"""Caches ended answers, so that a conversation that is sent again, or another one with the same instruction,
skips the tokens computed before."""

import dataclasses
import threading
from collections.abc import Callable, Collection
from typing import Any, Protocol

from jaxllm.serving.engine.request import Session

# Fewer common tokens are faster to compute than to reuse.
_LEAST_COMMON = 16
# A prompt that lacks at most this many last tokens of a session continues it: the last tokens of an answer
# may be encoded differently when they come back.
_MOST_LEFT = 16


class Forks(Protocol):
    """Copies the prefix of a cache, such as a runner."""

    @property
    def weights_version(self) -> tuple[int, int]: ...  # noqa: D102

    @property
    def lock(self) -> threading.RLock: ...  # noqa: D102

    def fork(self, cache: Any, tokens: int, /) -> Any:
        """A copy of the first `tokens` tokens of a cache. Under `lock`."""
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

    A session is used only for its own app. Its conversation takes the session itself; another prompt with a
    common prefix, such as the same instruction, gets a copy of it, which takes no more memory than the
    cache that it needs anyway.

    Attributes:
      name: kind of the holding.
      least_bytes: 0.
      most_bytes: the requested memory limit.
      limit_bytes: current memory limit of all sessions' caches.
      size_bytes: current size of all sessions' caches.
    """

    name = "prefixes"
    least_bytes = 0

    def __init__(self, most_bytes: int, app_bytes: Callable[[str], int] = lambda app: 0) -> None:
        """See the class; `app_bytes` returns the memory limit of one app's sessions, 0 for none."""
        self.most_bytes = self.limit_bytes = most_bytes
        self.size_bytes = 0
        self._app_bytes = app_bytes
        self._kept: list[_Kept] = []

    def __len__(self) -> int:
        return len(self._kept)

    def reusable(self, app: str, prompt: tuple[int, ...]) -> dict[tuple[int, int], int]:
        """Weights version -> length of the prompt's prefix that `take` would find cached for an app; without
        too short ones."""
        found: dict[tuple[int, int], int] = {}
        for each in self._kept:
            if each.app == app:
                common, version = each.session.reusable(prompt), each.session.weights_version
                if common >= _LEAST_COMMON and version is not None:
                    found[version] = max(common, found.get(version, 0))
        return found

    def take(self, app: str, key: str, prompt: tuple[int, ...], runner: Forks) -> Session:
        """The session of the app with the longest common prefix with a prompt, with the key if several are
        equal; an empty one if the prefix is too short.

        Args:
          app: app of the call.
          key: key of the call (see `Call.prefix_key`).
          prompt: token ids.
          runner: runner of the prompt.

        Returns:
          The session itself, which is removed from the cache, or a copy of its prefix.
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
        # Mark it as recently used.
        self._kept.remove(best)
        self._kept.append(best)
        return self._forked(best.session, most[0], runner)

    def keep(self, app: str, key: str, session: Session) -> None:
        """Caches the session of an ended answer; at a limit the least recently used are evicted, the app's
        own first."""
        size, own = session.size_bytes, self._app_bytes(app) or self.limit_bytes
        if not size or len(session.tokens) < _LEAST_COMMON or size > min(own, self.limit_bytes):
            return
        # The session that it continues is no longer useful.
        for each in [each for each in self._kept if each.app == app and _begins(session, each.session)]:
            self._drop(each)
        self._kept.append(_Kept(app, key, session, size))
        self.size_bytes += size
        self._shrink([each for each in self._kept if each.app == app], own)
        self._shrink(self._kept, self.limit_bytes)

    def forget(self, weights_versions: Collection[tuple[int, int]]) -> None:
        """Drops the sessions of weights that were unloaded."""
        for each in [each for each in self._kept if each.session.weights_version in weights_versions]:
            self._drop(each)

    def resize(self, limit_bytes: int) -> None:
        """Sets the memory limit; evicts the least recently used sessions beyond it."""
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
    """Whether a session extends or equals another."""
    same = session.weights_version == other.weights_version
    return same and session.tokens[: len(other.tokens)] == other.tokens
