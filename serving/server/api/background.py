"""Generates responses without a connection: callers poll them, and may cancel them."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from jaxllm.serving.server.api.choices import Choice
from jaxllm.serving.server.api.errors import ApiError, api_error


class Answering(Protocol):
    """See `jaxllm.serving.server.api.answers.Answer`."""

    @property
    def choices(self) -> Sequence[Choice]: ...  # noqa: D102
    def news(self) -> AsyncGenerator[Choice, None]: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


class Writer(Protocol):
    """See `jaxllm.serving.server.api.responses.ResponseWriter`."""

    id: str

    async def take(self, choice: Choice) -> Any: ...  # noqa: D102
    async def ended(self) -> Any: ...  # noqa: D102
    async def stored(self, response: dict[str, Any]) -> Any: ...  # noqa: D102
    def response(self, status: str) -> dict[str, Any]: ...  # noqa: D102
    def failure(self, error: ApiError) -> dict[str, Any]: ...  # noqa: D102


class Background:
    """The running responses of all apps, by app and id. For one loop. They count as calls to all limits."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], tuple[Answering, Writer, asyncio.Task[None]]] = {}

    def start(self, app: str, answer: Answering, writer: Writer) -> dict[str, Any]:
        """Begins to generate; returns the response so far. It is stored when it ends, or fails."""

        async def run() -> None:
            try:
                async with contextlib.aclosing(answer.news()) as news:
                    async for choice in news:
                        await writer.take(choice)
                await writer.ended()
            except asyncio.CancelledError:
                await writer.stored(writer.response("cancelled"))
            except Exception as error:
                await writer.stored(writer.failure(api_error(error)))
            finally:
                del self._running[app, writer.id]

        self._running[app, writer.id] = answer, writer, asyncio.ensure_future(run())
        return self._response(answer, writer)

    def response(self, app: str, name: str) -> dict[str, Any] | None:
        """A running response so far; None if none of the app has this id."""
        found = self._running.get((app, name))
        return found and self._response(*found[:2])

    async def cancel(self, app: str, name: str) -> None:
        """Cancels a response, if it is running, and waits until it is stored."""
        if (found := self._running.get((app, name))) is not None:
            # A task that has not begun would be gone without a word.
            await asyncio.sleep(0)
            found[0].close()
            found[2].cancel()
            await asyncio.gather(found[2], return_exceptions=True)

    def _response(self, answer: Answering, writer: Writer) -> dict[str, Any]:
        started = answer.choices[0].started is not None
        return writer.response("in_progress" if started else "queued")
