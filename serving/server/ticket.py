"""Carries the events of one call from the engine's thread to its reader in the event loop."""

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from jaxllm.errors import JaxllmError
from serving.server.calls import Call, Ended, Event


class EngineTicket:
    """A call that the executor has taken (see `serving.server.calls.Ticket`).

    The engine's thread puts events and never waits: a reader that is slow lets them pile up, as many as its
    answer has pieces.

    Attributes:
      arrived_s: when the call came, by `time.perf_counter`.
      cancelled: whether the reader wants no more; the engine's thread looks between two dispatches.
    """

    def __init__(
        self, call: Call, loop: asyncio.AbstractEventLoop, on_cancel: Callable[[], None] = lambda: None
    ) -> None:
        self._call, self._loop, self._on_cancel = call, loop, on_cancel
        self._events: collections.deque[Event | JaxllmError] = collections.deque()
        self._there = asyncio.Event()
        self._over = False
        self.arrived_s, self.cancelled = time.perf_counter(), False

    @property
    def call(self) -> Call:
        """That was taken."""
        return self._call

    @property
    def over(self) -> bool:
        """Whether its last event was put."""
        return self._over

    def cancel(self) -> None:
        """See `Ticket`."""
        if not self._over and not self.cancelled:
            self.cancelled = True
            self._on_cancel()
        self._there.set()

    async def events(self) -> AsyncIterator[Event]:
        """See `Ticket`."""
        while not self.cancelled:
            while self._events and not self.cancelled:
                event = self._events.popleft()
                if isinstance(event, JaxllmError):
                    raise event
                yield event
                if isinstance(event, Ended):
                    return
            if not self.cancelled:
                self._there.clear()
                if not self._events:
                    await self._there.wait()

    def put(self, event: Event | JaxllmError) -> None:
        """Adds an event, from the engine's thread; an `Ended` or an error is the last, and what comes after
        it is dropped."""
        if self._over:
            return
        self._over = isinstance(event, Ended | JaxllmError)
        # The loop may be closed while the engine's thread ends its last calls.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._take, event)

    def _take(self, event: Event | JaxllmError) -> None:
        if not self.cancelled:
            self._events.append(event)
        self._there.set()
