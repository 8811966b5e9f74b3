"""Runs the calls of a request and merges their answers, for all wire formats."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

from jaxllm.serving.server.api.errors import ApiError
from jaxllm.serving.server.api.tools import ToolCall, ToolScanner
from jaxllm.serving.server.calls import Backend, Call, Ended, Event, Piece, Started, Ticket, TokenLogprob
from jaxllm.serving.server.objectives import written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
    """The news of one of a request's answers.

    Attributes:
      index: index of the answer.
      text: new text, without tool calls.
      tool_calls: tool calls that are complete now.
      logprobs: log-probabilities of new tokens; None if not requested.
      characters: number of characters of the answer so far, including tool calls.
      ended: the answer's end, in its last delta.
    """

    index: int
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    characters: int = 0
    ended: Ended | None = None


class Choice:
    """One answer so far.

    Attributes:
      started, ended: events; None until then.
      tool_calls: tool calls found so far.
      logprobs: log-probabilities of all tokens, if requested.
      characters: see `Delta`.
    """

    def __init__(self, index: int, scanner: ToolScanner | None) -> None:
        self._index, self._scanner, self._texts = index, scanner, []
        self._cut_call, self.characters = False, 0
        self.started: Started | None = None
        self.ended: Ended | None = None
        self.tool_calls: list[ToolCall] = []
        self.logprobs: list[TokenLogprob] = []

    @property
    def text(self) -> str:
        """The text without tool calls."""
        return "".join(self._texts)

    @property
    def finish_reason(self) -> str:
        """Why the answer ended, as in OpenAI's format: "stop", "length" or "tool_calls". The last one means
        that all calls are complete: an answer that was cut never has it."""
        assert self.ended is not None
        whole = self.ended.finish_reason == "stop" and not self._cut_call
        return "tool_calls" if self.tool_calls and whole else self.ended.finish_reason

    def take(self, event: Event) -> Delta:
        """Adds an event and returns the news."""
        text, calls, logprobs, ended = "", (), None, None
        if isinstance(event, Started):
            self.started = event
        elif isinstance(event, Piece):
            text, calls, logprobs = event.text, (), event.logprobs
            self.logprobs += logprobs or ()
            self.characters += len(text)
            if self._scanner is not None:
                text, calls = self._scanner.feed(text)
        else:
            self.ended = ended = event
            if self._scanner is not None:
                cut = event.finish_reason == "length" or event.stop_string is not None
                text, self._cut_call = self._scanner.finish(cut=cut)
        self._texts.append(text)
        self.tool_calls += calls
        return Delta(
            index=self._index,
            text=text,
            tool_calls=calls,
            logprobs=logprobs,
            characters=self.characters,
            ended=ended,
        )

    def facts(self) -> dict[str, Any]:
        """The `jaxllm` object: plan and cost."""
        start, end = self.started, self.ended
        told: dict[str, Any] = {}
        if start is not None:
            told |= {
                "source": start.source, "level": start.level, "prompt_tokens": start.prompt_tokens,
                "kept_tokens": start.kept_tokens, "reused_tokens": start.reused_tokens,
                "queued_ms": start.queued_ms,
            }  # fmt: skip
            told |= {"adapter": start.adapter} if start.adapter else {}
            told |= {"moved": list(start.moved)} if start.moved else {}
            told |= {"shared": start.shared} if start.shared else {}
            if start.objective is not None:
                told |= {"slo": written(start.objective), "slo_from": "app" if start.bound else "call"}
        if end is not None:
            told |= {
                "ttft_ms": end.ttft_ms, "tpot_ms": end.tpot_ms, "engine_ttft_ms": end.engine_ttft_ms,
                "engine_tpot_ms": end.engine_tpot_ms, "met": end.met, "drafted": end.drafted,
                "seed": end.seed, "stop_string": end.stop_string,
            }  # fmt: skip
            if end.context:
                told |= {"context": end.context, "context_tokens": end.context_tokens}
        return told


class Answer:
    """The answers to a request's calls. Must be closed, or its `deltas` consumed.

    Attributes:
      choices: one per call.
    """

    def __init__(self, tickets: Sequence[Ticket], choices: Sequence[Choice], prompts: int) -> None:
        self._tickets, self._prompts, self.choices = tickets, prompts, choices

    @classmethod
    def open(
        cls,
        backend: Backend,
        calls: Sequence[Call],
        scanner: Callable[[], ToolScanner] | None,
        prompts: int = 1,
    ) -> "Answer":
        """Submits all calls, or none.

        Args:
          backend: backend of the answers.
          calls: calls, several consecutive ones for each prompt.
          scanner: makes a scanner for tool calls; None without tools.
          prompts: number of different prompts.

        Raises:
          JaxllmError: the backend refuses a call.
        """
        tickets: list[Ticket] = []
        try:
            for call in calls:
                tickets.append(backend.submit(call))  # noqa: PERF401 (those taken are cancelled)
        except BaseException:
            for ticket in tickets:
                ticket.cancel()
            raise
        return cls(tickets, [Choice(i, scanner and scanner()) for i in range(len(calls))], prompts)

    def close(self) -> None:
        """Cancels the calls that have not ended."""
        for ticket, choice in zip(self._tickets, self.choices, strict=True):
            if choice.ended is None:
                ticket.cancel()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yields news in the order of arrival; closes the answer at the end."""
        streams = [ticket.events() for ticket in self._tickets]
        merged = _merged(streams)
        try:
            async for index, event in merged:
                yield self.choices[index].take(event)
            if any(choice.ended is None or choice.started is None for choice in self.choices):
                raise ApiError("the answer ended before it was whole", status=500)
        finally:
            self.close()
            await merged.aclose()

    async def whole(self) -> None:
        """Waits for the end of all answers."""
        async for _ in self.deltas():
            pass

    def usage(self) -> tuple[int, int, int]:
        """Number of tokens of the prompts, cached tokens of these, and tokens of the answers."""
        first = self.choices[:: max(1, len(self.choices) // self._prompts)]
        started = [choice.started for choice in first if choice.started is not None]
        return (
            sum(each.prompt_tokens for each in started),
            sum(each.reused_tokens for each in started),
            sum(choice.ended.tokens for choice in self.choices if choice.ended is not None),
        )

    def facts(self) -> dict[str, Any]:
        """The `jaxllm` object of the request: the first answer's, and all of them if there are several."""
        told = [choice.facts() for choice in self.choices]
        return told[0] | ({"choices": told} if len(told) > 1 else {})


async def first_delta(answer: Answer) -> AsyncGenerator[Delta, None]:
    """The deltas of an answer that has begun, so that an earlier error can still choose the status.

    Raises:
      JaxllmError: the error that ended the answer before it began.
    """
    deltas = answer.deltas()
    try:
        first = await anext(deltas)
    except BaseException:
        await deltas.aclose()
        raise

    async def all_of_them() -> AsyncGenerator[Delta, None]:
        try:
            yield first
            async for delta in deltas:
                yield delta
        finally:
            answer.close()
            await deltas.aclose()

    return all_of_them()


async def _merged(streams: Sequence[AsyncIterator[Event]]) -> AsyncGenerator[tuple[int, Event], None]:
    def following(index: int) -> asyncio.Future[Event | None]:
        return asyncio.ensure_future(anext(streams[index], None))

    waiting = {following(index): index for index in range(len(streams))}
    done: set[asyncio.Future[Event | None]] = set()
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index, event = waiting.pop(task), task.result()
                if event is not None:
                    yield index, event
                    waiting[following(index)] = index
    finally:
        left = {*waiting, *done}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
