"""Scores text by a resident model: log-probabilities, most likely tokens, visited experts; embeds it."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.errors import ConfigError, NotFinite
from jaxllm.kv.cache import KVCache
from jaxllm.models.features import require_decoder_alone, require_feature
from jaxllm.nn.documents import Branches
from jaxllm.serving.buckets.bucket import SCALAR, Bucket, ChunkBucket, ModelShapes, TokensBucket, ids
from jaxllm.serving.buckets.model import StartBucket
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.runners.level_runner import LevelRunner
from jaxllm.serving.runners.runner import padded, plan_chunks
from jaxllm.steps.branching import Packed, target_room
from jaxllm.steps.model import ScoredTokens, embed_chunk, route_documents, score_branches, score_chunk


class ScoreBucket(ChunkBucket):
    """Scores one chunk of a text after a cache (see `steps.model.score_chunk`)."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, row, targets, valid, cache) -> log-probabilities, likeliest tokens, cache."""
        row, cache = ids(1, self.tokens), model.cache(self.cache_tokens)
        return model.lowered(score_chunk, row, row, SCALAR, cache, donated=(4,))


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
            out, likeliest, cache = compiled(self.runner.params, row, goal, np.int32(valid), cache)
            scores.append(np.asarray(out)[0, :valid])
            best.append(np.asarray(likeliest)[0, :valid])
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


def _embedding_buckets(runner: LevelRunner, chunks: Sequence[int]) -> list[Bucket]:
    capacity, bucket = runner.options.cache_tokens[-1], runner.model.bucket
    embeds = [bucket(EmbedTextBucket, tokens=each, cache_tokens=capacity) for each in chunks]
    return [bucket(StartBucket, cache_tokens=capacity), *embeds]
