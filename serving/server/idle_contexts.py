"""Has contexts worked for while the service has nothing to answer (see `serving.contexts.idle`)."""

import logging
import time
from collections.abc import Callable

from serving.contexts.manager import Contexts
from serving.server.dispatches import IdleWork

_log = logging.getLogger(__name__)
# Calls often come one soon after the other: nothing is done until none has come for so long.
_QUIET_S = 1.0


class ContextIdleWork:
    """Prefetches and widens chunks of contexts (see `IdleWork`). In the engine's thread.

    Args:
      contexts: of all apps.
      quiet_s: time without calls before it begins.
      clock: in seconds.
    """

    def __init__(
        self,
        contexts: Contexts,
        *,
        quiet_s: float = _QUIET_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._contexts: Contexts | None = contexts
        self._quiet_s, self._clock, self._from_s = quiet_s, clock, clock() + quiet_s

    def step(self) -> bool:
        """See `IdleWork`."""
        if self._contexts is None or self._clock() < self._from_s:
            return False
        try:
            return self._contexts.idle()
        except Exception:
            # Answers go on without.
            _log.exception("contexts are not worked for any further while the service is idle")
            self._contexts = None
            return False

    def interrupt(self) -> None:
        """See `IdleWork`."""
        self._from_s = self._clock() + self._quiet_s


class InOrder:
    """Several kinds of work, the first of which goes first (see `IdleWork`)."""

    def __init__(self, *works: IdleWork) -> None:
        self._works = works

    def step(self) -> bool:
        """See `IdleWork`."""
        return any(each.step() for each in self._works)

    def interrupt(self) -> None:
        """See `IdleWork`."""
        for each in self._works:
            each.interrupt()
