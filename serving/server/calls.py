"""Defines what crosses between the front (HTTP, sockets) and the engine's thread: calls, events and facts;
renders and encodes the prompts of calls.

The front knows wire formats, apps and connections, and never touches JAX; the engine's side
(`jaxllm.serving.server.backend`) knows no wire format. All values here are frozen, and arrays in them (prompt
embeddings of images) are never changed, so that threads may share them. This module imports no JAX.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from jaxllm.elastic.slo import Slo
from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.serving.contexts.record import conversation_turn_ids, turn_ids
from jaxllm.serving.elastic.objectives import Cost, EndToEnd, Latency, Objective
from jaxllm.serving.engine.decoding import TokenLogprob
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.prompt_embeddings import PromptEmbeddings
from jaxllm.serving.images.prompt import EncodedImage, with_images
from jaxllm.text.answer_syntax import PLAIN_FORMAT, AnswerFormat
from jaxllm.text.droppable import PromptTokens, conversation_tokens, prompt_tokens
from jaxllm.text.marked_text import MarkedText
from jaxllm.text.prompts import Prompt, prompt_ids, reads_sources, source_prompt
from jaxllm.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts of the model for the front.

    Attributes:
      name: display name, and value of `model` fields.
      window_tokens: maximum number of tokens of prompt and answer together.
      vocab_size: number of token ids.
      levels: served levels, in percent, ascending.
      has_chat_template: whether conversations can be answered.
      adapters: names of the low-rank adapters that calls may name.
      opened_s: time when it was opened, in seconds since 1970.
      chat_template: its source in Jinja; empty for none.
      answer_format: format of its answers.
      images: whether conversations may have images.
      sampling: sampling options recommended by the model's authors (see `TokenizerFiles`), the defaults of
        calls without their own; empty for none, or if the service ignores them.
      digest: SHA-256 of the model in hex; empty if unknown.
      size_bytes: bytes of its weights.
      weights: width of its weight matrices, such as "int8".
      architecture: name of its architecture, as in Hugging Face's `model_type`.
      shape: numbers of its parameters, layers, heads and key-value heads, and the size of its hidden states.
      infill: the special tokens before a prefix, a suffix and the text between them; empty if the model has
        not learned to fill in.
    """

    name: str
    window_tokens: int
    vocab_size: int
    levels: tuple[int, ...]
    has_chat_template: bool
    adapters: tuple[str, ...]
    opened_s: float
    chat_template: str = ""
    answer_format: AnswerFormat = PLAIN_FORMAT
    images: bool = False
    sampling: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    digest: str = ""
    size_bytes: int = 0
    weights: str = ""
    architecture: str = ""
    shape: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)
    infill: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterFacts:
    """A low-rank adapter that calls may name.

    Attributes:
      name: name in calls.
      digest: hex digest of its arrays and scaling, by which contexts refer to it.
      size_bytes: memory of its factors, at all levels.
      created_s: load time in seconds since 1970.
    """

    name: str
    digest: str
    size_bytes: int
    created_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextFacts:
    """A context of an app.

    Attributes:
      name: name, unique in the store.
      tokens: number of its tokens.
      level: level that answers in it, in percent.
      pinned: whether its chunks stay in memory.
      stored_bytes: bytes of its chunks on storage.
      created_s: creation time in seconds since 1970; 0 if unknown.
      adapter: name of the low-rank adapter that answers in it; its digest if not loaded, empty for none.
    """

    name: str
    tokens: int
    level: int
    pinned: bool
    stored_bytes: int
    created_s: float = 0.0
    adapter: str = ""


Priority = Literal["foreground", "background"]


class Refused(JaxllmError):
    """The service does not accept a call now, though the call is well formed.

    Attributes:
      reason: "full" (a queue or a limit of the app), "quota" (the app's tokens of a day), "background" (the
        app is not in the foreground), "hot" (the device is), "loading", "draining", "failed".
      retry_after_s: time until a retry is useful; None if unknown.
    """

    def __init__(self, message: str, *, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.reason, self.retry_after_s = reason, retry_after_s


class ContextBusy(ConfigError):
    """The context answers another call now."""


class AdapterGone(ConfigError):
    """No adapter has this name."""


class AdapterBusy(ConfigError):
    """Calls use the adapter, or its name is in use."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages to answer by the model's chat template; for an encoder-decoder they are one source (see
    `jaxllm.text.prompts.source_prompt`).

    Attributes:
      messages: JSON objects with a `role` and a `content`, oldest first.
      tools: JSON objects in OpenAI's format, for templates that support tools.
      images: images of the messages' parts `{"type": "image"}`, in order; see `Backend.encode_images`.
      template_options: further variables of the template, such as `enable_thinking`.
      continue_final: whether the answer continues the last message's text (see `Tokenizer.chat_text`).
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    images: tuple[EncodedImage, ...] = ()
    template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    continue_final: bool | None = None
    # Its rendering once it is known: a thinking model's is looked at before it is encoded.
    _texts: list[MarkedText] = dataclasses.field(default_factory=list, init=False, repr=False, compare=False)

    def text(self, tokenizer: Tokenizer) -> MarkedText:
        """The conversation by the chat template; raises ConfigError, TemplateError, ContextOverflow."""
        if not self._texts:
            self._texts.append(tokenizer.chat_text(list(self.messages), **_chat(self)))
        return self._texts[0]


CallPrompt = Conversation | str | tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """An app's validated request, independent of the wire format.

    Attributes:
      app: the app, as identified by the connection or the key, never by the body.
      request_id: unique id, for logs and cancelling.
      prompt: a conversation, a text to continue, or token ids.
      config: length, stops, sampling, grammar and log-probabilities.
      objective: objective of the answer's time; None for the app's.
      first_token: the token that ends the objective's time to the first one: the first of the answer's text
        or calls, or of its reasoning before.
      strict: whether to reject the call if no choice meets the objective; None for the app's setting.
      shorten: whether the plan may drop words of a text, or of a conversation's last message; None for the
        app's setting.
      bound: whether the objective is the app's, rather than the call's.
      priority: background calls run when no foreground call waits.
      context: name of one of the app's contexts, which the prompt continues; empty for none.
      context_tokens: number of the context's first tokens to continue: in the context itself if it has no
        more and answers no other call when the engine begins the turn, else in a fork; None for all tokens.
      prefix_key: preference among the app's caches with equally long common prefixes: that of a call with
        the same key.
      adapter: name of a low-rank adapter; empty for none, or for the context's.
    """

    app: str
    request_id: str
    prompt: CallPrompt
    config: GenerationConfig
    objective: Objective | None = None
    first_token: Literal["answer", "reasoning"] = "answer"
    strict: bool | None = None
    shorten: bool | None = None
    bound: bool = False
    priority: Priority = "foreground"
    context: str = ""
    context_tokens: int | None = None
    prefix_key: str = ""
    adapter: str = ""

    @property
    def thought_tokens(self) -> int:
        """Most tokens of reasoning before the first token that the objective counts; 0 without a budget."""
        thought = None if self.config.grammar is None else self.config.grammar.thought
        if self.first_token == "reasoning" or thought is None or thought.most_tokens is None:
            return 0
        return min(thought.most_tokens, self.config.max_tokens)

    def __post_init__(self) -> None:
        if not self.app:
            raise ConfigError("a call needs an app")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Started:
    """The first token is about to be sent.

    Attributes:
      prompt_tokens: number of tokens of the whole prompt, including a context's.
      kept_tokens: number of them that the plan kept.
      reused_tokens: number of them that were cached.
      level: level that answers, in percent.
      source: source of the plan (see `jaxllm.serving.elastic.planner.Plan`); "context" for a turn in a
        context, and "unplanned" for other calls without an objective.
      queued_ms: time from the call to the first step.
      context_tokens: number of prompt tokens that were in a context before.
      adapter: adapter that answers; empty for none.
      objective: objective of the answer; None for none.
      bound: whether it is the app's, rather than the call's.
      moved, shared: fields of the context's `Restoration`.
    """

    prompt_tokens: int
    kept_tokens: int
    reused_tokens: int
    level: int
    source: str
    queued_ms: float
    context_tokens: int = 0
    adapter: str = ""
    objective: Objective | None = None
    bound: bool = False
    moved: tuple[str, ...] = ()
    shared: int = 0


@dataclasses.dataclass(frozen=True)
class Piece:
    """New text of an answer.

    Attributes:
      text: whole characters; empty if tokens gave no text yet.
      tokens: ids since the last piece.
      logprobs: log-probabilities of these tokens; None if not requested.
      ends: number of characters of the text that was shown with each token and those before; an end token
        has none.
      at_s: time of the step that gave it, by `time.perf_counter`.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    ends: tuple[int, ...] = ()
    at_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """An answer has ended.

    Attributes:
      finish_reason: "stop" or "length".
      stop_string: stop string that ended it; None for an end token or the length.
      tokens: number of tokens of the answer, including the end token.
      ttft_ms: time from the call to the first token, including waiting.
      answer_ttft_ms: the same to the first token of text or calls, after any reasoning, if the reader told
        the job of it.
      tpot_ms: time per further token, including waiting.
      engine_ttft_ms, engine_tpot_ms: the same without waiting, for learning profiles.
      met: whether the objective was met, by the call's `first_token`; None without one.
      drafted: share of the tokens that were drafted.
      seed: the sampling seed.
      context: name of the context that now has it; empty for none.
      context_tokens: number of tokens of that context.
    """

    finish_reason: Literal["stop", "length"]
    stop_string: str | None
    tokens: int
    ttft_ms: float
    tpot_ms: float
    engine_ttft_ms: float
    engine_tpot_ms: float
    met: bool | None
    drafted: float
    seed: int
    context: str = ""
    context_tokens: int = 0
    answer_ttft_ms: float | None = None


Event = Started | Piece | Ended


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextToScore:
    """A text whose tokens are scored, with the possible ends that follow it.

    Attributes:
      tokens: ids of the text.
      ends: ids of its ends.
      top: number of likeliest tokens next to each, at least 1.
      level: level that scores, in percent; None for the whole model.
      adapter: name of a low-rank adapter; empty for none.
      keep: whether an answer to the text follows, which then finds its prompt cached.
    """

    tokens: tuple[int, ...]
    ends: tuple[tuple[int, ...], ...] = ()
    top: int = 1
    level: int | None = None
    adapter: str = ""
    keep: bool = False

    @property
    def count(self) -> int:
        """Number of all tokens."""
        return len(self.tokens) + sum(map(len, self.ends))


@dataclasses.dataclass(frozen=True)
class Scored:
    """A text was scored, with its number of tokens."""

    tokens: int


def time_limits(objective: Objective | None, whole: Cost) -> tuple[float, float]:
    """The limits of an answer's time to the first token and per further token, in milliseconds, by its
    objective and the whole model's cost; infinity for none. A limit of the total time is divided in
    proportion to the whole model's times."""
    match objective:
        case Slo():
            return objective.limits(whole.counted_ttft_ms, whole.tpot_ms)
        case Latency():
            return objective.ttft_ms, objective.tpot_ms
        case EndToEnd():
            share = objective.total_ms / max(whole.total_ms, 1e-6)
            return share * whole.ttft_ms, share * whole.tpot_ms
    return math.inf, math.inf


def encoded_prompt(
    tokenizer: Tokenizer, prompt: CallPrompt, task: str = "", *, shorten: bool = False
) -> tuple[PromptTokens, PromptEmbeddings | None]:
    """A prompt, rendered and encoded, with the tokens and the embeddings of its images; None without images.
    `shorten`: whether words of a text, or of a conversation's last message, may be dropped.

    Raises:
      ConfigError: it is empty or malformed, or has tools that the template does not support.
      ContextOverflow: it is longer than the tokenizer's limit.
    """
    match prompt:
        case Conversation() if reads_sources(tokenizer):
            source = source_prompt(prompt.messages, prompt.tools, task=task)
            found = prompt_tokens(tokenizer, source) if shorten else prompt_ids(tokenizer, source)
        case Conversation():
            if task:
                # Raises: a decoder has no tasks.
                tokenizer.files.source_text("", task)
            if shorten:
                found = conversation_tokens(tokenizer, prompt.messages, **_chat(prompt))
            else:
                found = tokenizer.encode(prompt.text(tokenizer), add_special_tokens=False)
        case "":
            raise ConfigError("the prompt is empty; give it at least one character")
        case str() if shorten:
            found = prompt_tokens(tokenizer, Prompt(user=prompt, form="text", task=task))
        case str():
            found = tokenizer.encode(tokenizer.files.source_text(prompt, task))
        case _:
            found = prompt
    encoded = found if isinstance(found, PromptTokens) else PromptTokens.of_ids(tuple(found))
    images = images_of(prompt)
    return with_images(tokenizer, encoded, images) if images else (encoded, None)


def images_of(prompt: CallPrompt) -> tuple[EncodedImage, ...]:
    """The images of a prompt."""
    return prompt.images if isinstance(prompt, Conversation) else ()


def content_tokens(tokenizer: Tokenizer, prompt: CallPrompt) -> int:
    """The approximate number of tokens of a turn, for threads that do not know its context."""
    if isinstance(prompt, tuple):
        return len(prompt)
    texts = [prompt] if isinstance(prompt, str) else [str(each.get("content")) for each in prompt.messages]
    count = sum(len(tokenizer.encode(text, add_special_tokens=False, special=False)) for text in texts)
    return count + sum(len(image.rows) for image in images_of(prompt))


def call_turn_ids(
    tokenizer: Tokenizer, call: Call, before: Sequence[int]
) -> tuple[Sequence[int], PromptEmbeddings | None]:
    """The tokens that a call adds to a context's tokens `before`, and prompt embeddings in place of some.
    Raises ConfigError or ContextOverflow if the prompt is empty, or not a turn (see
    `conversation_turn_ids`)."""
    prompt = call.prompt
    if isinstance(prompt, str):
        return turn_ids(tokenizer, before, prompt, now=datetime.now()), None
    if not isinstance(prompt, Conversation):
        if not prompt:
            raise ConfigError("the prompt is empty; give it at least one token")
        return prompt, None
    ids = conversation_turn_ids(tokenizer, before, prompt.messages, **_chat(prompt))
    if not prompt.images:
        return ids, None
    whole, rows = with_images(tokenizer, PromptTokens.of_ids(ids), prompt.images)
    return whole.ids.tolist(), rows


def rendered(tokenizer: Tokenizer, prompt: Conversation) -> str:
    """The text of a conversation by the chat template, for display (see `Conversation.text`)."""
    return prompt.text(tokenizer).text


def _chat(prompt: Conversation) -> dict[str, Any]:
    """Arguments of chat templates beside the messages."""
    return {
        "tools": prompt.tools,
        "continue_final": prompt.continue_final,
        "now": datetime.now(),
        "template_options": prompt.template_options,
    }
