"""Runs functions in the engine's thread, between two dispatches: what needs the engine and is no answer."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock
from typing import Any, TypeVar

from jaxllm.errors import JaxllmError
from serving.server.calls import Refused

Found = TypeVar("Found")
# So many functions of an app wait at most.
_MOST_WAITING = 16
# Answers wait no longer than for the function that runs when this time is over.
_PERIOD_S = 0.02


class EngineWork:
    """Functions that wait for the engine's thread. Any thread adds some, one runs them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting: list[tuple[str, Callable[[], Any], Future[Any]]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, app: str, what: Callable[[], Found]) -> "Future[Found]":
        """Adds a function.

        Args:
          app: for which it runs.
          what: is called once, unless the future is cancelled before.

        Returns:
          What it returns or raises.

        Raises:
          Refused: too many of the app wait.
        """
        future: Future[Found] = Future()
        with self._lock:
            if sum(each == app for each, *_ in self._waiting) >= _MOST_WAITING:
                raise Refused(
                    f"{_MOST_WAITING} requests of this app wait for the engine, which is the most; wait",
                    reason="full",
                )
            self._waiting.append((app, what, future))
        return future

    def run(self) -> dict[str, float]:
        """Calls functions in the order in which they came: one, and more while little time has passed.

        Returns:
          Each app's time, in milliseconds.
        """
        began_s, took_ms = time.perf_counter(), dict[str, float]()
        while self._waiting and (not took_ms or time.perf_counter() - began_s < _PERIOD_S):
            with self._lock:
                app, what, future = self._waiting.pop(0)
            one_s = time.perf_counter()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(what())
                except BaseException as error:
                    future.set_exception(error)
            took_ms[app] = took_ms.get(app, 0.0) + 1000 * (time.perf_counter() - one_s)
        return took_ms

    def fail(self, error: JaxllmError) -> None:
        """Ends all that wait with an error."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for *_, future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
