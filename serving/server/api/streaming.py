"""Runs the calls of a request and merges their answers, for all wire formats."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

from jaxllm.serving.engine.decoding import TokenLogprob
from jaxllm.serving.server.api.errors import ApiError, api_error
from jaxllm.serving.server.api.requests import ApiState, Streamed
from jaxllm.serving.server.api.tools import ToolCall, ToolScanner
from jaxllm.serving.server.calls import Call, Ended, Event, Piece, Started
from jaxllm.serving.server.job import Job
from jaxllm.serving.server.limits import written


class Choice:
    """One of a request's answers so far.

    Attributes:
      index: its index.
      job: the accepted call.
      started, ended: events; None until then.
      tool_calls: tool calls found so far.
      logprobs: log-probabilities of all tokens, if requested.
      characters: number of characters so far, including tool calls.
      new_text, new_calls, new_logprobs: news of the last event: text without tool calls, tool calls that are
        complete now, and log-probabilities of new tokens.
    """

    def __init__(self, index: int, job: Job, scanner: ToolScanner | None) -> None:
        self.index, self.job, self._scanner = index, job, scanner
        self._texts: list[str] = []
        self._cut_call, self.characters = False, 0
        self.started: Started | None = None
        self.ended: Ended | None = None
        self.tool_calls: list[ToolCall] = []
        self.logprobs: list[TokenLogprob] = []
        self.new_text = ""
        self.new_calls: Sequence[ToolCall] = ()
        self.new_logprobs: Sequence[TokenLogprob] = ()

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

    def take(self, event: Event) -> None:
        """Adds an event."""
        self.new_text, self.new_calls, self.new_logprobs = "", (), ()
        match event:
            case Started():
                self.started = event
            case Piece():
                self.new_text, self.new_logprobs = event.text, event.logprobs or ()
                self.characters += len(event.text)
                if self._scanner is not None:
                    self.new_text, self.new_calls = self._scanner.feed(event.text)
            case Ended():
                self.ended = event
                if self._scanner is not None:
                    cut = event.finish_reason == "length" or event.stop_string is not None
                    self.new_text, self._cut_call = self._scanner.finish(cut=cut)
        self._texts.append(self.new_text)
        self.tool_calls += self.new_calls
        self.logprobs += self.new_logprobs

    def facts(self) -> dict[str, Any]:
        """The `jaxllm` object: plan and cost."""
        start, end = self.started, self.ended
        facts: dict[str, Any] = {}
        if start is not None:
            facts |= {name: getattr(start, name) for name in _STARTED}
            facts |= {name: getattr(start, name) for name in ("adapter", "shared") if getattr(start, name)}
            facts |= {"moved": list(start.moved)} if start.moved else {}
            if start.objective is not None:
                facts |= {"slo": written(start.objective), "slo_from": "app" if start.bound else "call"}
        if end is not None:
            facts |= {name: getattr(end, name) for name in _ENDED}
            facts |= {"context": end.context, "context_tokens": end.context_tokens} if end.context else {}
        return facts


_STARTED = ("source", "level", "prompt_tokens", "kept_tokens", "reused_tokens", "queued_ms")
_ENDED = (
    "ttft_ms", "tpot_ms", "engine_ttft_ms", "engine_tpot_ms", "met", "drafted", "seed", "stop_string",
)  # fmt: skip


class Answer:
    """The answers to a request's calls, `choices`, one per call. Must be closed, or its `news` consumed."""

    def __init__(
        self,
        state: ApiState,
        calls: Sequence[Call],
        scanner: Callable[[], ToolScanner] | None = None,
        prompts: int = 1,
    ) -> None:
        """Submits all calls, or none.

        Args:
          state: state with the backend of the answers.
          calls: calls, several consecutive ones for each prompt.
          scanner: makes a scanner for tool calls; None without tools.
          prompts: number of different prompts.

        Raises:
          JaxllmError: the backend refuses a call.
        """
        self._state, self._prompts = state, prompts
        self.choices: list[Choice] = []
        try:
            for index, call in enumerate(calls):
                self.choices.append(Choice(index, state.backend.submit(call), scanner and scanner()))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancels the calls that have not ended."""
        for choice in self.choices:
            if choice.ended is None:
                choice.job.cancel()

    async def news(self) -> AsyncGenerator[Choice, None]:
        """Yields the choice of each event in the order of arrival; closes the answer at the end."""
        merged = _merged([choice.job.events() for choice in self.choices])
        try:
            async for index, event in merged:
                self.choices[index].take(event)
                yield self.choices[index]
            if any(choice.ended is None or choice.started is None for choice in self.choices):
                raise ApiError("the answer ended before it was whole", status=500)
        finally:
            self.close()
            await merged.aclose()

    async def whole(self) -> list[Choice]:
        """Waits for the end of all answers."""
        async for _ in self.news():
            pass
        return self.choices

    async def streamed(
        self,
        frames: Callable[[AsyncIterator[Choice]], AsyncGenerator[bytes, None]],
        failed: Callable[[ApiError], bytes],
        *,
        end: bytes = b"",
        media_type: str = "text/event-stream",
    ) -> Streamed:
        """The response in parts, of an answer that has begun, so that an earlier error can still choose the
        status.

        Args:
          frames: makes the parts of the news.
          failed: makes the part that reports an error, since the status has been sent by then.
          end: the last part in any case.
          media_type: media type of the response.

        Raises:
          JaxllmError: the error that ended the answer before it began.
        """
        news = self.news()
        try:
            first = await anext(news)
        except BaseException:
            await news.aclose()
            raise

        async def all_news() -> AsyncGenerator[Choice, None]:
            yield first
            async for choice in news:
                yield choice

        async def parts() -> AsyncGenerator[bytes, None]:
            try:
                async with contextlib.aclosing(frames(all_news())) as made:
                    async for frame in made:
                        yield frame
            except Exception as error:
                yield failed(api_error(error))
            finally:
                self.close()
                await news.aclose()
            if end:
                yield end

        return Streamed(parts(), self.close, media_type, self._state.write_s)

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
        facts = [choice.facts() for choice in self.choices]
        return facts[0] | ({"choices": facts} if len(facts) > 1 else {})


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
