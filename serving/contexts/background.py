"""Jobs of contexts that run in a thread, errors that wait until they can be raised, and closing at exit."""

import atexit
import collections
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from jaxllm.errors import JaxllmError, one_line

_LOG = logging.getLogger("jaxllm")
_LOOK_S = 0.0005
Coming = TypeVar("Coming")


class WriteQueue(Generic[Coming]):
    """Jobs by context, run sequentially in a thread, with the context's future state. A forked child has
    none: they belong to its parent.

    No locks are used: an interrupt while one is released would leave it locked, and the thread would wait
    forever. Jobs are in a deque, whose operations are atomic, and waiting polls.

    Args:
      most: maximum number of waiting jobs; `put` waits for space.
      thread: name of the thread.
    """

    def __init__(self, most: int = 8, *, thread: str = "jaxllm-contexts") -> None:
        self._most, self._thread_name, self._process = most, thread, os.getpid()
        # Jobs that have not ended; the first one runs.
        self._jobs: collections.deque[tuple[str, Callable[[], None], Coming]] = collections.deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ending = False
        self._thread: threading.Thread | None = None

    @property
    def inside(self) -> bool:
        """Whether this is the thread that runs the jobs."""
        return threading.current_thread() is self._thread

    def start(self) -> None:
        """Starts the thread. It never keeps the interpreter from exiting: `close` waits for its jobs."""
        self._thread = threading.Thread(target=self._run, name=self._thread_name, daemon=True)
        self._thread.start()

    def put(self, name: str, job: Callable[[], None], coming: Coming) -> None:
        """Adds a job of a context, after waiting for space; `coming` is the context's state after it."""
        while len(self._jobs) > self._most:
            self._wake.put(None)
            time.sleep(_LOOK_S)
        self._jobs.append((name, job, coming))
        self._wake.put(None)

    def coming(self) -> dict[str, Coming]:
        """Future states of contexts with pending jobs, by name."""
        return {name: coming for name, _, coming in tuple(self._jobs)}

    def busy(self, name: str = "") -> bool:
        """Whether a job of a context, or any job, is pending."""
        return any(each == name or not name for each, _, _ in tuple(self._jobs))

    def wait(self, name: str = "") -> None:
        """Waits until no job of a context, or no job at all, is pending. Jobs themselves never wait."""
        if self._thread is None or self.inside or self._process != os.getpid():
            return
        while self.busy(name):
            # Repeated: an interrupt may have come between a job and its signal.
            self._wake.put(None)
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Waits for all jobs, and ends the thread."""
        self.wait()
        if self._thread is None or self._process != os.getpid():
            return
        self._ending = True
        self._wake.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.get()
            while self._jobs:
                name, job, coming = self._jobs[0]
                try:
                    job()
                except Exception as error:
                    _LOG.error("a job of the context %s failed: %s", name, one_line(error))
                finally:
                    # Else the job's data would stay in memory until the next one.
                    del job, coming
                    self._jobs.popleft()
            if self._ending:
                return


class PendingErrors:
    """Errors of storing dropped answers, and of writing in the background, by context. For any thread.

    They are logged at once, and raised by the context's next call, or when all contexts are closed.
    """

    def __init__(self) -> None:
        self._errors: dict[str, JaxllmError] = {}

    def note(self, name: str, error: JaxllmError) -> None:
        """Stores and logs the error of a dropped answer in a context."""
        self._note(
            name, f"the last answer in the context {name} could not be kept when it was dropped", error
        )

    def note_unwritten(self, name: str, error: JaxllmError) -> None:
        """Stores and logs the error of writing a context's chunks."""
        what = f"chunks of the last answer in the context {name} could not be written; its tokens are kept, "
        self._note(name, f"{what}and the next call computes its chunks", error)

    def _note(self, name: str, what: str, error: JaxllmError) -> None:
        self._errors[name] = type(error)(f"{what}: {error}")
        self._errors[name].__cause__ = error
        _LOG.warning("%s: %s", what, error)

    def has(self, name: str) -> bool:
        """Whether a context has an error."""
        return name in self._errors

    def forget(self, name: str) -> None:
        """Removes a context's error."""
        self._errors.pop(name, None)

    def raise_for(self, name: str) -> None:
        """Raises a context's error, once."""
        if (error := self._errors.pop(name, None)) is not None:
            raise error

    def raise_first(self) -> None:
        """Raises the first error; the others stay."""
        for name in list(self._errors):
            self.raise_for(name)


# Open contexts, which are closed at exit, except by a forked child.
_OPEN: "weakref.WeakSet[Any]" = weakref.WeakSet()


def close_at_exit(what: Any) -> None:
    """Registers contexts to be closed when this process exits, before what was registered earlier."""
    _OPEN.add(what)
    # Register again, after the engine's exit function: the last one runs first.
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def forget_at_exit(what: Any) -> None:
    """Unregisters closed contexts."""
    _OPEN.discard(what)


def _close_all() -> None:
    for each in list(_OPEN):
        if not each.forked:
            try:
                each.close()
            except Exception as error:
                _LOG.warning("the last answer could not be kept at exit: %s", one_line(error))
