"""Defines the base of runners: start a cache, prefill, decode, verify."""

import abc
import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.sampling_state import SamplerState

if TYPE_CHECKING:
    from jaxllm.kv.cache import TokenPositions
    from jaxllm.serving.buckets.guided import Guide
    from jaxllm.speculation.token_tree import TokenTree

PrefillMode = Literal["int8", "float"]
# Fixed cost of a chunk, in tokens of prefill: on a CPU each chunk reads all weights once, which costs about
# as much as computing this many rows.
_PASS_TOKENS = 24


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


class Verdict(NamedTuple):
    """The accepted tokens of a token tree, and the target's next token after them.

    Attributes:
      tokens: `[n]` int32, the next tokens of the answer, at least one; the last is sampled from the target.
      path: `[n]` int32, the accepted nodes from the root on; `tokens[i]` follows `path[i]`.
    """

    tokens: np.ndarray
    path: np.ndarray

    @classmethod
    def of(cls, tokens: Any, count: Any, path: Any) -> Self:
        """The first `count` tokens and nodes of a bucket's results."""
        n = int(count)
        return cls(np.asarray(tokens)[:n], np.asarray(path)[:n])


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchRow:
    """The inputs of `Runner.decode`, or of one of the answers of a batch.

    Attributes:
      token: `[1]`, the last token of the sequence, which the cache does not have yet.
      cache, sampler: cache and sampler state; donated.
      stop_ids: `[MAX_STOP_IDS]` int32, padded with -1; decoding ends after one of them.
      limit: maximum number of tokens.
      units: numbers of kv groups and neurons of each layer of its level, `[L, 2]` int32; None for those of
        the runner that decodes the batch.
      guide: what to ask for masks between tokens (see `Runner.can_guide`); None for none.
    """

    token: Any
    cache: Any
    sampler: SamplerState
    stop_ids: np.ndarray
    limit: int
    units: np.ndarray | None = None
    guide: "Guide | None" = None


@dataclasses.dataclass(frozen=True)
class DecodedRow:
    """The outputs of `Runner.decode`; those of a batch are bitwise equal to those of unbatched decoding.

    Attributes:
      tokens: at least one token.
      cache, sampler: state after them.
      accepted: number of accepted draft tokens at their beginning; None if no drafts were verified.
      followed: number of tokens that the guide allows; the others share the mask of the next.
      asked: whether it was asked about these, and the reply not read.
    """

    tokens: list[int]
    cache: Any
    sampler: SamplerState
    accepted: int | None = None
    followed: int = 0
    asked: bool = False


class Runner(abc.ABC):
    """Runs one level of a model. One call at a time: the caller acquires `lock`.

    A cache is opaque to the caller: a cache returned by `start`, `make_room`, `prefill`, `decode` or
    `verify` is passed to one of them once. It has a `length` and room for `capacity_tokens` positions.

    Attributes:
      lock: lock of the model, shared by all of its levels and their drafters.
      cfg: config of the model or the level's sub-model.
      options: resolved options of the engine; every runner has `context_tokens`, the maximum number of tokens
        of prompt and answer together.
      level: level in percent; 100 is the whole model.
      batch: batched decoding, a `jaxllm.serving.runners.batch.Batch`; None if answers are not batched, as
        with streamed weights: buckets of single layers and experts have a batch of one.
    """

    lock: threading.RLock
    cfg: ModelConfig
    options: Any
    level: int
    batch: Any = None
    # Why prompts cannot have embeddings in place of tokens.
    _no_rows: ClassVar[str] = "prompt embeddings require resident weights; raise --memory"

    @property
    @abc.abstractmethod
    def weights_version(self) -> tuple[int, int]:
        """Identifies the weights that computed a cache."""

    @property
    def idle_read_s(self) -> float:
        """Time by which a verification can start later without ending later, because it is bound by storage,
        which reads its weights meanwhile; 0 without read-ahead."""
        return 0.0

    @abc.abstractmethod
    def require_usable(self) -> None:
        """Raises a JaxllmError if the model's file was changed in place, or if this process was forked from
        the one that opened it."""

    @abc.abstractmethod
    def start(self, tokens: int) -> Any:
        """An empty cache with room for `tokens` positions."""

    @abc.abstractmethod
    def make_room(self, cache: Any, tokens: int) -> Any:
        """Returns the cache, or a longer one with the same content, with room for `tokens` positions."""

    def read_source(self, cache: Any, tokens: Sequence[int]) -> Any:
        """Encodes a source, and puts its keys and values into an empty cache.

        Args:
          cache: cache; donated.
          tokens: at most as many as fit the encoder's window and the context.

        Raises:
          ConfigError: the model has no encoder.
        """
        raise ConfigError(f"{self.cfg.model_type} has no encoder to read a source")

    @abc.abstractmethod
    def prefill_chunks(self, tokens: int) -> list[PrefillChunk]:
        """The chunks of a prompt of `tokens` tokens: they cover it, and the last may be padded. A single one
        if several would read the weights more than once."""

    @abc.abstractmethod
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

    def chunks_in(self, mode: PrefillMode, tokens: int) -> list[PrefillChunk]:
        """`prefill_chunks` in a given mode."""
        del mode
        return self.prefill_chunks(tokens)

    def prefill_embeddings(
        self, cache: Any, tokens: Sequence[int], at: int, chunk: PrefillChunk, rows: Any
    ) -> tuple[Any, Any]:
        """`prefill` of a chunk of `chunks_in("float", ...)` of a prompt with embeddings `rows`, a
        `jaxllm.serving.ground.prompt_embeddings.PromptEmbeddings`, in place of some tokens.

        Raises:
          ConfigError: the weights are not resident.
        """
        raise ConfigError(self._no_rows)

    @abc.abstractmethod
    def sample(self, logits: Any, sampler: SamplerState) -> tuple[Any, SamplerState]:
        """Samples the first token `[1]` of an answer; and the sampler's next state."""

    @abc.abstractmethod
    def decode_limit(self, pace: int, remaining: int) -> int:
        """The `limit` of the next `decode`, of `remaining` wanted tokens: `pace` tokens fit the time of a
        dispatch."""

    @abc.abstractmethod
    def decode(self, row: BatchRow) -> DecodedRow:
        """Decodes up to `row.limit` tokens."""

    def can_guide(self, cache: Any) -> bool:
        """Whether `decode` can ask for masks between the tokens that follow a cache; if it could be, what is
        missing is loaded in the background."""
        del cache
        return False

    def expect(self, tokens: np.ndarray) -> None:
        """Announces the tokens `[M]` of the next pass, so that the runner can prefetch weights for them."""
        del tokens

    @abc.abstractmethod
    def verify(
        self,
        tree: "TokenTree",
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
            it did any. Never called if all weights are resident.

        Returns:
          The verdict, the cache with the accepted path at the end of its sequence, and the sampler after the
          path.
        """


def prefill_prompt(
    runner: Runner,
    cache: Any,
    tokens: Sequence[int],
    at: int,
    chunks: Sequence[PrefillChunk] | None = None,
) -> tuple[Any, Any]:
    """Prefills a whole prompt at position `at`, in `chunks` that cover it (default: the runner's own): logits
    `[1, V]` after the last token, and the cache."""
    logits, fed = None, 0
    for chunk in runner.prefill_chunks(len(tokens)) if chunks is None else chunks:
        logits, cache = runner.prefill(cache, tokens[fed : fed + chunk.tokens], at + fed, chunk)
        fed += chunk.tokens
    return logits, cache


def plan_chunks(tokens: int, lengths: Sequence[int]) -> list[int]:
    """Chunk lengths that cover `tokens` at minimum cost (see `prompt_cost`); only the last is padded."""
    longest = max(lengths)
    # All but a tail shorter than two longest chunks is split into longest chunks.
    head = max(0, (tokens - longest) // longest)
    return [longest] * head + list(_cheapest(tokens - head * longest, tuple(sorted(lengths))))


def padded(tokens: Sequence[int], length: int) -> tuple[np.ndarray, int]:
    """A `[1, length]` int32 row of `tokens`, padded with zeros, and the number of tokens."""
    row = np.zeros((1, length), np.int32)
    row[0, : len(tokens)] = tokens
    return row, len(tokens)


def placed_chunks(
    tokens: Sequence[int], lengths: Sequence[int], at: int
) -> "list[tuple[np.ndarray, TokenPositions]]":
    """Tokens that begin at position `at`, in chunks of `lengths`: rows `[T]` int32, padded, and their
    positions."""
    # Imported here: devices that only run exported programs have no JAX.
    from jaxllm.kv.cache import TokenPositions

    found, position = [], 0
    for length in lengths:
        row, valid = padded(tokens[position : position + length], length)
        positions = np.arange(at + position, at + position + length, dtype=np.int32)
        found.append((row[0], TokenPositions(positions, np.int32(valid), consecutive=True)))  # pyright: ignore
        position += valid
    return found


def prompt_cost(tokens: int, lengths: Sequence[int], *, exact: bool) -> int:
    """The cost of prefilling `tokens` in chunks, in tokens: their tokens, padding included unless chunks are
    `exact`, and a constant per chunk for the read of the weights."""
    plan = plan_chunks(tokens, lengths)
    return (tokens if exact else sum(plan)) + _PASS_TOKENS * len(plan)


@functools.lru_cache(maxsize=4096)
def _cheapest(tokens: int, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Descending chunk lengths of minimum cost for a tail of `tokens`."""
    plans = [
        (length, *(_cheapest(tokens - length, lengths[: place + 1]) if tokens > length else ()))
        for place, length in enumerate(lengths)
    ]
    return min(plans, key=lambda plan: sum(plan) + _PASS_TOKENS * len(plan))
