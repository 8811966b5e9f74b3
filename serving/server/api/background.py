"""Generates responses without a connection: callers poll them, and may cancel them."""

import asyncio
from typing import Any

from jaxllm.serving.server.api.errors import api_error


class Background:
    """The running responses of all apps, by app and id. For one loop. They count as calls to all limits.

    A writer is a `jaxllm.serving.server.api.responses.ResponseWriter`.
    """

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], tuple[Any, asyncio.Task[None]]] = {}

    def start(self, app: str, writer: Any) -> dict[str, Any]:
        """Begins to generate; returns the response so far. It is stored when it ends, or fails."""

        async def run() -> None:
            try:
                await writer.whole()
            except asyncio.CancelledError:
                await writer.stored(writer.response("cancelled"))
            except Exception as error:
                await writer.stored(writer.failure(api_error(error)))
            finally:
                del self._running[app, writer.id]

        self._running[app, writer.id] = writer, asyncio.ensure_future(run())
        return writer.so_far()

    def response(self, app: str, name: str) -> dict[str, Any] | None:
        """A running response so far; None if none of the app has this id."""
        found = self._running.get((app, name))
        return found and found[0].so_far()

    async def cancel(self, app: str, name: str) -> None:
        """Cancels a response, if it is running, and waits until it is stored."""
        if (found := self._running.get((app, name))) is not None:
            # A task that has not begun would be gone without a word.
            await asyncio.sleep(0)
            found[1].cancel()
            await asyncio.gather(found[1], return_exceptions=True)
