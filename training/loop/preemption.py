"""Notices that a run is to stop soon, so that it saves a checkpoint first."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import jax
from jax.experimental import multihost_utils


class Preemption:
    """A context in which SIGTERM asks for a stop after the current step, rather than end the process.

    Several processes agree on the step through JAX's own service, which notices SIGTERM in each of them.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None
        # Handlers can be set in the main thread alone; a run in another thread ends at SIGTERM as ever.
        self._handles = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "Preemption":
        if self._handles:
            self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handles:
            signal.signal(signal.SIGTERM, self._before)

    def asked(self, step: int) -> bool:
        """Whether the run shall stop after step `step`, in all processes alike."""
        if jax.process_count() > 1:
            return bool(multihost_utils.reached_preemption_sync_point(step))
        return self._asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
