"""Scores text by a resident model: log-probabilities, most likely tokens, visited experts; embeds it."""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.errors import ConfigError, ContextOverflow, NotFinite
from jaxllm.kv.cache import KVCache
from jaxllm.models.features import require_decoder_alone, require_feature
from jaxllm.nn.documents import Branches
from jaxllm.serving.buckets.bucket import SCALAR, Bucket, ChunkBucket, ModelShapes, TokensBucket, ids
from jaxllm.serving.buckets.model import StartBucket
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.runners.level_runner import LevelRunner
from jaxllm.serving.runners.runner import padded, plan_chunks
from jaxllm.steps.branching import Packed, target_room
from jaxllm.steps.model import (
    ScoredChunk,
    ScoredTokens,
    embed_chunk,
    route_documents,
    score_branches,
    score_chunk,
)

# Maximum number of likeliest tokens next to each token of a text, as in OpenAI's interface.
MAX_TOP = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreBucket(ChunkBucket):
    """Scores one chunk of a text after a cache (see `steps.model.score_chunk`).

    Attributes:
      top: number of likeliest tokens.
    """

    top: int = 1

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, row, targets, valid, cache) -> scores, cache."""
        row, cache = ids(1, self.tokens), model.cache(self.cache_tokens)
        step = functools.partial(score_chunk, top=self.top)
        return model.lowered(step, row, row, SCALAR, cache, donated=(4,))


class EmbedTextBucket(ChunkBucket):
    """Sums the hidden states of one chunk of a text after a cache (see `steps.model.embed_chunk`)."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, row, valid, cache) -> sum, cache."""
        row, cache = ids(1, self.tokens), model.cache(self.cache_tokens)
        return model.lowered(embed_chunk, row, SCALAR, cache, donated=(3,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingBucket(TokensBucket):
    """Computes the experts that the tokens of packed documents visit (see `steps.model.route_documents`).

    Attributes:
      rows: number of rows per dispatch (B).
    """

    rows: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, tokens, starts) -> ids of experts."""
        rows = ids(self.rows, self.tokens)
        return model.lowered(route_documents, rows, rows)


class BranchesBucket(RoutingBucket):
    """Scores tokens of packed documents with many ends (see `steps.model.score_branches`)."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, tokens, starts, branches, scored) -> log-probabilities, whether each is the likeliest."""
        rows: Any = ids(self.rows, self.tokens)
        flat: Any = ids(target_room(self.rows, self.tokens))
        count: Any = SCALAR
        scored = ScoredTokens(flat, flat, count)
        return model.lowered(score_branches, rows, rows, Branches(rows, rows), scored)


class Scorer:
    """Scores text with one level of a model."""

    def __init__(self, runner: LevelRunner) -> None:
        """See the class.

        Raises:
          ConfigError: the level's weights are not resident, or the model has an encoder.
        """
        if not runner.resident:
            raise ConfigError("scoring or embedding text requires resident weights; raise --memory")
        require_decoder_alone(runner.cfg, "scoring or embedding text")
        self.runner = runner

    # -- preparing --------------------------------------------------------------------------------

    def prepare(self, window_tokens: int, progress: Progress | None = None) -> None:
        """Prepares the buckets that score text in windows of `window_tokens` tokens."""
        runner = self.runner
        cache = next(each for each in runner.options.cache_tokens if each >= window_tokens)
        start = runner.model.bucket(StartBucket, cache_tokens=cache)
        runner.fill([start, self._score_bucket(cache)], progress)

    def prepare_ends(self, cache: int, progress: Progress | None = None) -> None:
        """Prepares the buckets that prefill a prompt and score its ends in a cache of length `cache`."""
        ends = [self._score_bucket(cache, chunk) for chunk in self.runner.options.chunk_tokens]
        self.runner.fill([*self.runner.buckets_for(), *ends], progress)

    def prepare_branches(self, lengths: Iterable[int], progress: Progress | None = None) -> dict[int, int]:
        """Prepares the buckets that score packed documents: length of a row -> number of rows per
        dispatch."""
        buckets = {length: self._branches_bucket(length) for length in lengths}
        self.runner.fill(buckets.values(), progress)
        return {length: bucket.rows for length, bucket in buckets.items()}

    def prepare_routing(self, tokens: int, progress: Progress | None = None) -> None:
        """Prepares the bucket that computes the experts visited by a row of `tokens` tokens."""
        self.runner.fill([self._routing_bucket(1, tokens)], progress)

    def embedding_buckets(self) -> list[Bucket]:
        """The buckets that embed texts of all lengths: caches have the longest length, so that there is one
        for each length of a chunk."""
        return _embedding_buckets(self.runner, self.runner.options.chunk_tokens)

    # -- scoring ----------------------------------------------------------------------------------

    def score(
        self, tokens: Sequence[int], targets: Sequence[int], cache: KVCache | None = None
    ) -> np.ndarray:
        """Natural log-probability of each target (see `predict`)."""
        return self.predict(tokens, targets, cache)[0]

    def predict(
        self, tokens: Sequence[int], targets: Sequence[int], cache: KVCache | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scores targets, each after its token and all tokens before it.

        Args:
          tokens, targets: ids of equal length T.
          cache: cache of the preceding tokens; donated. None for an empty one.

        Returns:
          The natural log-probability `[T]` float32 of each target, and the most likely token after each
          token, `[T]` int32.
        """
        options, buckets = self.runner.options, self.runner.buckets
        chunk = options.chunk_tokens[-1]
        # Not the shortest compiled cache: other requests may have compiled shorter ones without scoring.
        capacity = min(
            (
                length
                for length in options.cache_tokens
                if length >= len(tokens) and buckets.is_ready(self._score_bucket(length))
            ),
            default=options.context_tokens,
        )
        if cache is None:
            cache = self.runner.empty_cache(capacity)
        scores, best, _ = self._scored(tokens, targets, cache, [chunk] * -(-len(tokens) // chunk))
        return scores, best

    def score_end(
        self, tokens: Sequence[int], targets: Sequence[int], cache: KVCache
    ) -> tuple[np.ndarray, np.ndarray, KVCache]:
        """`predict` of one of several ends of the text in `cache`, and the cache for the next end.

        `cache` is donated; the result differs from it only in the attention mass.
        """
        require_feature(self.runner.cfg, "tasks")
        length = int(cache.length)
        chunks = plan_chunks(len(tokens), self.runner.options.chunk_tokens)
        scores, best, cache = self._scored(tokens, targets, cache, chunks)
        # Rows after the length of a cache are never attended to.
        return scores, best, dataclasses.replace(cache, length=np.int32(length))  # pyright: ignore

    def embedding(self, tokens: Sequence[int]) -> "Embedding":
        """The embedding of a text, chunk by chunk.

        Raises:
          ConfigError: the text is empty, or longer than the window.
        """
        return Embedding(self.runner, tokens)

    def scoring(
        self, tokens: Sequence[int], ends: Sequence[Sequence[int]] = (), *, top: int = MAX_TOP
    ) -> "Scoring":
        """The scores of a text and of its ends, chunk by chunk (see `Scoring`)."""
        return Scoring(self.runner, tokens, ends, top=top)

    def scoring_buckets(self, *, top: int = MAX_TOP) -> list[Bucket]:
        """The buckets of `scoring`; caches have the longest length, as for embeddings."""
        return _scoring_buckets(self.runner, self.runner.options.chunk_tokens, top)

    def score_branches(self, packed: Packed) -> tuple[np.ndarray, np.ndarray]:
        """Natural log-probability of each of `packed`'s targets, `[count]` float32, and whether no other
        token is likelier, `[count]` bool."""
        rows, length = packed.tokens.shape
        compiled = self.runner.buckets.get(self._branches_bucket(length, rows))
        branches = Branches(trunk_ends=packed.trunk_ends, starts=packed.branch_starts)  # pyright: ignore
        out = compiled(self.runner.params, packed.tokens, packed.starts, branches, packed.scored)
        scores, likeliest = (np.asarray(each)[: packed.count] for each in out)
        return scores, likeliest

    def route(self, tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """The experts `[L_sparse, B, T, k]` that tokens `[B, T]` of packed documents visit."""
        compiled = self.runner.buckets.get(self._routing_bucket(*tokens.shape))
        return np.asarray(compiled(self.runner.params, tokens, starts))

    def _scored(
        self, tokens: Sequence[int], targets: Sequence[int], cache: KVCache, chunks: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, KVCache]:
        """`predict` in chunks of these lengths, and the cache after the tokens."""
        scores, best, at = [], [], 0
        for chunk in chunks:
            compiled = self.runner.buckets.get(self._score_bucket(cache.capacity_tokens, chunk))
            row, valid = padded(tokens[at : at + chunk], chunk)
            goal, _ = padded(targets[at : at + chunk], chunk)
            out, cache = compiled(self.runner.params, row, goal, np.int32(valid), cache)
            scores.append(np.asarray(out.logprobs)[0, :valid])
            best.append(np.asarray(out.top_ids)[0, :valid, 0])
            at += valid
        return np.concatenate(scores), np.concatenate(best), cache

    # -- buckets ----------------------------------------------------------------------------------

    def _score_bucket(self, cache: int, chunk: int | None = None) -> ScoreBucket:
        tokens = chunk or self.runner.options.chunk_tokens[-1]
        return self.runner.model.bucket(ScoreBucket, tokens=tokens, cache_tokens=cache)

    def _branches_bucket(self, tokens: int, rows: int | None = None) -> BranchesBucket:
        rows = rows or max(1, self.runner.options.score_tokens // tokens)
        return self.runner.model.bucket(BranchesBucket, rows=rows, tokens=tokens)

    def _routing_bucket(self, rows: int, tokens: int) -> RoutingBucket:
        return self.runner.model.bucket(RoutingBucket, rows=rows, tokens=tokens)


class Embedding:
    """The embedding of one text: the mean of the last layer's hidden states, after the final norm, over its
    tokens, normalized. Decoders attend to earlier tokens only, and the embedding is only as good as the model
    was trained for.

    Attributes:
      vector: `[D]` float32; None until `step` has returned False.
    """

    def __init__(self, runner: LevelRunner, tokens: Sequence[int]) -> None:
        """Splits a text into chunks.

        Args:
          runner: runner of the level, with resident weights.
          tokens: tokens of the text, at least one and at most the window.

        Raises:
          ConfigError: the text is empty or too long.
        """
        options = runner.options
        if not 0 < len(tokens) <= options.context_tokens:
            raise ConfigError(
                f"a text to embed must have 1 to {options.context_tokens} tokens, got {len(tokens)}"
            )
        self.vector: np.ndarray | None = None
        self._runner, self._rest = runner, tokens
        self._lengths = collections.deque(plan_chunks(len(tokens), options.chunk_tokens))
        self._sum: np.ndarray | None = None
        self._cache: KVCache | None = None

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets that its next steps need."""
        return _embedding_buckets(self._runner, sorted({*self._lengths}))

    def step(self) -> bool:
        """Computes the next chunk; a bucket that was not filled (see `Scorer.embedding_buckets`) is loaded
        from disk or compiled first.

        Returns:
          Whether there is more to do.

        Raises:
          NotFinite: the hidden states are not finite numbers.
        """
        runner, length = self._runner, self._lengths[0]
        needed = _embedding_buckets(runner, [length])
        runner.fill(needed)
        with runner.lock:
            start, compiled = map(runner.buckets.get, needed)
            row, valid = padded(self._rest[:length], length)
            cache = start() if self._cache is None else self._cache
            found, self._cache = compiled(runner.params, row, np.int32(valid), cache)
        total = np.asarray(found)[0] if self._sum is None else self._sum + np.asarray(found)[0]
        self._sum, self._rest = total, self._rest[length:]
        self._lengths.popleft()
        if self._lengths:
            return True
        self._cache = None
        norm = float(np.linalg.norm(total.astype(np.float64)))
        if not np.isfinite(norm) or not norm:
            raise NotFinite("the hidden states of a text are not finite numbers: prepare the model again")
        self.vector = (total / norm).astype(np.float32)
        return False


class Scoring:
    """The scores of one text's tokens, and of the tokens of ends that follow it, computed chunk by chunk.

    The text is fed once for all ends. Of each chunk only the scores leave the device: logits of a whole text
    are never in memory.

    Attributes:
      tokens: tokens of the text that are in the cache: all but the last.
      scores: scores of the text after its first token, then of each end, with a batch of one row and `[1, T]`
        positions; complete when `step` has returned False.
      cache: cache of `tokens`; None if there are none, or while they are computed.
    """

    def __init__(
        self, runner: LevelRunner, tokens: Sequence[int], ends: Sequence[Sequence[int]] = (), *, top: int
    ) -> None:
        """Plans the chunks.

        Args:
          runner: runner of the level, with resident weights.
          tokens: the text, at least one token; with all but the last token of an end at most the window.
          ends: its possible continuations, each scored after the text alone.
          top: number of likeliest tokens (K), at most the vocabulary.

        Raises:
          ConfigError: the text is empty, or the model cannot feed several ends after one text.
          ContextOverflow: a text with its end is too long.
        """
        window, longest = runner.options.context_tokens, max(map(len, ends), default=1)
        if not tokens or not all(ends):
            raise ConfigError("a text to score and its ends must have at least one token each")
        if (fed := len(tokens) + longest - 1) > window:
            raise ContextOverflow(
                f"the text to score has {fed} tokens, the context holds {window}; shorten it"
            )
        if ends:
            require_feature(runner.cfg, "tasks")
        self.tokens, self.scores = tuple(tokens[:-1]), list[ScoredChunk]()
        self.cache: KVCache | None = None
        self._runner, self._top = runner, min(top, runner.cfg.vocab_size)
        self._parts = [(tokens[:-1], tokens[1:]), *(([tokens[-1], *each[:-1]], each) for each in ends)]
        self._steps = self._chunks()

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets that it needs: filled before the first step, none is loaded or compiled in it."""
        lengths = self._runner.options.chunk_tokens
        chunks = {chunk for tokens, _ in self._parts if tokens for chunk in plan_chunks(len(tokens), lengths)}
        return _scoring_buckets(self._runner, sorted(chunks), self._top)

    def step(self) -> bool:
        """Computes the next chunk; returns whether there is more to do.

        Raises:
          NotFinite: log-probabilities are not numbers.
        """
        return next(self._steps, None) is not None

    def _chunks(self) -> Iterator[bool]:
        runner, done = self._runner, 0
        total = sum(len(tokens) for tokens, _ in self._parts)
        for tokens, targets in self._parts:
            found, at = list[ScoredChunk](), 0
            for chunk in plan_chunks(len(tokens), runner.options.chunk_tokens) if tokens else ():
                row, valid = padded(tokens[at : at + chunk], chunk)
                goal, _ = padded(targets[at : at + chunk], chunk)
                buckets = _scoring_buckets(runner, [chunk], self._top)
                runner.fill(buckets)
                with runner.lock:
                    start, compiled = map(runner.buckets.get, buckets)
                    cache = start() if self.cache is None else self.cache
                    # The bucket takes it.
                    self.cache = None
                    out, self.cache = compiled(runner.params, row, goal, np.int32(valid), cache)
                found.append(jax.tree.map(lambda each, valid=valid: np.asarray(each)[:, :valid], out))
                if np.isnan(found[-1].logprobs).any():
                    raise NotFinite(
                        "the log-probabilities of a text are not finite numbers: prepare the model again"
                    )
                at, done = at + valid, done + valid
                if done < total:
                    yield True
            self.scores.append(
                jax.tree.map(lambda *each: np.concatenate(each, axis=1), *found)
                if found
                else _no_scores(self._top)
            )
            if self.cache is not None:
                # Rows after the length of a cache are never attended to.
                length: Any = np.int32(len(self.tokens))
                self.cache = dataclasses.replace(self.cache, length=length)


def _no_scores(top: int) -> ScoredChunk:
    none: Any = np.zeros((1, 0), np.float32)
    some: Any = np.zeros((1, 0, top), np.float32)
    return ScoredChunk(logprobs=none, ranks=none, top_ids=some, top_logprobs=some)


def _scoring_buckets(runner: LevelRunner, chunks: Sequence[int], top: int) -> list[Bucket]:
    capacity, bucket = runner.options.cache_tokens[-1], runner.model.bucket
    scores = [
        bucket(ScoreBucket, tokens=each, cache_tokens=capacity, top=min(top, runner.cfg.vocab_size))
        for each in chunks
    ]
    return [bucket(StartBucket, cache_tokens=capacity), *scores]


def _embedding_buckets(runner: LevelRunner, chunks: Sequence[int]) -> list[Bucket]:
    capacity, bucket = runner.options.cache_tokens[-1], runner.model.bucket
    embeds = [bucket(EmbedTextBucket, tokens=each, cache_tokens=capacity) for each in chunks]
    return [bucket(StartBucket, cache_tokens=capacity), *embeds]
