"""Runs writes one after the other in a thread of their own, in the order in which they came."""

import collections
import logging
import os
import threading
from collections.abc import Callable

from jaxllm.errors import one_line

_LOG = logging.getLogger("jaxllm")


class WriteQueue:
    """Jobs by the context that they write. A forked child has none: they are its parent's.

    Args:
      most: jobs that may wait; who brings more waits until one has ended.
    """

    def __init__(self, most: int = 8) -> None:
        self._most, self._process = most, os.getpid()
        self._waiting: collections.deque[tuple[str, Callable[[], None]]] = collections.deque()
        # The context whose job runs.
        self._running: str | None = None
        self._ending = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def inside(self) -> bool:
        """Whether this is the thread that runs the jobs."""
        return threading.current_thread() is self._thread

    def start(self) -> None:
        """Starts the thread. It never keeps the interpreter from exiting: `close` waits for its jobs."""
        self._thread = threading.Thread(target=self._run, name="jaxllm-contexts", daemon=True)
        self._thread.start()

    def put(self, name: str, job: Callable[[], None], taken: Callable[[], None] = lambda: None) -> None:
        """Takes a job, as soon as there is room for it, and calls `taken` before the job runs."""
        with self._changed:
            while len(self._waiting) >= self._most:
                self._changed.wait()
            # Before there is a job: an interrupt must not leave one of which nobody was told.
            self._changed.notify_all()
            self._waiting.append((name, job))
            taken()

    def busy(self, name: str) -> bool:
        """Whether a job of a context waits or runs."""
        with self._changed:
            return self._has(name)

    def wait(self, name: str = "") -> None:
        """Waits until no job of a context waits or runs, or none at all. A job waits for none."""
        if self._thread is None or self.inside or self._process != os.getpid():
            return
        with self._changed:
            while self._has(name):
                self._changed.wait()

    def close(self) -> None:
        """Waits for all jobs, and ends the thread."""
        self.wait()
        if self._thread is None or self._process != os.getpid():
            return
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join()

    def _has(self, name: str) -> bool:
        there = [each for each, _ in self._waiting]
        if self._running is not None:
            there.append(self._running)
        return name in there if name else bool(there)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._ending:
                    self._changed.wait()
                if not self._waiting:
                    return
                self._running, job = self._waiting.popleft()
                self._changed.notify_all()
            try:
                job()
            except Exception as error:
                _LOG.error("a write of the context %s failed: %s", self._running, one_line(error))
            finally:
                # Else what it wrote would stay in memory until the next one.
                del job
                with self._changed:
                    self._running = None
                    self._changed.notify_all()
