"""One answer: prefill, first token, then blocks of tokens, as a stream of text.

`Session` holds the tokens whose keys and values are in a cache, so that a next turn feeds only what is
new. `Generation` drives one request and can be stopped between any two dispatches.
"""

import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import jax
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError, ContextGone, ContextOverflow, NotFinite
from jaxllm.kv.cache import KVCache
from jaxllm.sampling import NO_TOKEN, SamplerState, Sampling, sampler_state
from jaxllm.tokenizer import MAX_TOKEN_ID, Tokenizer
from serving.forked import require_not_forked
from serving.sliding import Sliding, kept_tokens, slid
from serving.text import MAX_STOP_IDS, TextStream

# A dispatch decodes as many tokens as fit this time, so that text flows, a cancel is obeyed soon, and
# little is thrown away behind a stop string; a small model still gets whole blocks.
_DISPATCH_MS = 50.0
DEFAULT_MAX_TOKENS = 256


class Window(Protocol):
    """The part of an engine's options that an answer needs (see `EngineOptions`)."""

    @property
    def context_tokens(self) -> int:
        """Most tokens of prompt and answer together."""
        ...


class Decoder(Protocol):
    """What an answer is made with: the graphs of a model, as calls (see `BucketTable`, the first of them).

    One call at a time: whoever calls holds `lock`.
    """

    @property
    def lock(self) -> threading.RLock:
        """Of the model: all of its levels and drafts share it."""
        ...

    @property
    def cfg(self) -> ModelConfig:
        """The model."""
        ...

    @property
    def options(self) -> Window:
        """Resolved options."""
        ...

    @property
    def weights_version(self) -> tuple[int, int]:
        """Names the weights that caches belong to."""
        ...

    def require_usable(self) -> None:
        """Raises a JaxllmError where tokens would not be the model's, or never come: its weights were changed
        in place, or this process was forked from the one that opened it."""
        ...

    def start(self, tokens: int) -> KVCache:
        """An empty cache with room for `tokens` positions."""
        ...

    def make_room(self, cache: KVCache, tokens: int) -> KVCache:
        """The cache itself, or a longer one with the same content, so that `tokens` positions fit."""
        ...

    def prefill(self, cache: KVCache, tokens: Sequence[int], at: int) -> tuple[Any, KVCache]:
        """Feeds `tokens` at position `at`: logits `[1, V]` after the last, cache."""
        ...

    def sample(self, logits: Any, sampler: SamplerState) -> tuple[jax.Array, SamplerState]:
        """The first token `[1]` of an answer, and the sampler."""
        ...

    def decode_limit(self, pace: int, remaining: int) -> int:
        """How many tokens `decode` should be asked for: of `remaining` that are wanted, where `pace` take as
        long as a user should wait for the next words."""
        ...

    def decode(
        self,
        token: Any,
        cache: KVCache,
        sampler: SamplerState,
        stop_ids: np.ndarray,
        limit: int,
        held: Sequence[int] = (),
    ) -> tuple[Any, Any, KVCache, SamplerState]:
        """Up to `limit` further tokens `[1, n]` behind the tokens `held` that the cache has, how many of them
        are real, cache, sampler."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """What one answer should be.

    Attributes:
      max_tokens: most tokens of the answer.
      stop: strings that end it; they are not part of the text.
      stop_token_ids: tokens that end it besides the model's own end tokens.
      ignore_eos: go on past the model's end tokens.
      sampling: how tokens are chosen.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling: Sampling = dataclasses.field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, got {self.max_tokens!r}")
        for token in self.stop_token_ids:
            if not isinstance(token, int) or not 0 <= token <= MAX_TOKEN_ID:
                raise ConfigError(f"stop_token_ids must be in [0, {MAX_TOKEN_ID}], got {token!r}")

    def stop_ids(self, eos_ids: Sequence[int]) -> np.ndarray:
        """The stop tokens as the graphs take them, padded with -1."""
        ids = sorted({*self.stop_token_ids, *(() if self.ignore_eos else eos_ids)})
        if len(ids) > MAX_STOP_IDS:
            raise ConfigError(f"{len(ids)} stop tokens; at most {MAX_STOP_IDS} are supported")
        return np.array(ids + [-1] * (MAX_STOP_IDS - len(ids)), np.int32)


@dataclasses.dataclass
class Session:
    """A conversation's cache. `tokens` are those whose keys and values `cache` holds, as the weights of
    `Decoder.weights_version` made them.

    A graph that is running owns the cache (it is donated), so the session is empty meanwhile, and stays
    so if the graph fails.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    cache: KVCache | None = None
    weights_version: tuple[int, int] | None = None

    def take(self) -> tuple[list[int], KVCache | None]:
        """Gives tokens and cache away."""
        taken = self.tokens, self.cache
        self.tokens, self.cache = [], None
        return taken


@dataclasses.dataclass
class Timings:
    """Of one answer, in milliseconds from when its first piece was asked for."""

    ttft_ms: float = 0.0
    total_ms: float = 0.0

    def tpot_ms(self, tokens: int) -> float:
        """Time per output token after the first."""
        return (self.total_ms - self.ttft_ms) / (tokens - 1) if tokens > 1 else 0.0


class Generation(Iterator[str]):
    """An answer as it comes: iterate for pieces of text, then read the rest.

    A piece is made under the model's lock (`Decoder.lock`), which is free between pieces: answers of several
    threads, or several of one, take turns piece by piece.

    Attributes:
      prompt_tokens: number of tokens of the prompt.
      reused_tokens: how many of them were in the session's cache already.
      tokens: ids of the answer so far, a stop token included.
      sequence: prompt and answer, without what slid out of the window: what the next turn goes on from.
      text: the answer so far.
      finish_reason: "stop" (end token or stop string), "length" (max_tokens or the window), or None
        while running or when closed early.
      stop_string: the stop string that ended it, if one did.
      seed: of the draw; give it in `Sampling` to get the same answer again.
      timings: see `Timings`.
    """

    def __init__(
        self,
        table: Decoder,
        tokenizer: Tokenizer,
        session: Session,
        prompt: Sequence[int],
        config: GenerationConfig,
        seed: int,
        sliding: Sliding | None = None,
        tpot_ms: float | None = None,
    ) -> None:
        _check_prompt(prompt, table)
        _check_sliding(sliding, table)
        self.prompt_tokens = len(prompt)
        self.reused_tokens = 0
        self.tokens: list[int] = []
        self.sequence = list(prompt)
        self.text = ""
        self.finish_reason: Literal["stop", "length"] | None = None
        self.stop_string: str | None = None
        self.seed = seed
        self.timings = Timings()
        self._table, self._session, self._config, self._sliding = table, session, config, sliding
        self._stream = TextStream(tokenizer, config.stop)
        self._stop_ids = config.stop_ids(tokenizer.eos_ids)
        self._sampler = sampler_state(config.sampling, prompt, table.cfg.vocab_size, seed)
        # How many tokens a dispatch should decode.
        self._pace = 1 if tpot_ms is None else pace(tpot_ms)
        self._pieces = self._run()

    def __next__(self) -> str:
        require_not_forked()
        with self._table.lock:
            return next(self._pieces)

    def close(self) -> None:
        """Stops; what was decoded so far stays in the session."""
        require_not_forked()
        with self._table.lock:
            self._pieces.close()

    def result(self) -> "Generation":
        """Runs to the end and returns itself."""
        for _ in self:
            pass
        return self

    # -- the loop -------------------------------------------------------------------------------

    def _run(self) -> Iterator[str]:
        began = time.perf_counter()
        token = self._prefill(list(self.sequence))
        # Reading the token waits for the device: this is the first moment that a user could see it.
        blocks = self._checked([int(np.asarray(token)[0])])
        self.timings.ttft_ms = self._elapsed_ms(began)
        while True:
            piece = self._take(blocks)
            self.timings.total_ms = self._elapsed_ms(began)
            if piece:
                self.text += piece
                yield piece
            if self.finish_reason is None and self._room <= 0 < self._wanted and self._sliding is not None:
                self._slide(self._sliding)
            limit = self._table.decode_limit(self._pace, min(self._wanted, self._room))
            if self.finish_reason is None and limit <= 0:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
            dispatched = time.perf_counter()
            token, blocks = self._decode(token, limit)
            self._checked(blocks)
            self._pace = pace(self._elapsed_ms(dispatched) / len(blocks))
        piece = self._stream.flush()
        self.stop_string = self._stream.matched
        self.timings.total_ms = self._elapsed_ms(began)
        if piece:
            self.text += piece
            yield piece

    def _prefill(self, prompt: list[int]) -> jax.Array:
        """Feeds what the session lacks of the prompt; returns the first token, on the device."""
        session, table = self._session, self._table
        held, cache = session.take()
        if session.weights_version != table.weights_version:
            # Keys and values of other weights are of no use, and another level's have other shapes.
            held, cache, session.weights_version = [], None, table.weights_version
        # The last token is always fed: its logits are what we are after.
        self.reused_tokens = min(common_prefix(held, prompt), len(prompt) - 1)
        if cache is None:
            cache = table.start(len(prompt))
        cache = table.make_room(cache, len(prompt))
        logits, cache = table.prefill(cache, prompt[self.reused_tokens :], self.reused_tokens)
        session.cache, session.tokens = cache, list(prompt)
        token, self._sampler = table.sample(logits, self._sampler)
        return token

    def _decode(self, token: jax.Array, limit: int) -> tuple[jax.Array, list[int]]:
        """Decodes up to `limit` tokens: the last one as the graphs take it, and all of them."""
        session, table = self._session, self._table
        self._require_same_weights()
        pending = self.tokens[-1]
        held, cache = session.take()
        assert cache is not None
        cache = table.make_room(cache, len(held) + limit)
        rows, count, cache, self._sampler = table.decode(
            token, cache, self._sampler, self._stop_ids, limit, held
        )
        block = np.asarray(rows)[0, : int(count)].tolist()
        held += [pending, *block[:-1]]
        session.cache, session.tokens = cache, held
        return np.array(block[-1:], np.int32), block

    def _checked(self, block: list[int]) -> list[int]:
        """A block without `NO_TOKEN`.

        Raises:
          NotFinite: there is one.
        """
        if NO_TOKEN in block:
            # Keys and values may be no numbers, either.
            self._session.take()
            raise NotFinite(
                "the model's logits are not finite numbers, or every token is forbidden: check logit_bias; "
                "else the weights are damaged or overflow, so prepare the model again, or with wider weights"
            )
        return block

    def _slide(self, sliding: Sliding) -> None:
        """Forgets the middle of the sequence, and feeds its newest tokens where they come to stand."""
        session, table, sinks = self._session, self._table, sliding.sink_tokens
        self._require_same_weights()
        if sliding.leaving is not None:
            sliding.leaving()
        kept = slid(self.sequence, sink_tokens=sinks, most=kept_tokens(table.options.context_tokens))
        _, cache = session.take()
        assert cache is not None
        # The last token is not in the cache: decoding feeds it.
        _, cache = table.prefill(cache, kept[sinks:-1], sinks)
        session.cache, session.tokens = cache, kept[:-1]
        self.sequence = kept

    def _require_same_weights(self) -> None:
        if self._session.weights_version != self._table.weights_version:
            raise ContextGone("the model's adapter was changed in the middle of an answer; ask again")

    def _take(self, block: list[int]) -> str:
        """Adds a block to the answer, up to where it stops; returns the new text."""
        # What weights were while the block was computed, nobody knows before.
        self._table.require_usable()
        stops = set(self._stop_ids.tolist())
        visible = next((i for i, token in enumerate(block) if token in stops), len(block))
        piece = self._stream.push(block[:visible])
        if self._stream.stopped:
            self.finish_reason = "stop"
            block = block[: self._stream.consumed_tokens - len(self.tokens)]
        elif visible < len(block):
            self.finish_reason = "stop"
            block = block[: visible + 1]
        self.tokens += block
        self.sequence += block
        # What was decoded behind the stop is not part of the conversation.
        del self._session.tokens[len(self.sequence) :]
        return piece

    @property
    def _wanted(self) -> int:
        """Tokens that the request still asks for."""
        return self._config.max_tokens - len(self.tokens)

    @property
    def _room(self) -> int:
        """Tokens that may still be decoded in the window: the last one need not fit."""
        return self._table.options.context_tokens - len(self.sequence) + 1

    @staticmethod
    def _elapsed_ms(began: float) -> float:
        return 1000 * (time.perf_counter() - began)


def pace(tpot_ms: float) -> int:
    """How many tokens take as long as a user should wait for the next words."""
    return max(1, int(_DISPATCH_MS / max(tpot_ms, 1e-3)))


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first tokens two sequences share."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _check_prompt(prompt: Sequence[int], table: Decoder) -> None:
    window, vocab = table.options.context_tokens, table.cfg.vocab_size
    if not prompt:
        raise ConfigError("the prompt is empty; give it at least one token of text")
    if len(prompt) > window:
        raise ContextOverflow(
            f"the prompt has {len(prompt)} tokens, the context holds {window} (the model's window is "
            f"{table.cfg.window_tokens}); shorten it"
            + (" or ask for a longer --context" if window < table.cfg.window_tokens else "")
        )
    worst = max(prompt) if min(prompt) >= 0 else min(prompt)
    if not 0 <= worst < vocab:
        raise ConfigError(f"token {worst} is outside the model's vocabulary of {vocab}")


def _check_sliding(sliding: Sliding | None, table: Decoder) -> None:
    # Besides those that stay one token must be fed again, and one is decoded from.
    most = kept_tokens(table.options.context_tokens) - 2
    if sliding is not None and not 0 <= sliding.sink_tokens <= most:
        raise ConfigError(
            f"{sliding.sink_tokens} tokens cannot stay where a context of {table.options.context_tokens} "
            f"slides: at most {max(0, most)} may; ask for fewer, or for a longer --context"
        )
