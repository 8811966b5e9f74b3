"""Detects that a run is to stop soon, so that it saves a checkpoint first."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import jax
from jax.experimental import multihost_utils

_NOTE = b"\nstopping after this step, which is saved; Ctrl-C again ends at once\n"


class Preemption:
    """Context in which SIGTERM or Ctrl-C requests a stop after the current step instead of ending the
    process; a second Ctrl-C ends it.

    Several processes agree on the step through JAX's own service, which detects SIGTERM in each of them.

    Attributes:
      reason: signal that requested the stop, for messages.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._before: dict[int, Any] = {}
        # Only the main thread can set handlers; a run in another thread ends at a signal as usual.
        self._handles = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "Preemption":
        if self._handles:
            for number in (signal.SIGTERM, signal.SIGINT):
                # Ignored, as shells have it in the background, or a host program's in C: it stays so.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def asked(self, step: int) -> bool:
        """Whether the run shall stop after step `step`, in all processes alike."""
        if jax.process_count() > 1:
            self.reason = "SIGTERM"
            return bool(multihost_utils.reached_preemption_sync_point(step))
        return bool(self.reason)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, self._before[signal.SIGINT])
            # A step may be long. Not through a stream, which may be in use.
            os.write(2, _NOTE)
        self.reason = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
