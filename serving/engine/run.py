"""The state of one running request, from its first step to its last."""

import collections
import dataclasses
import time
from typing import Any, Literal

import numpy as np

from jaxllm.errors import JaxllmError
from jaxllm.models.features import require_decoder_alone
from jaxllm.sampling_state import sampler_state
from jaxllm.serving.engine.decoding import Decoding, TokenLogprob, pace
from jaxllm.serving.engine.request import Request, Session
from jaxllm.serving.ground.plan import Cost, Plan, Restoration
from jaxllm.serving.ground.text_stream import TextStream
from jaxllm.serving.runners.runner import PrefillChunk, Runner
from jaxllm.text.tokenizer import Tokenizer

Stage = Literal["begin", "prefill", "decode", "finish", "ended"]
DispatchKind = Literal["prefill", "decode", "verify", "finish"]


@dataclasses.dataclass
class Timings:
    """Times of one answer in milliseconds since its first step, without the restore of a context, the
    prompt tokens computed during it, and pauses between steps (see `Run.resume`)."""

    ttft_ms: float = 0.0
    total_ms: float = 0.0

    def tpot_ms(self, tokens: int) -> float:
        """Time per output token after the first."""
        return (self.total_ms - self.ttft_ms) / (tokens - 1) if tokens > 1 else 0.0


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """Last step of a run.

    Attributes:
      kind: "prefill" fed a chunk of the prompt, "decode" decoded a block, "verify" verified drafts, "finish"
        ended the answer and stored its context.
      chunk: the chunk that was fed; None for other kinds.
    """

    kind: DispatchKind
    chunk: PrefillChunk | None = None


class Lifecycle:
    """Hooks around an answer, for the caller that requested it; this class does nothing. Called without the
    runner's lock, except `sliding`. The last three are idempotent, because an interrupt may repeat them.

    Attributes:
      plan: plan of a call with an objective; None without one.
      objective: objective of the answer's time or energy; None for none.
      restoration: restoration of the call's context; the default without a context.
      finish_ms: time to make room for a context's new chunks, compress and store them.
    """

    plan: Plan | None = None
    objective: Any = None
    restoration: Restoration = Restoration()
    finish_ms: float = 0.0

    def cost(self, run: "Run") -> Cost | None:
        """The cost of the answer so far; None without an objective."""
        return None

    def met(self, run: "Run") -> bool | None:
        """Whether the answer so far met its objective; None without one."""
        return None

    def begin(self, run: "Run") -> None:
        """Called before anything is fed: restores the session."""

    def stepped(self, run: "Run") -> None:
        """Called after each dispatch that yielded tokens."""

    def sliding(self, run: "Run") -> None:
        """Called before the middle of the sequence is dropped from the session."""

    def finish(self, run: "Run") -> None:
        """Called when the answer has ended or was closed; idempotent."""

    def failed(self, run: "Run") -> None:
        """Called instead of `finish` after an error or an interrupt; raises nothing itself."""

    def dropped(self, run: "Run") -> None:
        """Called instead of `finish` when the answer is garbage-collected."""


class Run:
    """The state of a running request (see `jaxllm.serving.engine.step`).

    Attributes:
      request: the request that runs.
      prompt_tokens: number of prompt tokens.
      reused_tokens: number of prompt tokens found in the session's cache.
      prefill_mode: mode of prefill of the other prompt tokens, "int8" or "float".
      tokens: ids of the answer so far, a stop token included.
      drafted_tokens: number of accepted draft tokens among them.
      sequence: prompt and answer without tokens that slid out of the window; the next turn continues it.
      text: pieces of the answer that the caller has received.
      finish_reason: "stop" (end token, stop string, or a grammar that allows nothing more), "length"
        (max_tokens or the window; JSON that a grammar requires is completed before), or None while running
        or when closed before its last token.
      stop_string: the stop string that ended it, if one did.
      seed: the sampling seed; pass it in `Sampling` to reproduce the answer.
      logprobs: log-probabilities of `tokens`; None if not requested.
      timings: times of the answer.
      stage: kind of its next step.
      dispatched: kind of its last step; None before the first has ended.
      uninterrupted: whether `result` ran it from first step to last, without pauses of the caller.
    """

    # Class attributes, because `__del__` needs them even if `__init__` failed.
    lifecycle: Lifecycle = Lifecycle()
    stage: Stage = "ended"

    def __init__(
        self,
        decoding: Decoding,
        tokenizer: Tokenizer,
        request: Request,
        *,
        session: Session | None = None,
        lifecycle: Lifecycle | None = None,
    ) -> None:
        """Makes a run, without running its first step.

        Raises:
          ConfigError, ContextOverflow: see `Request.require_served_by`.
        """
        runner, config = decoding.runner, request.config
        request.require_served_by(runner)
        if session is not None and request.source is not None:
            # The cache depends on another source.
            require_decoder_alone(runner.cfg, "conversations that go on")
        self.request, self.prompt_tokens, self.reused_tokens = request, request.asked_tokens, 0
        self.prefill_mode: Literal["int8", "float"] = "float"
        self.tokens: list[int] = []
        self.drafted_tokens = 0
        self.dispatched: Dispatched | None = None
        self.sequence = list(request.prompt)
        self.text = ""
        self.finish_reason: Literal["stop", "length"] | None = None
        self.stop_string: str | None = None
        self.seed, self.timings = request.seed, Timings()
        self.uninterrupted = False
        self.session = Session() if session is None else session
        self.decoding = decoding
        self.stops = TextStream(tokenizer, config.stop, config.markers)
        self.stop_ids = config.stop_ids(tokenizer.eos_ids)
        vocab = runner.cfg.vocab_size
        # Without prompt embeddings, whose ids are beyond the vocabulary.
        prompt = [token for token in request.prompt if token < vocab]
        self.sampler = sampler_state(config.sampling, prompt, vocab, request.seed)
        # The bias and whether it is used, before stop tokens were forbidden; None if they are not.
        self._free_bias: tuple[Any, Any] | None = None
        if config.min_tokens:
            self._free_bias, bias = (self.sampler.bias, self.sampler.penalized), np.array(self.sampler.bias)
            bias[self.stop_ids[(self.stop_ids >= 0) & (self.stop_ids < vocab)]] = -np.inf
            self._set_bias(bias, np.bool_(True))
        # Number of tokens per dispatch.
        self.pace = 1 if request.tpot_ms is None else pace(request.tpot_ms)
        self.began_s = self.stepped_s = 0.0
        self.chunks: collections.deque[PrefillChunk] = collections.deque()
        # The new sequence while it slides.
        self.slid: list[int] | None = None
        # The last token in the buckets' input format.
        self.last_token: Any = None
        self.closed_because: JaxllmError | None = None
        # Time of other runs between its dispatches, if `resume` was called.
        self._paused_s = 0.0
        # Pieces of text that the caller has not received.
        self.pieces: collections.deque[str] = collections.deque()
        if lifecycle is not None:
            self.lifecycle = lifecycle
        self.stage = "begin"

    @property
    def runner(self) -> Runner:
        """The runner of the answer's level."""
        return self.decoding.runner

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """Log-probabilities of `tokens`; None if not requested."""
        found = self.decoding.logprobs
        return None if found is None else found[: len(self.tokens)]

    @property
    def plan(self) -> Any:
        """The `Plan`: level, the prompt's kept tokens and expected cost; None without an objective."""
        return self.lifecycle.plan

    @property
    def objective(self) -> Any:
        """The objective of the answer's time or energy; None for none."""
        return self.lifecycle.objective

    @property
    def cost(self) -> Any:
        """The `Cost` of the answer so far, since the request; None without an objective."""
        return self.lifecycle.cost(self)

    @property
    def met(self) -> bool | None:
        """Whether the answer so far met its objective; None without one."""
        return self.lifecycle.met(self)

    @property
    def restoration(self) -> Restoration:
        """Restoration of the answer's context; the default before the first step, and without a context."""
        return self.lifecycle.restoration

    @property
    def ttft_ms(self) -> float:
        """Time from the first step to the first token, including the restore of a context."""
        return self.restoration.took_ms + self.timings.ttft_ms

    @property
    def finish_ms(self) -> float:
        """Time to store the answer's context (see `Lifecycle`)."""
        return self.lifecycle.finish_ms

    @property
    def wanted_tokens(self) -> int:
        """Number of tokens until `max_tokens`."""
        return self.request.config.max_tokens - len(self.tokens)

    @property
    def room_tokens(self) -> int:
        """Number of tokens that fit the window; the last one is not cached."""
        return self.runner.options.context_tokens - len(self.sequence) + 1

    @property
    def block_tokens(self) -> int:
        """Maximum number of tokens of the next block: all of them have the sampler's bias."""
        forbidden = self.request.config.min_tokens - len(self.tokens)
        most = min(self.wanted_tokens, self.room_tokens)
        return min(most, forbidden) if forbidden > 0 else most

    @property
    def elapsed_ms(self) -> float:
        """Time since the first step, without pauses (see `resume`)."""
        return 1000 * (time.perf_counter() - self.began_s - self._paused_s)

    def resume(self) -> None:
        """Called before a step: excludes the time spent on other runs since the last step."""
        if self.stage != "begin":
            self._paused_s += time.perf_counter() - self.stepped_s

    def new_text(self) -> str:
        """The text since the last call, instead of iterating; appends it to `text`."""
        with self.runner.lock:
            piece = "".join(self.pieces)
            self.pieces.clear()
            self.text += piece
        return piece

    def take(self, block: list[int]) -> None:
        """Adds decoded tokens up to the answer's stop."""
        stops = set(self.stop_ids.tolist())
        visible = next((i for i, token in enumerate(block) if token in stops), len(block))
        piece = self.stops.push(block[:visible])
        if self.stops.stopped:
            self.finish_reason = "stop"
            block = block[: self.stops.consumed_tokens - len(self.tokens)]
        elif visible < len(block):
            self.finish_reason = "stop"
            block = block[: visible + 1]
        self.tokens += block
        self.sequence += block
        if self._free_bias is not None and len(self.tokens) >= self.request.config.min_tokens:
            self._set_bias(*self._free_bias)
            self._free_bias = None
        # Tokens after the stop are not part of the conversation.
        del self.session.tokens[len(self.sequence) :]
        self.last_token = np.array(block[-1:], np.int32)
        self.timings.total_ms = self.elapsed_ms
        self.pieces += [piece] if piece else []

    def _set_bias(self, bias: Any, penalized: Any) -> None:
        self.sampler = dataclasses.replace(self.sampler, bias=bias, penalized=penalized)

    def release(self) -> None:
        """Drops the sampler, whose arrays have the size of the vocabulary: an ended run needs it no more."""
        del self.sampler

    def flush(self) -> None:
        """Releases the withheld text after the answer has ended."""
        piece = self.stops.flush()
        self.stop_string = self.stops.matched
        self.timings.total_ms = self.elapsed_ms
        self.pieces += [piece] if piece else []
