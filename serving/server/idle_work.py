"""Uses the engine's thread while the service is idle: measures the full profile of a device that has a coarse
one.

A first start should not wait for the minutes that a full profile requires. The engine's thread measures one
dispatch at a time, so that a call waits for one dispatch at most. A run that a call has interrupted is
repeated, because the device was not idle. The full profile is used for plans at once, and stored for later
starts.
"""

import logging
import time
from collections.abc import Callable
from typing import TypedDict

from jaxllm.errors import JaxllmError
from jaxllm.serving.elastic.profile import DeviceProfile, save_profile
from jaxllm.serving.elastic.profiling import Measurement, profile_path
from jaxllm.serving.server.service import LLMService

_log = logging.getLogger(__name__)
# Calls often come in bursts: measure only after this time without calls.
_QUIET_S = 2.0


class ProfileFacts(TypedDict):
    """The profile that the service plans with.

    Attributes:
      kind: "whole", or "coarse" until it is refined.
      runs_done, runs: progress of measuring the full profile; 0 if there is none.
    """

    kind: str
    runs_done: int
    runs: int


class ProfileRefinement:
    """Measures the full profile of a service that has a coarse one (see `IdleWork`); does nothing if the
    profile is full. In the engine's thread, except `facts`.

    Args:
      service: service that plans with the profile.
      use: receives the finished profile.
      quiet_s: time without calls before it measures.
      clock: returns seconds.
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
        """The profile in use. From any thread."""
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
            # Answers continue with the coarse profile.
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
