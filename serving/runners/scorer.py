"""Scores text with a resident model: log-probabilities, likeliest tokens, visited experts; and embeds it."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from jaxllm.kv.cache import KVCache
from jaxllm.models.rooms import require_room
from jaxllm.nn.documents import Branches
from jaxllm.steps.branching import Packed
from serving.buckets.bucket import Bucket
from serving.buckets.cache import StartBucket
from serving.buckets.scoring import BranchesBucket, RoutingBucket, ScoreBucket
from serving.host.progress import Progress
from serving.runners.chunks import padded, plan_chunks
from serving.runners.embedding import Embedding, embedding_buckets
from serving.runners.level_runner import LevelRunner


class Scorer:
    """Scores text with one level of a model.

    Attributes:
      runner: the runner of the level.
    """

    def __init__(self, runner: LevelRunner) -> None:
        self.runner = runner

    # -- preparing --------------------------------------------------------------------------------

    def prepare(self, window_tokens: int, progress: Progress | None = None) -> None:
        """Prepares the buckets that score text in windows of `window_tokens` tokens."""
        runner = self.runner
        cache = next(each for each in runner.options.cache_tokens if each >= window_tokens)
        start = StartBucket(cache_tokens=cache, level=runner.model.bucket_level)
        runner.fill([start, self._score_bucket(cache)], progress)

    def prepare_ends(self, cache: int, progress: Progress | None = None) -> None:
        """Prepares the buckets that prefill a prompt and score its ends in a cache of length `cache`."""
        ends = [self._score_bucket(cache, chunk) for chunk in self.runner.options.chunk_tokens]
        self.runner.fill([*self.runner.all_buckets(), *ends], progress)

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
        """The buckets that embed texts of all lengths."""
        return embedding_buckets(self.runner)

    # -- scoring ----------------------------------------------------------------------------------

    def score(
        self, tokens: Sequence[int], targets: Sequence[int], cache: KVCache | None = None
    ) -> np.ndarray:
        """Natural log-probability `[T]` float32 of each target after its token and all tokens before it.

        Args:
          tokens, targets: of equal length T.
          cache: of the tokens before; donated. None for an empty one.
        """
        return self.predict(tokens, targets, cache)[0]

    def predict(
        self, tokens: Sequence[int], targets: Sequence[int], cache: KVCache | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """`score`, and the likeliest token after each token, `[T]` int32."""
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
    ) -> tuple[np.ndarray, KVCache]:
        """`score` of one of several ends of the text in `cache`, and the cache for the next end.

        `cache` is donated; the result differs from it in the attention mass alone.
        """
        require_room(self.runner.cfg, "tasks")
        length = int(cache.length)
        chunks = plan_chunks(len(tokens), self.runner.options.chunk_tokens)
        scores, _, cache = self._scored(tokens, targets, cache, chunks)
        # Rows after the length of a cache are never attended to.
        return scores, dataclasses.replace(cache, length=np.int32(length))  # pyright: ignore

    def embedding(self, tokens: Sequence[int]) -> Embedding:
        """What computes the embedding of a text of so many tokens, chunk by chunk.

        Raises:
          ConfigError: the text is empty, or longer than the window.
        """
        return Embedding(self.runner, tokens)

    def score_branches(self, packed: Packed) -> np.ndarray:
        """Natural log-probability of each of `packed`'s targets, `[count]` float32."""
        compiled = self.runner.buckets.get(
            self._branches_bucket(packed.tokens.shape[1], packed.tokens.shape[0])
        )
        branches = Branches(trunk_ends=packed.trunk_ends, starts=packed.branch_starts)  # pyright: ignore
        out = compiled(
            self.runner.params,
            packed.tokens,
            packed.starts,
            branches,
            packed.scored,
        )
        return np.asarray(out)[: packed.count]

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
        tokens, level = chunk or self.runner.options.chunk_tokens[-1], self.runner.model.bucket_level
        return ScoreBucket(tokens=tokens, cache_tokens=cache, level=level)

    def _branches_bucket(self, tokens: int, rows: int | None = None) -> BranchesBucket:
        rows = rows or max(1, self.runner.options.score_tokens // tokens)
        return BranchesBucket(rows=rows, tokens=tokens, level=self.runner.model.bucket_level)

    def _routing_bucket(self, rows: int, tokens: int) -> RoutingBucket:
        return RoutingBucket(rows=rows, tokens=tokens, level=self.runner.model.bucket_level)
