"""The protocol of runners: the calls that answers are made with."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.sampling import SamplerState
from jaxllm.speculative.tree import TokenTree
from serving.runners.verdict import Verdict


class Window(Protocol):
    """The part of an engine's options that an answer needs (see `EngineOptions`)."""

    @property
    def context_tokens(self) -> int:
        """Most tokens of prompt and answer together."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillChunk:
    """One chunk of a prompt, as a step of prefill feeds it.

    Attributes:
      tokens: length of the chunk, padding among it.
      last: whether logits are wanted behind it.
      mode: how its products are computed.
    """

    tokens: int
    last: bool
    mode: Literal["int8", "float"] = "float"


class Runner(Protocol):
    """Runs one level of a model, whose weights lie somewhere. One call at a time: whoever calls holds `lock`.

    A cache is the runner's own business: what `start`, `make_room`, `prefill`, `decode` and `verify` return
    is only ever given back to them, once. It has a `length` and room for `capacity_tokens` positions.

    Attributes:
      lock: of the model: all of its levels and their drafts share it.
      cfg: the model, or the level's sub-model.
      options: resolved options.
      level: in percent; 100 is the whole model.
      weights_version: names the weights that caches belong to.
      streams_weights: whether weights come from storage while it runs, so that drafting meanwhile is free.
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
    def streams_weights(self) -> bool: ...  # noqa: D102

    def require_usable(self) -> None:
        """Raises a JaxllmError where tokens would not be the model's, or never come: its weights were changed
        in place, or this process was forked from the one that opened it."""
        ...

    def start(self, tokens: int) -> Any:
        """An empty cache with room for `tokens` positions."""
        ...

    def make_room(self, cache: Any, tokens: int) -> Any:
        """The cache itself, or a longer one with the same content, so that `tokens` positions fit."""
        ...

    def prefill_chunks(self, tokens: int) -> list[PrefillChunk]:
        """The chunks in which a prompt of so many tokens is fed: they cover it, and the last may be padded; a
        single one where chunks of their own would read weights more than once."""
        ...

    def prefill(self, cache: Any, tokens: Sequence[int], at: int, chunk: PrefillChunk) -> tuple[Any, Any]:
        """Feeds the next chunk of a prompt at position `at`.

        Args:
          cache: donated.
          tokens: at most `chunk.tokens`.
          at: position of the first.
          chunk: one of `prefill_chunks`, in their order.

        Returns:
          Logits `[1, V]` after the last token of the prompt's last chunk, of no use before it; the cache.
        """
        ...

    def sample(self, logits: Any, sampler: SamplerState) -> tuple[Any, SamplerState]:
        """The first token `[1]` of an answer, and the sampler."""
        ...

    def decode_limit(self, pace: int, remaining: int) -> int:
        """The number of tokens that `decode` should be asked for, of `remaining` that are wanted: `pace`
        of them take as long as a user should wait for the next words."""
        ...

    def decode(
        self,
        token: Any,
        cache: Any,
        sampler: SamplerState,
        stop_ids: np.ndarray,
        limit: int,
        held: Sequence[int] = (),
    ) -> tuple[Any, Any, Any, SamplerState]:
        """Up to `limit` further tokens `[1, n]` behind the tokens `held` that the cache has, how many of them
        are real, cache, sampler."""
        ...

    def expect(self, tokens: np.ndarray) -> None:
        """Says what will be read next, `[M]` ids, before it is known where: what must come from storage for
        them may be on its way then."""
        ...

    def verify(
        self,
        tree: TokenTree,
        cache: Any,
        sampler: SamplerState,
        limit: int,
        meanwhile: Callable[[float], bool] | None = None,
    ) -> tuple[Verdict, Any, SamplerState]:
        """Reads a token tree behind the sequence in the cache.

        Args:
          tree: with room for as many nodes as one of `TreeShape.nodes`.
          cache: donated.
          sampler: donated.
          limit: most tokens that the verdict may say.
          meanwhile: called with the seconds until weights come, for other work; tells whether it did any.

        Returns:
          The verdict, the cache with the accepted path behind its sequence, and the sampler behind that.
        """
        ...


class ContextRunner(Protocol):
    """Takes chunks of contexts out of caches, and brings them back into others (see `serving.contexts`)."""

    def load_chunks(self, cache: Any, sources: Any, bits: np.ndarray) -> Any:
        """A cache with stored chunks in it, in one dispatch.

        Args:
          cache: donated.
          sources, bits: see `jaxllm.steps.layers.load_cache`.
        """
        ...

    def encode_chunks(self, cache: Any, layer: int, bits: int, numbers: Sequence[int]) -> Any:
        """Chunks of one layer of a cache as bytes, one after the other.

        Args:
          cache: stays as it is.
          layer: its index.
          bits: width of the chunks.
          numbers: of the chunks, at most `ENCODED_CHUNKS`; behind theirs come bytes of no use.
        """
        ...

    def begin_layers(self, tokens: np.ndarray, at: Any) -> Any:
        """What the first layer takes, `[1, T, D]`, of the tokens `[T]` of whole chunks; these go through
        `restore_layer` of all layers then, one after another."""
        ...

    def restore_layer(
        self, layer: int, x: Any, at: Any, past: Any, source: np.ndarray, bits: np.ndarray
    ) -> tuple[Any, Any]:
        """One layer of a context: stored chunks in its cache, other chunks computed (see
        `jaxllm.steps.layers.restore_layer`).

        Args:
          layer: its index.
          x: its input; donated.
          at: where the tokens of computed chunks stand.
          past: its keys and values; donated.
          source, bits: of stored chunks.

        Returns:
          The next layer's input, and this layer's keys and values.
        """
        ...


def prefill_prompt(runner: Runner, cache: Any, tokens: Sequence[int], at: int) -> tuple[Any, Any]:
    """Feeds a whole prompt at position `at`: logits `[1, V]` after the last token, cache."""
    return prefill_in_chunks(runner, cache, tokens, at, runner.prefill_chunks(len(tokens)))


def prefill_in_chunks(
    runner: Runner, cache: Any, tokens: Sequence[int], at: int, chunks: Sequence[PrefillChunk]
) -> tuple[Any, Any]:
    """`prefill_prompt` in chunks that cover the prompt."""
    logits, fed = None, 0
    for chunk in chunks:
        logits, cache = runner.prefill(cache, tokens[fed : fed + chunk.tokens], at + fed, chunk)
        fed += chunk.tokens
    return logits, cache
