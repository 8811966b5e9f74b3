"""Answers as they come from a service: text first, then the plan and what it took."""

import contextlib
import dataclasses
import json
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Self

import httpx

from jaxllm.client.responses import EventReader, ServiceError, error_of, reaching
from jaxllm.errors import JaxllmError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What the service decided for a call.

    Attributes:
      level: that answers, in percent.
      prompt_tokens: of the whole prompt, a context's included.
      kept_tokens: of them, what the plan kept.
      reused_tokens: of them, what a cache had already.
      source: of the plan.
    """

    level: int | None
    prompt_tokens: int | None
    kept_tokens: int | None
    reused_tokens: int | None
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What an answer took, in the service.

    Attributes:
      ttft_ms: from the call to the first token, waiting included.
      tpot_ms: per further token.
      tokens: of the answer.
    """

    ttft_ms: float
    tpot_ms: float
    tokens: int

    @property
    def total_ms(self) -> float:
        """From the call to the last token."""
        return self.ttft_ms + self.tpot_ms * max(0, self.tokens - 1)


class Received:
    """What has come of an answer.

    Attributes:
      text: so far.
      finish_reason: "stop" or "length"; None before the end.
      usage: numbers of tokens, as OpenAI has them; empty before the end.
      facts: all that the service told beside the text, by the names in its documentation.
    """

    def __init__(self, response: httpx.Response) -> None:
        self._response, self._events = response, EventReader()
        self._pieces: deque[str] = deque()
        self._ended = False
        self._because: JaxllmError | None = None
        self.text = ""
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}

    @property
    def plan(self) -> Plan | None:
        """What the service decided; None where it has not told yet."""
        if not self.facts:
            return None
        count, plan = self._count, self.facts.get("plan")
        source = plan.get("source", "") if isinstance(plan, Mapping) else self.facts.get("source", "")
        return Plan(
            level=count("level"), prompt_tokens=count("prompt_tokens"), kept_tokens=count("kept_tokens"),
            reused_tokens=count("reused_tokens"), source=str(source),
        )  # fmt: skip

    @property
    def cost(self) -> Cost | None:
        """What the answer took; None where the service has not told yet."""
        ttft, tpot = self._number("ttft_ms"), self._number("tpot_ms")
        if ttft is None:
            return None
        return Cost(ttft_ms=ttft, tpot_ms=tpot or 0.0, tokens=int(self.usage.get("completion_tokens") or 0))

    @property
    def met(self) -> bool | None:
        """Whether the objective was met; None where there was none, or before the end."""
        found = self._fact("met")
        return found if isinstance(found, bool) else None

    def _fact(self, name: str) -> Any:
        """A fact, which may stand in a group of its own, such as the plan."""
        if name in self.facts:
            return self.facts[name]
        groups = [each for each in self.facts.values() if isinstance(each, Mapping)]
        return next((each[name] for each in groups if name in each), self.usage.get(name))

    def _number(self, name: str) -> float | None:
        found = self._fact(name)
        return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None

    def _count(self, name: str) -> int | None:
        found = self._number(name)
        return None if found is None else int(found)

    def _next(self) -> str | None:
        """A piece that has come; None for none.

        Raises:
          JaxllmError: the answer was ended by an error.
        """
        if self._pieces:
            piece = self._pieces.popleft()
            self.text += piece
            return piece
        if self._because is not None:
            raise self._because
        return None

    def _take(self, data: bytes) -> None:
        for each in self._events.feed(data):
            if self._ended:
                return
            if each == "[DONE]":
                self._ended = True
                return
            try:
                self._read(json.loads(each))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ServiceError(f"the service sent a malformed event ({error!s:.80})") from error

    def _read(self, event: Any) -> None:
        if event.get("error") is not None:
            self._ended, self._because = True, error_of(0, event)
            return
        self.usage |= event.get("usage") or {}
        self.facts |= event.get("jaxllm") or {}
        for choice in event.get("choices") or ():
            text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
            if text:
                self._pieces.append(str(text))
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _broke_off(self) -> None:
        """Notes the end of the stream."""
        if not self._ended:
            self._ended = True
            self._because = ServiceError("the answer broke off: the service closed the connection")

    def _fail(self, error: JaxllmError) -> None:
        self._ended, self._because = True, error


class Answer(Received, Iterator[str]):
    """An answer as it comes: iterate for pieces of text, then read its attributes (see `Received`)."""

    def __init__(self, response: httpx.Response) -> None:
        """Takes a response whose body has not been read."""
        super().__init__(response)
        self._data = response.iter_bytes()

    def __next__(self) -> str:
        while (piece := self._next()) is None:
            if self._ended:
                self._response.close()
                raise StopIteration
            self._step()
        return piece

    def result(self) -> Self:
        """Runs to the end and returns itself.

        Raises:
          JaxllmError: what ended the answer.
        """
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """Ends the answer; the service stops it, too."""
        self._ended = True
        self._response.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Else the service would go on for nobody.
        with contextlib.suppress(Exception):
            self._response.close()

    def _step(self) -> None:
        try:
            with reaching(self._response.url):
                data = next(self._data, None)
            self._broke_off() if data is None else self._take(data)
        except JaxllmError as error:
            self._fail(error)


class AsyncAnswer(Received, AsyncIterator[str]):
    """An answer as it comes, for asyncio: iterate for pieces of text, then read its attributes (see
    `Received`)."""

    def __init__(self, response: httpx.Response) -> None:
        """Takes a response whose body has not been read."""
        super().__init__(response)
        self._data = response.aiter_bytes()

    async def __anext__(self) -> str:
        while (piece := self._next()) is None:
            if self._ended:
                await self._response.aclose()
                raise StopAsyncIteration
            await self._step()
        return piece

    async def result(self) -> Self:
        """Runs to the end and returns itself.

        Raises:
          JaxllmError: what ended the answer.
        """
        async for _ in self:
            pass
        return self

    async def close(self) -> None:
        """Ends the answer; the service stops it, too."""
        self._ended = True
        await self._response.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _step(self) -> None:
        try:
            with reaching(self._response.url):
                data = await anext(self._data, None)
            self._broke_off() if data is None else self._take(data)
        except JaxllmError as error:
            self._fail(error)
