"""Runs the calls of a request and merges their answers; turns the parameters of all wire formats into calls:
length, sampling, grammar, objective, context, adapter."""

import asyncio
import contextlib
import dataclasses
import json
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from jaxllm.errors import ConfigError
from jaxllm.sampling_state import Sampling
from jaxllm.serving.elastic.objectives import Objective
from jaxllm.serving.engine.decoding import MAX_TOP_LOGPROBS, TokenLogprob
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.guided.grammar import Grammar
from jaxllm.serving.server.api.errors import ApiError, api_error
from jaxllm.serving.server.api.messages import ToolUse
from jaxllm.serving.server.api.requests import ApiRequest, ApiState, Streamed
from jaxllm.serving.server.api.tools import ToolCall, ToolScanner
from jaxllm.serving.server.calls import Call, CallPrompt, Ended, Event, Piece, Started
from jaxllm.serving.server.job import Job
from jaxllm.serving.server.limits import objective_from, written


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


_MAX_STOPS, _MAX_STOP_CHARACTERS = 16, 256
_STRICT = re.compile(r"(.*);\s*strict\s*", re.DOTALL)
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed",
)  # fmt: skip
Positive = Annotated[int, msgspec.Meta(ge=1)]
TopLogprobs = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)]


class Extensions(msgspec.Struct, kw_only=True):
    """Our extensions, accepted in every format."""

    slo: str | dict[str, Any] | None = None
    strict: bool | None = None
    shorten: bool | None = None
    conversation: str | dict[str, Any] | None = None
    adapter: str | None = None
    grammar: dict[str, Any] | None = None
    prompt_cache_key: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    task: str | None = None


class SamplingFields(Extensions, kw_only=True):
    """Sampling fields of OpenAI's formats, and our extensions."""

    model: str | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    user: str | None = None


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's `stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool = False

    def __post_init__(self) -> None:
        if self.include_obfuscation:
            raise ValueError("include_obfuscation is not supported")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerParams:
    """What a request of any format asks for, besides the common fields.

    Attributes:
      adapter: adapter that the field `model` names; empty for none.
      n: number of answers to each prompt; an answer's seed is the request's plus its index among them.
      max_tokens: maximum number of tokens; None for the front's.
      stop: strings that end an answer.
      logit_bias: biases by token id.
      temperature: default temperature; None for the front's.
      use: effect of the tools.
      grammar: grammar of a response format; None for none.
      top_logprobs: see `GenerationConfig`.
      context, context_tokens: see `Call`; an empty name for that of the field `conversation`.
    """

    adapter: str = ""
    n: int = 1
    max_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    logit_bias: Mapping[str, float] | None = None
    temperature: float | None = None
    use: ToolUse = dataclasses.field(default_factory=ToolUse)
    grammar: Grammar | None = None
    top_logprobs: int | None = None
    context: str = ""
    context_tokens: int | None = None


def answer_of(
    state: ApiState,
    request: ApiRequest,
    body: SamplingFields,
    prompts: Sequence[CallPrompt],
    params: AnswerParams,
) -> Answer:
    """Submits a request's calls, `params.n` consecutive ones for each prompt.

    Raises:
      ApiError: a field is out of range, there are too many calls or none, or fields exclude each other.
      JaxllmError: a call is refused.
    """
    if body.adapter and params.adapter and body.adapter != params.adapter:
        message = f"model names the adapter {params.adapter!r}, adapter {body.adapter!r:.80}"
        raise ApiError(message, param="adapter")
    number, limit = len(prompts) * params.n, state.answers_per_request
    if not 1 <= number <= limit:
        raise ApiError(f"a request may ask for 1 to {limit} answers, as prompts times n; got {number}")
    objective, strict = objective_of(body.slo, body.strict, request.slo)
    context = params.context or context_of(body.conversation)
    if context and number > 1:
        raise ApiError("a context gives one answer at a time; n must be 1", param="conversation")
    if context or any(isinstance(prompt, tuple) for prompt in prompts):
        if body.shorten:
            message = "shorten is for texts and conversations: no words of token ids and contexts are dropped"
            raise ApiError(message, param="shorten")
        if body.task:
            raise ApiError("task is for texts and messages outside of contexts", param="task")
    config, adapter = _config(state, body, params), state.adapter(body.adapter or params.adapter)
    if (seed := config.sampling.seed) is None:
        configs = [config] * params.n
    else:
        seeds = [dataclasses.replace(config.sampling, seed=(seed + n) % (1 << 64)) for n in range(params.n)]
        configs = [dataclasses.replace(config, sampling=each) for each in seeds]
    calls = [
        Call(
            app=request.app,
            request_id=request.call_id(),
            prompt=prompt,
            config=each,
            objective=objective,
            strict=strict,
            shorten=body.shorten,
            priority="background" if body.service_tier == "flex" else "foreground",
            context=context,
            context_tokens=params.context_tokens,
            prefix_key=body.prompt_cache_key or "",
            adapter=adapter,
        )
        for prompt in prompts
        for each in configs
    ]
    return Answer(state, calls, params.use.scanner, len(prompts))


def _config(state: ApiState, body: SamplingFields, params: AnswerParams) -> GenerationConfig:
    """Length, stops, sampling and grammar of a request's answers."""
    if params.use.tools and (params.grammar or body.grammar):
        raise ApiError("tools cannot be combined with a format or grammar of the answer", param="tools")
    if body.grammar and params.grammar:
        raise ApiError("grammar cannot be combined with a response format", param="grammar")
    biases = params.logit_bias or {}
    for token in biases:
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            raise ApiError(f"logit_bias must have token ids as keys, got {token!r:.40}", param="logit_bias")
    if any(math.isnan(value) for value in biases.values()):
        raise ApiError("logit_bias must have numbers as values", param="logit_bias")
    stops = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ())
    if len(stops) > _MAX_STOPS or not all(0 < len(each) <= _MAX_STOP_CHARACTERS for each in stops):
        message = f"stop must have at most {_MAX_STOPS} strings of 1 to {_MAX_STOP_CHARACTERS} characters"
        raise ApiError(message, param="stop")
    return GenerationConfig(
        # No answer is longer than the window: this only bounds the value.
        max_tokens=min(
            state.max_tokens if params.max_tokens is None else params.max_tokens,
            state.backend.facts().window_tokens,
        ),
        stop=stops,
        sampling=Sampling(
            logit_bias=tuple((int(token), float(value)) for token, value in biases.items()),
            **sampling_of(state, body, params.temperature),
        ),
        task=body.task or "",
        grammar=params.use.grammar or params.grammar or _own_grammar(body.grammar),
        top_logprobs=params.top_logprobs,
    )


def sampling_of(state: ApiState, body: SamplingFields, temperature: float | None = None) -> dict[str, Any]:
    """Sampling options by name: the request's, else those recommended by the model's authors; `temperature`
    is the default if neither gives one, None for the front's."""
    own = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
    default = state.temperature if temperature is None else temperature
    return {"temperature": default, **state.backend.facts().sampling, **own}


def objective_of(
    slo: str | Mapping[str, Any] | None, strict: bool | None, header: str
) -> tuple[Objective | None, bool | None]:
    """The objective of a request by its body, else by its header X-SLO (`<40,70>` or JSON, optionally
    followed by `; strict`), and whether it is strict.

    Raises:
      ApiError: it is malformed.
    """
    if slo is None and header:
        if found := _STRICT.fullmatch(header):
            header, strict = found[1], True if strict is None else strict
        slo = header.strip()
        if slo.startswith("{"):
            try:
                slo = msgspec.json.decode(slo)
            except (msgspec.MsgspecError, RecursionError):
                raise ApiError(f"the header X-SLO is not JSON: {header!r:.80}", param="X-SLO") from None
    if slo is None:
        return None, strict
    try:
        return objective_from(slo), strict
    except ConfigError as error:
        raise ApiError(str(error), param="slo") from error


def context_of(conversation: str | Mapping[str, Any] | None) -> str:
    """The name of the context that a request continues; empty for none."""
    name = conversation.get("id") if isinstance(conversation, Mapping) else conversation
    if conversation is not None and (not isinstance(name, str) or not 0 < len(name) <= 256):
        raise ApiError("conversation is the name of a context", param="conversation")
    return name or ""


def format_grammar(kind: Any, schema: Any, param: str) -> Grammar | None:
    """The grammar of a response format: text, json_object or json_schema; raises ApiError."""
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar(kind="json")
    if kind == "json_schema" and isinstance(schema, dict | bool):
        return Grammar(kind="json_schema", text=json.dumps(schema))
    raise ApiError(f"{param} has the type text, json_object, or json_schema with a schema", param=param)


def _own_grammar(grammar: Mapping[str, Any] | None) -> Grammar | None:
    """The extension `grammar`."""
    if grammar is None:
        return None
    (kind, text), *more = grammar.items() or [("", None)]
    if more or kind not in ("regex", "lark") or not isinstance(text, str) or not text:
        raise ApiError('grammar is {"regex": TEXT} or {"lark": TEXT}', param="grammar")
    return Grammar(kind="regex" if kind == "regex" else "lark", text=text)
