"""Defines the protocol of runners: start a cache, prefill, decode, verify."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.sampling_state import SamplerState
from jaxllm.serving.runners.verdict import Verdict
from jaxllm.speculation.token_tree import TokenTree

PrefillMode = Literal["int8", "float"]


class Window(Protocol):
    """The part of `EngineOptions` that every runner has."""

    @property
    def context_tokens(self) -> int:
        """Maximum number of tokens of prompt and answer together."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillChunk:
    """One chunk of a prompt, the unit of a prefill step.

    Attributes:
      tokens: length of the chunk, padding included.
      last: whether logits after it are wanted.
      mode: arithmetic of its products.
    """

    tokens: int
    last: bool
    mode: PrefillMode = "float"


def chunks_of(lengths: Sequence[int], mode: PrefillMode = "float") -> list[PrefillChunk]:
    """The chunks of a prompt, of these lengths."""
    last = len(lengths) - 1
    return [
        PrefillChunk(tokens=tokens, last=number == last, mode=mode) for number, tokens in enumerate(lengths)
    ]


class Runner(Protocol):
    """Runs one level of a model. One call at a time: the caller acquires `lock`.

    A cache is opaque to the caller: a cache returned by `start`, `make_room`, `prefill`, `decode` or
    `verify` is passed to one of them once. It has a `length` and room for `capacity_tokens` positions.

    Attributes:
      lock: lock of the model, shared by all of its levels and their drafters.
      cfg: config of the model or the level's sub-model.
      options: resolved options of the engine.
      level: level in percent; 100 is the whole model.
      weights_version: identifies the weights that computed a cache.
      idle_read_s: time by which a verification can start later without ending later, because it is bound by
        storage, which reads its weights meanwhile.
      batch: batched decoding; None if answers are not batched.
    """

    @property
    def lock(self) -> threading.RLock: ...  # noqa: D102

    @property
    def cfg(self) -> ModelConfig: ...  # noqa: D102

    @property
    def options(self) -> Window: ...  # noqa: D102

    @property
    def level(self) -> int: ...  # noqa: D102

    @property
    def weights_version(self) -> tuple[int, int]: ...  # noqa: D102

    @property
    def idle_read_s(self) -> float: ...  # noqa: D102

    @property
    def batch(self) -> "BatchRunner | None": ...  # noqa: D102

    def require_usable(self) -> None:
        """Raises a JaxllmError if the model's file was changed in place, or if this process was forked from
        the one that opened it."""
        ...

    def start(self, tokens: int) -> Any:
        """An empty cache with room for `tokens` positions."""
        ...

    def make_room(self, cache: Any, tokens: int) -> Any:
        """Returns the cache, or a longer one with the same content, with room for `tokens` positions."""
        ...

    def read_source(self, cache: Any, tokens: Sequence[int]) -> Any:
        """Encodes a source, and puts its keys and values into an empty cache.

        Args:
          cache: cache; donated.
          tokens: at most as many as fit the encoder's window and the context.

        Raises:
          ConfigError: the model has no encoder.
        """
        ...

    def prefill_chunks(self, tokens: int) -> list[PrefillChunk]:
        """The chunks of a prompt of `tokens` tokens: they cover it, and the last may be padded. A single one
        if several would read the weights more than once."""
        ...

    def prefill(self, cache: Any, tokens: Sequence[int], at: int, chunk: PrefillChunk) -> tuple[Any, Any]:
        """Prefills the next chunk of a prompt at position `at`.

        Args:
          cache: cache; donated.
          tokens: at most `chunk.tokens` tokens.
          at: position of the first token.
          chunk: one of `prefill_chunks`, in their order.

        Returns:
          Logits `[1, V]` after the last token if the chunk is the last, else undefined; and the cache.
        """
        ...

    def chunks_in(self, mode: PrefillMode, tokens: int) -> list[PrefillChunk]:
        """`prefill_chunks` in a given mode."""
        ...

    def prefill_rows(
        self, cache: Any, tokens: Sequence[int], at: int, chunk: PrefillChunk, rows: Any
    ) -> tuple[Any, Any]:
        """`prefill` of a chunk of `chunks_in("float", ...)` of a prompt with embeddings `rows`, a
        `jaxllm.serving.ground.prompt_rows.PromptRows`, in place of some tokens.

        Raises:
          ConfigError: the weights are not resident.
        """
        ...

    def sample(self, logits: Any, sampler: SamplerState) -> tuple[Any, SamplerState]:
        """Draws the first token `[1]` of an answer; and the sampler's next state."""
        ...

    def decode_limit(self, pace: int, remaining: int) -> int:
        """The `limit` of the next `decode`, of `remaining` wanted tokens: `pace` tokens fit the time of a
        dispatch."""
        ...

    def decode(
        self,
        token: Any,
        cache: Any,
        sampler: SamplerState,
        stop_ids: np.ndarray,
        limit: int,
        cached: Sequence[int] = (),
    ) -> tuple[Any, Any, Any, SamplerState]:
        """Decodes up to `limit` tokens.

        Args:
          token: `[1]`, the last token of the sequence, which the cache does not have yet.
          cache: cache; donated.
          sampler: sampler state; donated.
          stop_ids: `[MAX_STOP_IDS]` int32, padded with -1; decoding ends after one of them.
          limit: maximum number of tokens.
          cached: the tokens in the cache.

        Returns:
          Tokens `[1, n]` int32, the number of valid ones, the cache, and the sampler.
        """
        ...

    def expect(self, tokens: np.ndarray) -> None:
        """Announces the tokens `[M]` of the next pass, so that the runner can prefetch weights for them."""
        ...

    def verify(
        self,
        tree: TokenTree,
        cache: Any,
        sampler: SamplerState,
        limit: int,
        meanwhile: Callable[[float], bool] | None = None,
    ) -> tuple[Verdict, Any, SamplerState]:
        """Verifies a token tree after the sequence in the cache.

        Args:
          tree: token tree whose capacity is one of `TreeShape.nodes`.
          cache: cache; donated.
          sampler: sampler state; donated.
          limit: maximum number of tokens of the verdict.
          meanwhile: callback for the seconds until weights are loaded; does other work and returns whether
            it did any.

        Returns:
          The verdict, the cache with the accepted path at the end of its sequence, and the sampler after the
          path.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchRow:
    """The inputs of `Runner.decode` for one of several answers.

    Attributes:
      token, cache, sampler, stop_ids, limit: see `Runner.decode`.
      units: numbers of kv groups and neurons of each layer of its level, `[L, 2]` int32; None for those of
        the runner that decodes the batch.
    """

    token: Any
    cache: Any
    sampler: SamplerState
    stop_ids: np.ndarray
    limit: int
    units: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class DecodedRow:
    """The outputs of a batch for one of its answers, bitwise equal to those of unbatched decoding.

    Attributes:
      tokens: at least one token.
      cache, sampler: state after them (see `Runner.decode`).
      accepted: number of accepted draft tokens at their beginning; None if no drafts were verified.
    """

    tokens: list[int]
    cache: Any
    sampler: SamplerState
    accepted: int | None = None


class BatchRunner(Protocol):
    """Batched decoding of several answers, which reads the weights once for all of them.

    Attributes:
      family: runners of the same family can share a batch, decoded by any of them: levels that share
        weights, else one level.
      units: numbers of units of its level (see `BatchRow`).
    """

    @property
    def family(self) -> object: ...  # noqa: D102

    @property
    def units(self) -> np.ndarray | None: ...  # noqa: D102

    def decode_batch(self, rows: Sequence[BatchRow]) -> list[DecodedRow]:
        """Decodes up to each row's limit in one dispatch, in the order of `rows`. Their caches and samplers
        are donated. If no bucket has enough rows, there are several dispatches."""
        ...


class ContextRunner(Protocol):
    """Encodes chunks of caches for storage, and restores them into other caches (see
    `jaxllm.serving.contexts`)."""

    def load_chunks(self, cache: Any, sources: Any, bits: np.ndarray) -> Any:
        """Loads stored chunks into a cache, in one dispatch.

        Args:
          cache: donated.
          sources, bits: see `jaxllm.steps.layers.load_cache`.
        """
        ...

    def encode_chunks(self, cache: Any, layer: int, bits: int, numbers: Sequence[int]) -> Any:
        """Encodes chunks of one layer of a cache as consecutive bytes.

        Args:
          cache: cache; unchanged.
          layer: index of the layer.
          bits: bit width of the chunks.
          numbers: numbers of the chunks, at most `ENCODED_CHUNKS`; the bytes after theirs are undefined.
        """
        ...

    def begin_layers(self, tokens: np.ndarray, at: Any) -> Any:
        """The first layer's input `[1, T, D]` for the tokens `[T]` of recomputed chunks, which then run
        through `restore_layer` of each layer in turn."""
        ...

    def restore_layer(self, layer: int, x: Any, at: Any, past: Any, chunks: Any) -> tuple[Any, Any]:
        """Restores one layer of a context: loads its stored chunks and recomputes others (see
        `jaxllm.steps.layers.restore_layer`).

        Args:
          layer: its index.
          x: its input for the recomputed chunks, `[1, T, D]`; donated.
          at: positions of their tokens.
          past: its keys and values; donated.
          chunks: the stored ones, `jaxllm.kv.chunks.LayerChunks`.

        Returns:
          The next layer's input, and this layer's keys and values.
        """
        ...


def prefill_prompt(runner: Runner, cache: Any, tokens: Sequence[int], at: int) -> tuple[Any, Any]:
    """Prefills a whole prompt at position `at`: logits `[1, V]` after the last token, and the cache."""
    return prefill_in_chunks(runner, cache, tokens, at, runner.prefill_chunks(len(tokens)))


def prefill_in_chunks(
    runner: Runner, cache: Any, tokens: Sequence[int], at: int, chunks: Sequence[PrefillChunk]
) -> tuple[Any, Any]:
    """`prefill_prompt` in given chunks, which cover the prompt."""
    logits, fed = None, 0
    for chunk in chunks:
        logits, cache = runner.prefill(cache, tokens[fed : fed + chunk.tokens], at + fed, chunk)
        fed += chunk.tokens
    return logits, cache
