"""Sends the dashboard's readers a snapshot each second and each ended call, as server-sent events.

One task makes each event once for all readers, while there are any. A reader's queue is bounded: one that
does not keep up is dropped, and may connect again.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from serving.server.calls import Backend, Refused
from serving.server.metrics import Metrics

MOST_READERS = 16
_QUEUED_EVENTS = 8
_log = logging.getLogger(__name__)


class Reader:
    """One reader of the feed.

    Attributes:
      dropped: done when it did not keep up, or the feed has closed.
    """

    def __init__(self) -> None:
        self.dropped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._events: asyncio.Queue[bytes] = asyncio.Queue(_QUEUED_EVENTS)

    def put(self, event: bytes) -> None:
        """Queues an event, or drops the reader where its queue is full."""
        try:
            self._events.put_nowait(event)
        except asyncio.QueueFull:
            self.drop()

    def drop(self) -> None:
        """Tells that no more events come."""
        if not self.dropped.done():
            self.dropped.set_result(None)

    async def events(self) -> AsyncIterator[bytes]:
        """Events without end."""
        while True:
            yield await self._events.get()


class Feed:
    """What the dashboard shows, as events for any number of readers up to a limit. Lives in one event loop.

    Args:
      backend: whose figures are shown.
      metrics: whose history is shown.
      interval_s: between snapshots.
      most_readers: at once.
    """

    def __init__(
        self, backend: Backend, metrics: Metrics, *, interval_s: float = 1.0, most_readers: int = MOST_READERS
    ) -> None:
        self._backend, self._metrics = backend, metrics
        self._interval_s, self._most = interval_s, most_readers
        self._readers: set[Reader] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._last = 0

    @contextlib.contextmanager
    def reader(self) -> Iterator[Reader]:
        """A reader, whose first event has the recent calls.

        Raises:
          Refused: there are as many readers as there may be.
        """
        if len(self._readers) >= self._most:
            raise Refused(
                f"{self._most} dashboards are open, and no more may be: close one",
                reason="full",
                retry_after_s=10,
            )
        own = Reader()
        if not self._readers:
            # Calls until now come with the first event.
            self._last = self._number_of_last_call()
            self._ticking = asyncio.create_task(self._tick(), name="dashboard feed")
        calls = [each for each in self._metrics.history.calls_after(0) if each["number"] <= self._last]
        own.put(event("hello", {"calls": calls}))
        own.put(event("snapshot", self.snapshot()))
        self._readers.add(own)
        try:
            yield own
        finally:
            self._readers.discard(own)
            if not self._readers and self._ticking is not None:
                self._ticking.cancel()
                self._ticking = None

    def close(self) -> None:
        """Drops all readers."""
        for each in list(self._readers):
            each.drop()

    def snapshot(self) -> dict[str, Any]:
        """What is shown of now."""
        return {
            "time_s": time.time(),
            "model": self._model(),
            "health": dict(self._backend.health()),
            "figures": dict(self._backend.snapshot()),
            "history": self._metrics.history.summary(),
        }

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                calls = self._metrics.history.calls_after(self._last)
                if calls:
                    self._last = calls[-1]["number"]
                    self._put(event("calls", calls))
                self._put(event("snapshot", self.snapshot()))
            except Exception:
                # The feed outlives what is wrong with one snapshot; the dashboard shows that none came.
                _log.exception("the dashboard's snapshot could not be made")

    def _put(self, data: bytes) -> None:
        for each in list(self._readers):
            each.put(data)
            if each.dropped.done():
                self._readers.discard(each)

    def _number_of_last_call(self) -> int:
        calls = self._metrics.history.calls_after(0)
        return calls[-1]["number"] if calls else 0

    def _model(self) -> Mapping[str, Any] | None:
        """Facts of the model; None while it is loading."""
        try:
            facts = self._backend.facts()
        except Refused:
            return None
        return {
            "name": facts.name,
            "window_tokens": facts.window_tokens,
            "levels": list(facts.levels),
            "adapters": list(facts.adapters),
            "opened_s": facts.opened_s,
            "has_chat_template": facts.has_chat_template,
        }


def event(name: str, data: Any, encode: Callable[..., str] = json.dumps) -> bytes:
    """A server-sent event. JSON has no line ends of its own, so that its data is one line."""
    return f"event: {name}\ndata: {encode(data, separators=(',', ':'), default=str)}\n\n".encode()
