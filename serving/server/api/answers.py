"""Runs the calls of a request and merges their answers; turns the parameters of all wire formats into calls:
length, sampling, grammar, objective, context, adapter."""

import asyncio
import contextlib
import dataclasses
import json
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import msgspec

from jaxllm.errors import ConfigError
from jaxllm.sampling_state import MAX_LOGIT_BIASES, Sampling
from jaxllm.serving.elastic.objectives import Objective
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.guided.calls import answer_grammar
from jaxllm.serving.guided.grammar import Grammar, Thought
from jaxllm.serving.guided.validation import unmet
from jaxllm.serving.server.api.choices import Choice, MakeScanner
from jaxllm.serving.server.api.errors import ApiError, api_error
from jaxllm.serving.server.api.fields import Extensions, LogitBias, SamplingFields
from jaxllm.serving.server.api.grammars import own_grammar
from jaxllm.serving.server.api.reasoning import Reasoning, Switch, reasoning_of
from jaxllm.serving.server.api.requests import ApiRequest, ApiState, Filler, Streamed
from jaxllm.serving.server.api.tool_use import ToolUse
from jaxllm.serving.server.calls import Call, CallPrompt, Conversation, ModelFacts
from jaxllm.serving.server.limits import objective_from
from jaxllm.text.answer_scanner import FormatScanner
from jaxllm.text.answer_syntax import AnswerFormat

_EVENTS = "text/event-stream"
_KEEP_ALIVE = b": keep-alive\n\n"


class Answer:
    """The answers to a request's calls, `choices`, one per call. Must be closed, or its `news` consumed."""

    def __init__(
        self,
        state: ApiState,
        calls: Sequence[Call],
        scanner: MakeScanner = None,
        *,
        prompts: int = 1,
        thinks: bool = False,
        progress: bool = False,
        notes: Mapping[str, Any] | None = None,
        check: Callable[[Choice], str] | None = None,
    ) -> None:
        """Submits all calls, or none. Raises JaxllmError if the backend refuses a call.

        Args:
          state: state with the backend of the answers.
          calls: calls, several consecutive ones for each prompt.
          scanner: makes a scanner for reasoning and tool calls; None if answers are only text.
          prompts: number of different prompts.
          thinks: whether answers may have reasoning.
          progress: whether a stream tells how much of the prompt was computed.
          notes: further entries of `facts`.
          check: says what an ended answer breaks of its schemas; runs in a thread.
        """
        self._state, self._prompts, self._progress, self._check = state, prompts, progress, check
        self._news, self._comments = asyncio.Event(), 0
        self.choices: list[Choice] = []
        try:
            for index, call in enumerate(calls):
                job = state.backend.submit(call)
                job.news = self._news
                self.choices.append(Choice(index, job, scanner and scanner(), thinks=thinks, notes=notes))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancels the calls that have not ended."""
        for choice in self.choices:
            if choice.ended is None:
                choice.job.cancel()

    async def news(self) -> AsyncGenerator[Choice, None]:
        """Yields the choice of each event; closes the answer at the end. While an ended choice is checked,
        others go on."""
        waiting, checks = self.choices, dict[Choice, asyncio.Future[str]]()
        try:
            while waiting or checks:
                self._news.clear()
                for choice in waiting:
                    while choice.ended is None and (event := choice.job.taken()) is not None:
                        choice.take(event)
                        if self._check is None or choice.ended is None:
                            yield choice
                        else:
                            check = asyncio.ensure_future(asyncio.to_thread(self._check, choice))
                            check.add_done_callback(lambda _: self._news.set())
                            checks[choice] = check
                for choice in [choice for choice, check in checks.items() if check.done()]:
                    choice.unmet = checks.pop(choice).result()
                    yield choice
                waiting = [each for each in waiting if each.ended is None and not each.job.cancelled]
                if waiting or checks:
                    await self._news.wait()
            if any(choice.ended is None or choice.started is None for choice in self.choices):
                raise ApiError("the answer ended before it was whole", status=500)
        finally:
            self.close()
            for check in checks.values():
                check.cancel()

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
        media_type: str = _EVENTS,
        progressed: Callable[[Mapping[str, Any]], bytes] | None = None,
    ) -> Streamed:
        """The response in parts, of an answer that has begun, so that an earlier error can still choose the
        status. Server-sent events begin without it after a while, with a comment whenever nothing came for so
        long: clients and proxies close connections that are silent. Raises the error that ended the answer
        before it began.

        Args:
          frames: makes the parts of the news.
          failed: makes the part that reports an error, since the status has been sent by then.
          end: the last part in any case.
          media_type: media type of the response.
          progressed: makes the part that tells the progress of the prompt; None for a comment.
        """
        news, is_events = self.news(), media_type == _EVENTS
        first = asyncio.ensure_future(anext(news))
        # A client may leave before it is awaited.
        first.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.wait((first,), timeout=self._pause_s if is_events else None)
            if first.done():
                first.result()
        except BaseException:
            await _ended(first, news)
            raise

        async def all_news() -> AsyncGenerator[Choice, None]:
            yield await first
            async for choice in news:
                yield choice

        async def parts() -> AsyncGenerator[bytes, None]:
            try:
                async with contextlib.aclosing(frames(all_news())) as made:
                    async for frame in made:
                        self._comments = 0
                        yield frame
            except Exception as error:
                yield failed(api_error(error))
            finally:
                self.close()
                await _ended(first, news)
            if end:
                yield end

        filler = Filler(self._pause_s, self._filling(progressed)) if is_events else None
        return Streamed(parts(), self.close, media_type, self._state.write_s, filler)

    @property
    def _pause_s(self) -> float:
        return min(self._state.keep_alive_s, self._state.progress_s if self._progress else math.inf)

    def _filling(
        self, progressed: Callable[[Mapping[str, Any]], bytes] | None
    ) -> Callable[[float], bytes | None]:
        """Makes what is sent while no frames come: the progress of the prompt where it was asked for, and
        comments, not for ever."""
        shown = None

        def filling(quiet_s: float) -> bytes | None:
            nonlocal shown
            progress = self.choices[0].job.progress if self._progress else None
            if progress not in (None, shown):
                shown = progress
                return progressed(progress) if progressed else _progress_comment(progress)
            if quiet_s < self._state.keep_alive_s or self._comments >= self._state.keep_alives:
                return None
            self._comments += 1
            return _KEEP_ALIVE

        return filling

    def usage(self) -> tuple[int, int, int]:
        """Number of tokens of the prompts, cached tokens of these, and tokens of the answers so far."""
        first = self.choices[:: max(1, len(self.choices) // self._prompts)]
        started = [choice.started for choice in first if choice.started is not None]
        return (
            sum(each.prompt_tokens for each in started),
            sum(each.reused_tokens for each in started),
            sum(
                len(choice.tokens) if choice.ended is None else choice.ended.tokens for choice in self.choices
            ),
        )

    @property
    def reasoning_tokens(self) -> int:
        """Number of the answers' tokens that are reasoning."""
        return sum(choice.reasoning_tokens for choice in self.choices)

    def facts(self) -> dict[str, Any]:
        """The `jaxllm` object of the request: the first answer's, and all of them if there are several."""
        facts = [choice.facts() for choice in self.choices]
        return facts[0] | ({"choices": facts} if len(facts) > 1 else {})


async def _ended(first: asyncio.Future[Choice], news: AsyncGenerator[Choice, None]) -> None:
    """Ends the news of an answer, whether or not the first are there."""
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await news.aclose()


def _progress_comment(progress: Any) -> bytes:
    return b": prompt_progress " + msgspec.json.encode(progress) + b"\n\n"


_MAX_STOPS, _MAX_STOP_CHARACTERS, _MOST_NAMED = 16, 256, 8
_STRICT = re.compile(r"(.*);\s*strict\s*", re.DOTALL)
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerParams:
    """What a request of any format asks for, besides the common fields.

    Attributes:
      n: number of answers to each prompt; an answer's seed is the request's plus its index among them.
      max_tokens: maximum number of tokens; None for the front's.
      stop: strings that end an answer.
      logit_bias: biases by token id, or as pairs with a token id or a text.
      temperature: default temperature; None for the front's.
      use: effect of the tools.
      reasoning: what is said about the model's reasoning.
      grammar: grammar of a response format; None for none.
      top_logprobs: see `GenerationConfig`.
      context, context_tokens: see `Call`; an empty name for that of the field `conversation`.
      prefix: token ids before the prompt, which are not rendered.
      notes: entries for the answer's `jaxllm` object.
    """

    n: int = 1
    max_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    logit_bias: LogitBias | None = None
    temperature: float | None = None
    use: ToolUse = dataclasses.field(default_factory=ToolUse)
    reasoning: Reasoning = dataclasses.field(default_factory=Reasoning)
    grammar: Grammar | None = None
    top_logprobs: int | None = None
    context: str = ""
    context_tokens: int | None = None
    prefix: tuple[int, ...] = ()
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def reasoning_in(state: ApiState, body: Extensions, *switches: Switch) -> Reasoning:
    """What a request says about the model's reasoning, in the fields of its format and in those of all.
    Raises ApiError (see `reasoning_of`)."""
    return reasoning_of(
        state.backend.facts().answer_format,
        *switches,
        Switch("wanted", body.enable_thinking, "enable_thinking"),
        Switch("budget", body.thinking_budget, "thinking_budget"),
        template_options=body.chat_template_kwargs,
    )


async def answer_of(
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
    _, adapter = state.model(body.model, adapter=body.adapter)
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
    chats = isinstance(prompts[0], Conversation)
    for name in ("chat_template_kwargs", "enable_thinking", "thinking_budget"):
        if not chats and getattr(body, name) is not None:
            raise ApiError(f"{name} needs messages, which a chat template renders", param=name)
    answer_format = state.backend.facts().answer_format
    thinks = chats and answer_format.thinks
    # Whether the prompt ends within a thought: the model then writes only the rest of it.
    opened = thinks and await _opens_thought(state, prompts[0], answer_format, in_context=bool(context))
    if body.grammar and params.grammar:
        raise ApiError("grammar cannot be combined with a response format", param="grammar")
    schema = params.grammar or own_grammar(body.grammar)
    config = _config(state, body, params, await _biases(state, params.logit_bias))
    grammar = _grammar(state, params, schema, thinks=thinks, opened=opened)
    config = dataclasses.replace(config, grammar=grammar)
    if body.truncate_prompt_tokens is not None:
        prompts = [await truncated(state, each, body.truncate_prompt_tokens) for each in prompts]
    if params.prefix:
        prompts = [(*params.prefix, *await prompt_ids_of(state, each)) for each in prompts]
    scanner: MakeScanner = None
    if thinks or params.use.called:
        config = dataclasses.replace(config, markers=tuple(text for text, _ in answer_format.special))
        scanner = lambda: FormatScanner(answer_format, params.use.called, thinking=opened)  # noqa: E731
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
            first_token=body.slo_first_token or "answer",
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
    # The generic form is ours, which the model may not have learned.
    generic = {"tool_format": "generic"} if params.use.tools and answer_format.generic else {}
    return Answer(
        state, calls, scanner, prompts=len(prompts), thinks=thinks, progress=bool(body.return_progress),
        notes={**generic, **params.notes}, check=_check_of(params.use, schema, answer_format),
    )  # fmt: skip


def _check_of(
    use: ToolUse, schema: Grammar | None, answer_format: AnswerFormat
) -> Callable[[Choice], str] | None:
    """A check of answers for what grammars do not enforce: of the response format, and of the arguments of
    calls that must match their tools' schemas."""
    enforced = {
        each["function"]["name"]: Grammar(kind="json_schema", text=json.dumps(each["function"]["parameters"]))
        for each in use.called
        if use.required or schema is not None or each["function"]["name"] in use.strict
    }
    if schema is None and not enforced:
        return None
    # Strings without quotes are not restricted.
    loose = answer_format.syntax.arguments != "json"

    def check(choice: Choice) -> str:
        broken = [
            f"{call.name}: {found}"
            for call in choice.whole_calls
            if call.name in enforced and (found := unmet(enforced[call.name], call.text, whole=loose))
        ]
        if schema is not None and not choice.calls and choice.finish_reason == "stop":
            broken.append(unmet(schema, choice.text) or "")
        return "; ".join(filter(None, broken))

    return check


async def _opens_thought(
    state: ApiState, prompt: CallPrompt, answer_format: AnswerFormat, *, in_context: bool
) -> bool:
    """Whether a rendered prompt ends with the opening of a thought."""
    assert isinstance(prompt, Conversation)
    if not answer_format.thought_opening:
        return answer_format.opened
    if in_context:
        # A turn alone, such as a tool's answer, may be no conversation to the template.
        prompt = dataclasses.replace(prompt, messages=({"role": "user", "content": "?"},), images=())
    return answer_format.opened_by(await state.backend.render(prompt))


def _grammar(
    state: ApiState, params: AnswerParams, schema: Grammar | None, *, thinks: bool, opened: bool
) -> Grammar | None:
    """The grammar of an answer: calls, a response format, or both, after the reasoning."""
    answer_format, use = state.backend.facts().answer_format, params.use
    grammar = schema
    if names := [each["function"]["name"] for each in use.called]:
        grammar = answer_grammar(
            answer_format, use.called, required=use.required, several=use.several,
            strict=[name for name in use.strict if name in names], schema=None if use.required else schema,
        )  # fmt: skip
    most = params.reasoning.most_tokens
    if opened and params.reasoning.wanted is False:
        # The template does not know the switch: the thought is closed before it begins.
        most = 0
    if thinks and (grammar is not None or most is not None):
        thought = Thought(
            opening=answer_format.thought_opening, closing=answer_format.thought_closing, opened=opened,
            most_tokens=most,
        )  # fmt: skip
        return dataclasses.replace(grammar or Grammar(kind="free", thought=thought), thought=thought)
    return grammar


async def prompt_ids_of(state: ApiState, prompt: CallPrompt, *, longer: bool = False) -> Sequence[int]:
    """The token ids of a prompt; `longer`: see `Backend.tokenize`."""
    return prompt if isinstance(prompt, tuple) else await state.backend.tokenize(prompt, longer=longer)


def filled_in(facts: ModelFacts, prompt: CallPrompt, suffix: str) -> CallPrompt:
    """The prompt that asks the model for the text between a prompt and a suffix. Raises ApiError if the model
    has not learned to fill in, or the prompt is no text."""
    if not suffix:
        return prompt
    if not facts.infill or not isinstance(prompt, str):
        message = "the model has no tokens to fill in a text; leave suffix out, and send the prompt as a text"
        raise ApiError(message, code="unsupported_value", param="suffix")
    before, between, after = facts.infill
    return f"{before}{prompt}{between}{suffix}{after}"


async def truncated(state: ApiState, prompt: CallPrompt, most: int) -> CallPrompt:
    """The last tokens of a prompt, as vLLM's `truncate_prompt_tokens`; -1 for as many as fit the window."""
    most = state.backend.facts().window_tokens - 1 if most == -1 else most
    if isinstance(prompt, Conversation) and prompt.images:
        raise ApiError("a prompt with images is not truncated", param="truncate_prompt_tokens")
    ids = await prompt_ids_of(state, prompt, longer=True)
    return prompt if len(ids) <= most else tuple(ids[len(ids) - most :])


async def _biases(state: ApiState, given: LogitBias | None) -> tuple[tuple[int, float], ...]:
    """Biases by token: of a map, or of llama.cpp's pairs, in which false forbids a token, and a text stands
    for each of its tokens."""
    pairs = [*given.items()] if isinstance(given, dict) else given or []
    if len(pairs) > MAX_LOGIT_BIASES:
        raise ApiError(f"logit_bias has at most {MAX_LOGIT_BIASES} entries", param="logit_bias")
    wrong = [token for token, _ in pairs if isinstance(token, str) and not _is_id(token)]
    if isinstance(given, dict) and wrong:
        names = ", ".join(f"{token!r:.40}" for token in wrong[:_MOST_NAMED])
        message = f"logit_bias must have token ids as keys, got {names}{', ...' * (len(wrong) > _MOST_NAMED)}"
        raise ApiError(message, param="logit_bias")
    found: dict[int, float] = {}
    for token, value in pairs:
        number = -math.inf if value is False else float(value)
        if value is True or math.isnan(number):
            raise ApiError("logit_bias must have numbers as values", param="logit_bias")
        if isinstance(token, int):
            found[token] = number
        elif _is_id(token):
            found[int(token)] = number
        else:
            ids = await state.backend.tokenize(token, special=False)
            found |= dict.fromkeys(ids, number)
    return tuple(found.items())


def _is_id(token: str) -> bool:
    return token.isascii() and token.isdecimal() and len(token) <= 10


def _config(
    state: ApiState, body: SamplingFields, params: AnswerParams, biases: tuple[tuple[int, float], ...]
) -> GenerationConfig:
    """Length, stops and sampling of a request's answers."""
    stops = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ())
    if len(stops) > _MAX_STOPS or not all(0 < len(each) <= _MAX_STOP_CHARACTERS for each in stops):
        message = f"stop must have at most {_MAX_STOPS} strings of 1 to {_MAX_STOP_CHARACTERS} characters"
        raise ApiError(message, param="stop")
    # No answer is longer than the window: this only bounds the value.
    most = min(
        state.max_tokens if params.max_tokens is None else params.max_tokens,
        state.backend.facts().window_tokens,
    )
    if body.min_tokens > most:
        raise ApiError(f"min_tokens must be at most max_tokens ({most})", param="min_tokens")
    return GenerationConfig(
        max_tokens=most, min_tokens=body.min_tokens, stop=stops,
        stop_token_ids=tuple(body.stop_token_ids or ()), ignore_eos=body.ignore_eos,
        sampling=Sampling(logit_bias=biases, **sampling_of(state, body, params.temperature)),
        task=body.task or "", top_logprobs=params.top_logprobs,
    )  # fmt: skip


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
    followed by `; strict`), and whether it is strict. Raises ApiError if it is malformed."""
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
