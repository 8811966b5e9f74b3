"""Keeps the caches of ended answers, so that a client that sends the whole conversation again need not wait
for what was computed before."""

import dataclasses

import jax

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
    """Ended sessions of apps, the least recently used first; for one thread.

    A session is used for its own app alone. It is taken, not copied, so one of which the new prompt has only
    a small part is left to the conversation that it belongs to.

    Attributes:
      budget_bytes: most bytes of the tokens of all sessions.
      size_bytes: of them now.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes, self.size_bytes = budget_bytes, 0
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
        """Keeps the session of an answer that has ended; the least recently used go where the budget ends."""
        if session.cache is None or len(session.tokens) < _LEAST_COMMON:
            return
        arrays = [each for each in jax.tree.leaves(session.cache) if each.ndim]
        share = len(session.tokens) / session.cache.capacity_tokens
        size = int(share * sum(each.nbytes for each in arrays))
        if size > self.budget_bytes:
            return
        self._kept.append(_Kept(app, key, session, size))
        self.size_bytes += size
        self.shrink(self.budget_bytes)

    def shrink(self, budget_bytes: int) -> None:
        """Drops the least recently used sessions until the others fit into so many bytes."""
        while self.size_bytes > budget_bytes:
            self._drop(self._kept[0])

    def _drop(self, kept: _Kept) -> None:
        self._kept.remove(kept)
        self.size_bytes -= kept.size_bytes
