"""Defines what crosses between the front (HTTP, sockets) and the engine thread: calls, events, facts, and the
backend that answers calls with events.

The front knows wire formats, apps and connections, and never touches JAX; the backend knows the engine, and
no wire format. All values here are frozen, and arrays in them (rows of images) are never changed, so that
threads may share them.
"""

import dataclasses
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.serving.elastic.objectives import Binding, Objective
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.guided.grammar import Grammar as Grammar
from jaxllm.serving.guided.grammar import GrammarKind as GrammarKind
from jaxllm.serving.guided.logprobs import TokenLogprob as TokenLogprob
from jaxllm.serving.images.encoded import EncodedImage


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What the front tells of the model.

    Attributes:
      name: for people and `model` fields.
      window_tokens: most tokens of prompt and answer together.
      vocab_size: number of token ids.
      levels: served, in percent, ascending.
      has_chat_template: whether conversations can be answered.
      adapters: names of the low-rank adapters that calls may name.
      opened_s: when it was opened, in seconds since 1970.
      chat_template: its source, in Jinja, which tells how the model writes calls of tools; empty for none.
      images: whether conversations may have images.
      sampling: options of sampling that the model's authors advise (see `TokenizerFiles`), the defaults of
        calls that name none; empty for none, or where the service goes without them.
    """

    name: str
    window_tokens: int
    vocab_size: int
    levels: tuple[int, ...]
    has_chat_template: bool
    adapters: tuple[str, ...]
    opened_s: float
    chat_template: str = ""
    images: bool = False
    sampling: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterFacts:
    """A low-rank adapter that calls may name.

    Attributes:
      name: for calls.
      digest: of its arrays and scaling, in hex; contexts are kept by it.
      size_bytes: of its factors in memory, at all levels.
      loaded_s: seconds since 1970.
    """

    name: str
    digest: str
    size_bytes: int
    loaded_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextFacts:
    """A context of an app.

    Attributes:
      name: unique in the store.
      tokens: number of its tokens.
      level: that answers in it, in percent.
      pinned: whether its chunks stay in memory.
      stored_bytes: of its chunks on storage.
      created_s: seconds since 1970; 0 where it is not known.
      adapter: the name of the low-rank adapter that answers in it; its digest where it is not loaded, empty
        for none.
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
    """The service does not take a call now, though the call is well formed.

    Attributes:
      reason: why: "full" (a queue or a limit of the app), "loading", "draining", "budget".
      retry_after_s: when to try again; None where that is not known.
    """

    def __init__(self, message: str, *, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.reason, self.retry_after_s = reason, retry_after_s


class ContextBusy(ConfigError):
    """The context answers another call now."""


class AdapterGone(ConfigError):
    """There is no adapter of this name."""


class AdapterBusy(ConfigError):
    """Calls use the adapter now, or its name is taken."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages to answer by the model's chat template; for an encoder-decoder they are one source (see
    `jaxllm.text.prompts.source_prompt`).

    Attributes:
      messages: JSON objects with a `role` and a `content`, oldest first.
      tools: JSON objects as OpenAI has them, for templates that know tools.
      images: those of the messages' parts `{"type": "image"}`, in their order; see `Backend.encode_images`.
      continue_final: whether the answer continues the last message's text (see `Tokenizer.chat_text`).
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    images: tuple[EncodedImage, ...] = ()
    continue_final: bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """What an app asks, checked, in no wire format.

    Attributes:
      app: that asks, as the connection or the key identifies it; never taken from a body.
      request_id: unique, for logs and cancelling.
      prompt: a conversation; a text to continue; or token ids.
      config: length, stops and sampling.
      objective: of the answer's time; None for the app's.
      strict: refuse where no choice is in time; None for the app's.
      shorten: whether the plan may drop words of a text, or of a conversation's last message; None for the
        app's.
      bound: whether the objective is the app's, and not the call's own.
      priority: background calls run when no foreground call waits.
      context: the name of one of the app's contexts, which the prompt continues; empty for none.
      context_tokens: the prompt continues the context's first so many tokens: the context itself where it has
        no more and answers no other call when the engine takes the turn, else a context forked there; None
        for all that it has.
      prefix_key: of caches of the app that begin equally well, that of a call with the same key is used.
      adapter: the name of a low-rank adapter; empty for none, or for the context's.
      grammar: what the text must match; None for any text.
      top_logprobs: so many of the likeliest tokens are told at each token; 0 for the token's own
        log-probability alone, None for none.
    """

    app: str
    request_id: str
    prompt: Conversation | str | tuple[int, ...]
    config: GenerationConfig
    objective: Objective | None = None
    strict: bool | None = None
    shorten: bool | None = None
    bound: bool = False
    priority: Priority = "foreground"
    context: str = ""
    context_tokens: int | None = None
    prefix_key: str = ""
    adapter: str = ""
    grammar: Grammar | None = None
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        if not self.app:
            raise ConfigError("a call needs an app")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Started:
    """The first token is about to be shown.

    Attributes:
      prompt_tokens: of the whole prompt, a context's included.
      kept_tokens: of them, what the plan kept.
      reused_tokens: of them, what a cache had already.
      level: that answers, in percent.
      source: of the plan (see `jaxllm.serving.elastic.planner.Plan`); "context" for a turn in a context, and
        "unplanned" where another call had no objective.
      queued_ms: from the call to the first step.
      context_tokens: tokens of the prompt that a context had before.
      adapter: that answers; empty for none.
      objective: that counts for the answer; None for none.
      bound: whether it is the app's, and not the call's own.
      moved, shared: of the context's restoration (see `Restoration`).
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
      text: whole characters; may be empty where tokens gave no text yet.
      tokens: ids since the last piece.
      logprobs: of these tokens; None where they were not asked for.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """An answer has ended.

    Attributes:
      finish_reason: "stop" or "length".
      stop_string: that ended it; None for an end token or the length.
      tokens: of the answer, the end token included.
      ttft_ms: from the call to the first token, waiting included.
      tpot_ms: per further token, waiting included.
      engine_ttft_ms, engine_tpot_ms: the same without waiting: what profiles learn from.
      met: whether the objective was met; None where there was none.
      ttft_limit_ms, tpot_limit_ms: what the objective allowed; None where it did not limit them.
      drafted: share of the tokens that were drafted.
      seed: of the draw.
      context: the name of the context that has it now; empty for none.
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
    ttft_limit_ms: float | None = None
    tpot_limit_ms: float | None = None


Event = Started | Piece | Ended


class ServedAdapters(Protocol):
    """The low-rank adapters of a service. `use` is for the engine's thread, the others are for any."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all that are loaded."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes of their factors in memory."""
        ...

    def facts(self) -> list[AdapterFacts]:
        """All that are loaded."""
        ...

    def require(self, name: str) -> None:
        """Checks that an adapter is loaded; "" stands for none.

        Raises:
          AdapterGone: it is not.
        """
        ...

    def read(self, name: str, folder: str) -> Any:
        """Reads an adapter from within the folder of adapters, for `add`. Answers go on meanwhile.

        Raises:
          ConfigError, CheckpointError, AdapterBusy, BudgetExceeded: see `Backend.load_adapter`.
        """
        ...

    def add(self, name: str, loaded: Any) -> AdapterFacts:
        """Lets calls name an adapter that was read; in the engine's thread."""
        ...

    def unload(self, name: str) -> Collection[tuple[int, int]]:
        """Forgets an adapter that no call uses; in the engine's thread.

        Returns:
          The versions of weights with it, whose caches are of no further use.

        Raises:
          AdapterGone: there is none of this name.
          ConfigError: it cannot be unloaded.
        """
        ...

    def use(self, name: str) -> None:
        """Applies an adapter to the model; "" for none. Takes no time.

        Raises:
          AdapterGone: it is not loaded any more.
        """
        ...


class Ticket(Protocol):
    """A call that the backend has taken."""

    @property
    def call(self) -> Call: ...  # noqa: D102

    def events(self) -> AsyncIterator[Event]:
        """`Started`, `Piece`s, `Ended`; raises the JaxllmError that ended the answer instead. For one reader,
        in the event loop. A slow reader holds nothing but its own answer."""
        ...

    def cancel(self) -> None:
        """Ends the answer between two dispatches; its context keeps what is complete. Later events are
        dropped. Does nothing where it has ended."""
        ...


class Backend(Protocol):
    """The engine's side of the service. All methods are called in the event loop; none blocks it."""

    def facts(self) -> ModelFacts:
        """Of the model.

        Raises:
          Refused: it is still loading.
        """
        ...

    def submit(self, call: Call) -> Ticket:
        """Takes a call. What is wrong with a turn in a context, such as an instruction after the first one,
        is told by the ticket's events.

        Raises:
          Refused: it is loading or draining, or its queue or the app's share of it is full.
          ConfigError, ContextOverflow: the call cannot be answered whatever the load.
          ContextGone: the app has no context of this name.
          ContextBusy: the context answers another call.
        """
        ...

    async def tokenize(self, prompt: Conversation | str, *, special: bool = True) -> Sequence[int]:
        """The token ids of a prompt."""
        ...

    async def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        ...

    async def token_bytes(self, ids: Sequence[int], *, begins: bool = False) -> Sequence[bytes]:
        """The bytes of each token's text (see `jaxllm.text.token_bytes.TokenBytes`)."""
        ...

    async def render(self, prompt: Conversation) -> str:
        """The text of a conversation by the chat template."""
        ...

    async def embed(self, app: str, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[float]]:
        """The mean of the last layer's hidden states over each prompt's tokens, of length 1."""
        ...

    async def encode_images(self, app: str, files: Sequence[bytes]) -> tuple[EncodedImage, ...]:
        """Reads and encodes images for a conversation, a tile at a time between two dispatches.

        Raises:
          ConfigError: the model has no encoder of images, or one of them cannot be read.
          ContextOverflow: they do not fit the window.
        """
        ...

    def adapters(self) -> Sequence[AdapterFacts]:
        """The adapters that calls may name."""
        ...

    async def load_adapter(self, app: str, name: str, folder: str) -> AdapterFacts:
        """Loads an adapter for an operator, from within the folder of adapters.

        Raises:
          ConfigError, CheckpointError: it cannot be read, lies elsewhere or does not fit; or none may be
            loaded.
          AdapterBusy: there is one of this name.
          BudgetExceeded: there are too many, or there is no memory.
        """
        ...

    async def unload_adapter(self, app: str, name: str) -> None:
        """Forgets an adapter for an operator.

        Raises:
          AdapterGone: there is none of this name.
          AdapterBusy: calls use it.
        """
        ...

    def binding(self, app: str) -> tuple[Binding | None, bool]:
        """The objective that an app is bound to, and whether the app itself said so; None for none."""
        ...

    async def bind(self, app: str, binding: Binding) -> Sequence[int]:
        """Binds an app to an objective.

        Returns:
          The profiled prompt lengths at which no choice meets it on this device.

        Raises:
          ConfigError: it limits energy, and the device's profile has none.
          BudgetExceeded: too many apps are bound.
        """
        ...

    def unbind(self, app: str) -> None:
        """Ends what an app has bound itself to."""
        ...

    async def create_context(
        self, app: str, *, level: int | None = None, pinned: bool = False, adapter: str = ""
    ) -> ContextFacts:
        """Creates a context of an app.

        Raises:
          ConfigError: the service keeps no contexts, or the level is not served.
          AdapterGone: there is no such adapter.
          BudgetExceeded: the app may own no more.
        """
        ...

    async def contexts(self, app: str) -> Sequence[ContextFacts]:
        """All contexts of an app."""
        ...

    async def context(self, app: str, name: str) -> ContextFacts:
        """A context of an app.

        Raises:
          ConfigError: the service keeps no contexts.
          ContextGone: the app has none of this name.
          CheckpointError: it cannot be read; `Unreadable` where that may pass.
        """
        ...

    async def pin_context(self, app: str, name: str, pinned: bool) -> ContextFacts:
        """Pins a context, or lets it be evicted.

        Raises:
          ContextGone: the app has none of this name.
        """
        ...

    async def delete_context(self, app: str, name: str) -> None:
        """Deletes a context.

        Raises:
          ContextGone: the app has none of this name.
          ContextBusy: it is answering.
        """
        ...

    async def readiness(self) -> Mapping[str, Any]:
        """`health`, for which the engine answers a token where it answered nobody for a while."""
        ...

    def health(self) -> Mapping[str, Any]:
        """`ready` (warm, not draining, and the engine does not fail), `alive` (the engine's heartbeat is
        recent), and why not; of a model that is open, `profile` (see
        `jaxllm.serving.server.idle_work.ProfileFacts`)."""
        ...

    def snapshot(self) -> Mapping[str, Any]:
        """Figures of now for metrics, in plain data. Each part may be missing:

        queue: `waiting` calls, their `limit`, and the age `oldest_ms`.
        running: `count` of answers by `app` and `level`.
        memory: `process_bytes`, `limit_bytes` (0 for none), `pressure` (the share of time for which tasks
          of the machine waited for memory), and `holdings` by kind, each with `size_bytes` and perhaps
          `limit_bytes` and `least_bytes`.
        contexts: by app, `contexts`, `pinned`, `stored_bytes`, and resident `chunks` by bits.
        adapters: bytes by name.
        experts: `visits`, `hits`, `foreseen` since the start.
        read_bytes: bytes read from storage since the start, by kind.
        grammars: counts since the start, by outcome.
        """
        ...
