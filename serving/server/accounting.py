"""Counts each call for its app's limits and for metrics, from its submission to its end."""

import dataclasses
import time
from collections.abc import AsyncIterator

from jaxllm.errors import JaxllmError
from jaxllm.text.tokenizer import Tokenizer
from serving.server.backend import EngineBackend
from serving.server.calls import Call, Conversation, Ended, Event, Piece, Refused, Started, Ticket
from serving.server.limits import Admission, AppLimits, Limiter, Limits
from serving.server.logs import CallRecord, current_request
from serving.server.metrics import Metrics
from serving.server.objectives import Bindings
from serving.server.prompts import images_of, whole_prompt_ids


class AccountedBackend(EngineBackend):
    """A backend that keeps apps within their limits and counts what they do.

    Attributes:
      limiter: of all apps; its limits may be replaced.
      metrics: of all calls.
    """

    def __init__(self, limits: Limits, bindings: Bindings | None = None) -> None:
        super().__init__(bindings)
        self.limiter, self.metrics = Limiter(limits), Metrics(self.snapshot)

    def submit(self, call: Call) -> Ticket:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See `Backend`.

        Raises:
          Refused: also where a limit of the app is reached.
        """
        try:
            call, prompt_tokens = self._encoded(call)
            admission = self.limiter.admit(
                call.app,
                prompt_tokens=prompt_tokens,
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

    def limits_of(self, app: str) -> AppLimits:
        """An app's limits now. From any thread."""
        return self.limiter.limits.of(app)

    def _encoded(self, call: Call) -> tuple[Call, int]:
        """The call with its prompt encoded, and the prompt's tokens, where the app's tokens are limited: the
        executor encodes the others, once it has room for them. Of a turn in a context, whose tokens were
        counted when they came, the messages alone count."""
        if not self.limits_of(call.app).tokens_per_minute:
            return call, 0
        engine = self._ready().service.engine
        tokenizer = engine.tokenizer.limited(engine.options.context_tokens)
        if call.context:
            return call, _content_tokens(tokenizer, call.prompt)
        prompt = whole_prompt_ids(tokenizer, call.prompt, call.config.task)
        # Ids alone would lose the rows of images.
        return (call if images_of(call.prompt) else dataclasses.replace(call, prompt=prompt)), len(prompt)


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
        start = record.started
        prompt = 0 if start is None else start.prompt_tokens - start.context_tokens
        self._admission.ended(tokens=prompt + record.tokens, now_s=time.monotonic())


def _content_tokens(tokenizer: Tokenizer, prompt: Conversation | str | tuple[int, ...]) -> int:
    """About how many tokens a turn has, whose context is known to the engine's thread alone."""
    if isinstance(prompt, tuple):
        return len(prompt)
    texts = [prompt] if isinstance(prompt, str) else [str(each.get("content")) for each in prompt.messages]
    count = sum(len(tokenizer.encode(text, add_special_tokens=False, special=False)) for text in texts)
    return count + sum(len(each.rows) for each in images_of(prompt))
