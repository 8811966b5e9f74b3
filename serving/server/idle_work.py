"""Uses the engine's thread while the service has nothing to answer: measures the
whole profile of a device that has a coarse one.

A first start should not wait for the minutes that a whole profile requires. The engine's thread measures a
dispatch at a time, so that a call waits for one dispatch at most. A run that a call has interrupted is
repeated, because the device was not idle. The whole profile is planned by at once, and kept for later starts.
"""

import logging
import time
from collections.abc import Callable
from typing import TypedDict

from jaxllm.errors import JaxllmError
from jaxllm.serving.elastic.engine_profile import profile_path
from jaxllm.serving.elastic.profile import DeviceProfile, save_profile
from jaxllm.serving.elastic.profiling import Measurement
from jaxllm.serving.server.service import LLMService

_log = logging.getLogger(__name__)
# Calls often come one soon after the other: nothing is measured until none has come for so long.
_QUIET_S = 2.0


class ProfileFacts(TypedDict):
    """Which profile the service plans by.

    Attributes:
      kind: "whole", or "coarse" until it is refined.
      runs_done, runs: of the measurement of the whole profile; 0 where there is none to do.
    """

    kind: str
    runs_done: int
    runs: int


class ProfileRefinement:
    """Measures the whole profile of a service that has a coarse one (see `IdleWork`); one that has a whole
    profile leaves nothing to do. In the engine's thread, but for `facts`.

    Args:
      service: that plans by the profile.
      use: takes the profile once it is there.
      quiet_s: time without calls before it measures.
      clock: in seconds.
    """

    def __init__(
        self,
        service: LLMService,
        use: Callable[[DeviceProfile], None],
        *,
        quiet_s: float = _QUIET_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service, self._use, self._clock, self._quiet_s = service, use, clock, quiet_s
        coarse = service.profile.coarse
        self._measurement = Measurement([service.engine]) if coarse else None
        self._from_s = clock() + quiet_s
        if self._measurement is not None:
            _log.info(
                "plans are made by a coarse profile of this device; the whole one is measured while there is "
                "nothing to answer, in %d runs",
                self._measurement.total,
            )

    def facts(self) -> ProfileFacts:
        """What is planned by. From any thread."""
        if (measurement := self._measurement) is None:
            return {"kind": "coarse" if self._service.profile.coarse else "whole", "runs_done": 0, "runs": 0}
        return {"kind": "coarse", "runs_done": measurement.done, "runs": measurement.total}

    def step(self) -> bool:
        """See `IdleWork`."""
        measurement = self._measurement
        if measurement is None or self._clock() < self._from_s:
            return False
        try:
            if measurement.step():
                return True
            (profile,) = measurement.profiles()
            self._use(profile)
            engine = self._service.engine
            save_profile(profile, profile_path(engine.model.bundle, engine.options))
            _log.info("plans are made by the whole profile of this device from here on")
        except JaxllmError as error:
            # Answers go on, by the profile that there is.
            _log.error("the device's profile is not refined any further: %s", error)
        except Exception:
            _log.exception("the device's profile is not refined any further")
        self._measurement = None
        return True

    def interrupt(self) -> None:
        """See `IdleWork`."""
        if self._measurement is not None:
            self._measurement.interrupt()
            self._from_s = self._clock() + self._quiet_s
