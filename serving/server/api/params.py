"""Turns the parameters of all wire formats into calls: length, sampling, grammar, objective, context,
adapter."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from jaxllm.errors import ConfigError
from jaxllm.sampling_state import Sampling
from jaxllm.serving.elastic.objectives import Objective
from jaxllm.serving.engine.decoding import MAX_TOP_LOGPROBS
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.guided.grammar import Grammar, narrowed
from jaxllm.serving.server.api.errors import ApiError
from jaxllm.serving.server.api.messages import ToolUse
from jaxllm.serving.server.api.requests import ApiRequest, ApiState
from jaxllm.serving.server.api.streaming import Answer
from jaxllm.serving.server.calls import Call, Conversation
from jaxllm.serving.server.limits import objective_from

_MAX_STOPS, _MAX_STOP_CHARACTERS = 16, 256
_STRICT = re.compile(r"(.*);\s*strict\s*", re.DOTALL)

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed",
)  # fmt: skip

Prompt = Conversation | str | tuple[int, ...]
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
class Asked:
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
    state: ApiState, request: ApiRequest, body: SamplingFields, prompts: Sequence[Prompt], asked: Asked
) -> Answer:
    """Submits a request's calls, `asked.n` consecutive ones for each prompt.

    Raises:
      ApiError: a field is out of range, there are too many calls or none, or fields exclude each other.
      JaxllmError: a call is refused.
    """
    if body.adapter and asked.adapter and body.adapter != asked.adapter:
        raise ApiError(
            f"model names the adapter {asked.adapter!r}, adapter {body.adapter!r:.80}", param="adapter"
        )
    number, limit = len(prompts) * asked.n, state.answers_per_request
    if not 1 <= number <= limit:
        raise ApiError(
            f"a request may ask for 1 to {limit} answers, as prompts times n; this one asks for {number}"
        )
    objective, strict = objective_of(body.slo, body.strict, request.slo)
    context = asked.context or context_of(body.conversation)
    if context and number > 1:
        raise ApiError("a context gives one answer at a time; n must be 1", param="conversation")
    if context or any(isinstance(prompt, tuple) for prompt in prompts):
        if body.shorten:
            raise ApiError(
                "shorten is for texts and conversations: of token ids and in a context no words are dropped",
                param="shorten",
            )
        if body.task:
            raise ApiError("task is for texts and messages outside of contexts", param="task")
    config, adapter = _config(state, body, asked), state.adapter(body.adapter or asked.adapter)
    calls = [
        Call(
            app=request.app,
            request_id=request.call_id(),
            prompt=prompt,
            config=_seeded(config, place),
            objective=objective,
            strict=strict,
            shorten=body.shorten,
            priority="background" if body.service_tier == "flex" else "foreground",
            context=context,
            context_tokens=asked.context_tokens,
            prefix_key=body.prompt_cache_key or "",
            adapter=adapter,
        )
        for prompt in prompts
        for place in range(asked.n)
    ]
    return Answer(state, calls, asked.use.scanner, len(prompts))


def _config(state: ApiState, body: SamplingFields, asked: Asked) -> GenerationConfig:
    """Length, stops, sampling and grammar of a request's answers."""
    if asked.use.tools and (asked.grammar or body.grammar):
        raise ApiError("tools cannot be combined with a format or grammar of the answer", param="tools")
    if body.grammar and asked.grammar:
        raise ApiError("grammar cannot be combined with a response format", param="grammar")
    biases = asked.logit_bias or {}
    for token in biases:
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            raise ApiError(f"logit_bias must have token ids as keys, got {token!r:.40}", param="logit_bias")
    if any(math.isnan(value) for value in biases.values()):
        raise ApiError("logit_bias must have numbers as values", param="logit_bias")
    stops = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    if len(stops) > _MAX_STOPS or not all(0 < len(each) <= _MAX_STOP_CHARACTERS for each in stops):
        raise ApiError(
            f"stop must have at most {_MAX_STOPS} strings of 1 to {_MAX_STOP_CHARACTERS} characters",
            param="stop",
        )
    return GenerationConfig(
        # No answer is longer than the window: this only bounds the value.
        max_tokens=min(
            state.max_tokens if asked.max_tokens is None else asked.max_tokens,
            state.backend.facts().window_tokens,
        ),
        stop=stops,
        sampling=Sampling(
            logit_bias=tuple((int(token), float(value)) for token, value in biases.items()),
            **sampling_of(state, body, asked.temperature),
        ),
        task=body.task or "",
        grammar=asked.use.grammar or asked.grammar or _own_grammar(body.grammar),
        top_logprobs=asked.top_logprobs,
    )


def sampling_of(state: ApiState, body: SamplingFields, temperature: float | None = None) -> dict[str, Any]:
    """Sampling options by name: the request's, else those recommended by the model's authors; `temperature`
    is the default if neither gives one, None for the front's."""
    asked = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
    default = state.temperature if temperature is None else temperature
    return {"temperature": default, **state.backend.facts().sampling, **asked}


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


def format_grammar(kind: Any, schema: Any, param: str, *, strict: bool = False) -> Grammar | None:
    """The grammar of a response format: text, json_object or json_schema, narrowed if strict; raises
    ApiError."""
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar(kind="json")
    if kind == "json_schema" and isinstance(schema, dict | bool):
        return Grammar(kind="json_schema", text=json.dumps(narrowed(schema) if strict else schema))
    raise ApiError(f"{param} has the type text, json_object, or json_schema with a schema", param=param)


def _seeded(config: GenerationConfig, place: int) -> GenerationConfig:
    seed = config.sampling.seed
    if seed is None or not place:
        return config
    sampling = dataclasses.replace(config.sampling, seed=(seed + place) % (1 << 64))
    return dataclasses.replace(config, sampling=sampling)


def _own_grammar(grammar: Mapping[str, Any] | None) -> Grammar | None:
    """The extension `grammar`."""
    if grammar is None:
        return None
    (kind, text), *more = grammar.items() or [("", None)]
    if more or kind not in ("regex", "lark") or not isinstance(text, str) or not text:
        raise ApiError('grammar is {"regex": TEXT} or {"lark": TEXT}', param="grammar")
    return Grammar(kind="regex" if kind == "regex" else "lark", text=text)
