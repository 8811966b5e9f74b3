"""Describes what the system of a device reports: heat, memory to give back, apps in the foreground.

    executor.device = DeviceState(thermal="severe", foreground=("mail",))

Words are Android's: thermal states of PowerManager, trim levels of ComponentCallbacks2. Heat bounds the work
of every call as a share of the whole model's, so that the planner's predictions choose the levels.
"""

import dataclasses
from typing import Literal, get_args

from jaxllm.options import check_options
from jaxllm.serving.server.sockets import require_name

Thermal = Literal["none", "light", "moderate", "severe", "critical", "emergency"]
Trim = Literal["none", "moderate", "critical"]

# Share of the whole model's work that a call may take: Android calls moderate "not largely impacting", severe
# "largely impacting" to users, and asks for all that can be done about critical.
_WORK_SHARES = dict(zip(get_args(Thermal), (1.0, 1.0, 0.75, 0.5, 0.25, 0.0), strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceState:
    """The state of a device.

    Attributes:
      thermal: its heat.
      trim: how much memory it wants back: step by step, or all that can be had.
      foreground: apps in the foreground; None if the system does not report them.
    """

    thermal: Thermal = "none"
    trim: Trim = "none"
    foreground: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_options(self)
        for app in self.foreground or ():
            require_name(app)

    @property
    def work_share(self) -> float:
        """Maximum share of the whole model's work that a call may take; 0 for no calls."""
        return _WORK_SHARES[self.thermal]

    @property
    def figures(self) -> dict[str, float]:
        """Numbers for metrics: states by their place, from 0 for none."""
        return {
            "thermal": get_args(Thermal).index(self.thermal),
            "trim": get_args(Trim).index(self.trim),
            "work_share": self.work_share,
        }
