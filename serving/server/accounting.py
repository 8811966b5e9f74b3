"""Counts each call for its app's limits and for metrics, from its submission to its end."""

import dataclasses
import time
from collections.abc import AsyncIterator

from jaxllm.errors import JaxllmError
from serving.server.backend import EngineBackend
from serving.server.calls import Call, ContextFacts, Ended, Event, Piece, Refused, Started, Ticket
from serving.server.job import prompt_ids_of
from serving.server.limits import Admission, Limiter, Limits, require_context, require_pin
from serving.server.logs import CallRecord, current_request
from serving.server.metrics import Metrics


class AccountedBackend(EngineBackend):
    """A backend that keeps apps within their limits and counts what they do.

    Attributes:
      limiter: of all apps; its limits may be replaced.
      metrics: of all calls.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self.limiter, self.metrics = Limiter(limits), Metrics(self.snapshot)

    def submit(self, call: Call) -> Ticket:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See `Backend`.

        Raises:
          Refused: also where a limit of the app is reached.
        """
        try:
            call = self._encoded(call)
            admission = self.limiter.admit(
                call.app,
                prompt_tokens=len(call.prompt) if isinstance(call.prompt, tuple) else 0,
                max_tokens=call.config.max_tokens,
                now_s=time.monotonic(),
            )
            try:
                ticket = super().submit(call)
            except BaseException:
                admission.ended(tokens=0, now_s=time.monotonic())
                raise
        except Refused as error:
            self.metrics.refused(call.app, error.reason)
            raise
        self.metrics.taken(call.app)
        record, request = CallRecord(), current_request()
        if request is not None:
            request.calls.append(record)
        return AccountedTicket(ticket, admission, self.metrics, record)

    def prefix_bytes_of(self, app: str) -> int:
        """Most bytes of an app's caches of ended answers; 0 for no limit. From any thread."""
        return self.limiter.limits.of(app).prefix_bytes

    async def create_context(
        self, app: str, *, level: int | None = None, pinned: bool = False
    ) -> ContextFacts:
        """See `Backend`."""
        there = await self.contexts(app)
        require_context(self.limiter.limits.of(app), there)
        if pinned:
            require_pin(self.limiter.limits.of(app), there, "")
        return await super().create_context(app, level=level, pinned=pinned)

    async def pin_context(self, app: str, name: str, pinned: bool) -> ContextFacts:
        """See `Backend`."""
        if pinned:
            require_pin(self.limiter.limits.of(app), await self.contexts(app), name)
        return await super().pin_context(app, name, pinned)

    def _encoded(self, call: Call) -> Call:
        """The call with its prompt encoded, where the app's tokens are limited: the executor encodes the
        others, once it has room for them."""
        if not self.limiter.limits.of(call.app).tokens_per_minute:
            return call
        engine = self._ready().service.engine
        tokenizer = engine.tokenizer.limited(engine.options.context_tokens)
        return dataclasses.replace(call, prompt=prompt_ids_of(tokenizer, call.prompt))


class AccountedTicket:
    """A ticket whose events are counted (see `serving.server.calls.Ticket`)."""

    def __init__(self, ticket: Ticket, admission: Admission, metrics: Metrics, record: CallRecord) -> None:
        self._ticket, self._admission, self._metrics = ticket, admission, metrics
        self._app, self._record = ticket.call.app, record
        self._over = False

    @property
    def call(self) -> Call:
        """That was taken."""
        return self._ticket.call

    def cancel(self) -> None:
        """See `Ticket`."""
        self._ticket.cancel()
        if not self._over:
            self._metrics.cancelled(self._app)
            self._end()

    async def events(self) -> AsyncIterator[Event]:
        """See `Ticket`."""
        try:
            async for event in self._ticket.events():
                self._count(event)
                yield event
        except JaxllmError as error:
            if not self._over:
                self._record.outcome = type(error).__name__
                self._metrics.failed(self._app, self._record.outcome)
                self._end()
            raise
        finally:
            # A reader that stops early has left.
            self.cancel()

    def _count(self, event: Event) -> None:
        record = self._record
        match event:
            case Started():
                record.started = event
                self._admission.started()
                self._metrics.started(self._app, event)
            case Piece():
                record.tokens += len(event.tokens)
            case Ended():
                record.ended, record.tokens, record.outcome = event, event.tokens, "ended"
                self._metrics.ended(self._app, event, record.started)
                self._end()

    def _end(self) -> None:
        self._over, record = True, self._record
        prompt = 0 if record.started is None else record.started.prompt_tokens
        self._admission.ended(tokens=prompt + record.tokens, now_s=time.monotonic())
