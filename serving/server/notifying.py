"""Tells systemd how the service is: ready, stopping, alive (the protocol of sd_notify)."""

import os
import socket
from collections.abc import MutableMapping

_US_PER_S = 1e6


class Notifier:
    """Sends states to the socket that systemd named; does nothing where it named none.

    Attributes:
      watchdog_s: the service is restarted when it has not sent WATCHDOG=1 for so long; None for never.
    """

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Takes the variables away, so that no child of this process speaks for it."""
        name = environment.pop("NOTIFY_SOCKET", "")
        period, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        # A name that begins with @ has no file.
        self._name = "\0" + name[1:] if name.startswith("@") else name
        own = bool(name) and pid in ("", str(os.getpid()))
        self.watchdog_s = int(period) / _US_PER_S if own and period.isdecimal() and int(period) else None

    def send(self, *states: str) -> None:
        """Sends states such as "READY=1". What cannot be sent is left out: systemd's patience decides."""
        if not self._name:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.setblocking(False)
            try:
                out.sendto("\n".join(states).encode(), self._name)
            except OSError:
                return
