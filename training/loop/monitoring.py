"""Configures where a run reports progress, and traces a few steps with JAX's profiler."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxllm.errors import ConfigError

# The first steps compile and fill caches.
SKIPPED_STEPS = 2
TRACED_STEPS = 3


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Monitoring:
    """Destinations of a run's progress.

    Attributes:
      console: console of lines of progress; None for the terminal's error stream.
      tensorboard: whether TensorBoard's events are written into the run's folder, too.
      profile: a folder for a trace of a few steps, see `StepTrace`; None for no trace.
    """

    console: Console | None = None
    tensorboard: bool = False
    profile: Path | None = None

    def own_console(self) -> Console:
        """The console of this process; all but the first are silent."""
        if jax.process_index():
            return Console(quiet=True)
        return self.console or Console(stderr=True)


class StepTrace:
    """Traces steps 3 to 5 of a process for xprof and TensorBoard.

    Args:
      folder: folder of the trace; None traces nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._last = SKIPPED_STEPS + TRACED_STEPS
        self._done, self._tracing = 0, False

    def expect(self, steps: int) -> None:
        """Sets the number of steps that are left to run.

        Raises:
          ConfigError: there are too few to trace any.
        """
        if self._folder is not None and steps <= SKIPPED_STEPS:
            raise ConfigError(
                f"--profile traces steps after the first {SKIPPED_STEPS}, and {max(steps, 0)} are left: "
                "train more steps (--steps), or leave it out"
            )
        self._last = min(steps, self._last)

    def __enter__(self) -> "StepTrace":
        return self

    def __exit__(self, *_: object) -> None:
        if self._tracing:
            jax.profiler.stop_trace()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Surrounds a step; its results are passed to `finish`."""
        if self._folder is not None and self._done == SKIPPED_STEPS:
            jax.profiler.start_trace(str(self._folder))
            self._tracing = True
        if not self._tracing:
            yield
            return
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            yield

    def finish(self, results: Any) -> None:
        """Counts a step; ends the trace when the last step's results are ready."""
        self._done += 1
        if self._tracing and self._done == self._last:
            jax.block_until_ready(results)
            jax.profiler.stop_trace()
            self._tracing = False
