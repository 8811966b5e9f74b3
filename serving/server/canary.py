"""Checks with an answer of one token whether the engine works.

After an error that may be the engine's rather than a call's, such as a changed model file, the check runs
at once, and repeatedly until it succeeds: calls that provoke errors cannot end the service, and an engine
that fails every call is stopped. A readiness request runs the check if nothing was answered for a while.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from jaxllm.errors import BundleError, JaxllmError, NotFinite, one_line
from jaxllm.serving.elastic.planned_service import PlannedService
from jaxllm.serving.engine.request import GenerationConfig

Found = TypeVar("Found")
# An id that every model has: a text may have characters without ids.
_PROMPT = (0,)
# Number of consecutive failures, and the time between two, after which the engine counts as failed.
_MOST_FAILURES, _PAUSE_S = 3, 2.0
# Time without answers after which a readiness request checks the engine.
_STALE_S = 60.0
_log = logging.getLogger(__name__)


class EngineFailed(JaxllmError):
    """The engine could not answer several times in a row."""


class Canary:
    """Tracks whether the engine answers. Methods are for the engine's thread unless noted.

    Args:
      answer: lets the engine answer one token; raises its error.
      clock: returns seconds.

    Attributes:
      suspected: whether an error may have been the engine's, with no successful answer since.
    """

    def __init__(self, answer: Callable[[], object], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._answer, self._clock = answer, clock
        self.suspected, self._failures = False, 0
        self._answered_s, self._next_s = clock(), clock()

    @property
    def stale(self) -> bool:
        """Whether nothing was answered for a while. From any thread."""
        return self._clock() - self._answered_s > _STALE_S

    def answered(self) -> None:
        """Records that a call got output."""
        self._answered_s = self._clock()

    def failed(self, error: Exception) -> None:
        """Records an error of a call. From any thread."""
        if not isinstance(error, JaxllmError) or isinstance(error, BundleError | NotFinite):
            self.suspected = True

    def watched(self, what: Callable[[], Found]) -> Found:
        """Calls a function and records its errors. From any thread."""
        try:
            return what()
        except Exception as error:
            self.failed(error)
            raise

    def step(self, *, readiness: bool = False) -> None:
        """Tests the engine after an error, or for `readiness` if nothing was answered for a while, if a test
        is due.

        Raises:
          EngineFailed: the last allowed test failed.
        """
        if not (self.stale if readiness else self.suspected) or self._clock() < self._next_s:
            return
        try:
            self._answer()
        except Exception as error:
            self.suspected, self._failures = True, self._failures + 1
            self._next_s = self._clock() + _PAUSE_S
            reason = one_line(error)
            _log.error(
                "the engine cannot answer (%d of %d times): %s", self._failures, _MOST_FAILURES, reason
            )
            if self._failures >= _MOST_FAILURES:
                raise EngineFailed(f"the engine cannot answer any more: {reason}") from error
        else:
            self.suspected, self._failures = False, 0
            self.answered()


def service_canary(service: PlannedService, adapters: Any) -> Canary:
    """The canary of a service; it answers without adapters."""

    def answer() -> None:
        adapters.use("")
        service.engine.generate(_PROMPT, GenerationConfig(max_tokens=1))

    return Canary(answer)
