"""Embeds a text with a resident model, chunk by chunk, so that answers go on in between."""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxllm.errors import ConfigError, NotFinite
from jaxllm.kv.cache import KVCache
from serving.buckets.bucket import Bucket
from serving.buckets.cache import StartBucket
from serving.buckets.scoring import EmbedBucket
from serving.runners.chunks import padded, plan_chunks
from serving.runners.level_runner import LevelRunner


@dataclasses.dataclass(frozen=True)
class _Chunk:
    tokens: Sequence[int]
    bucket: EmbedBucket


class Embedding:
    """The embedding of one text: the mean of the last layer's hidden states, after the final norm, over its
    tokens, of length 1. A decoder sees at each token those before it alone; a model that was not trained for
    embeddings gives such as they are.

    Attributes:
      vector: `[D]` float32; None until `step` has said that there is no more to do.
    """

    def __init__(self, runner: LevelRunner, tokens: Sequence[int]) -> None:
        """Cuts a text into chunks.

        Args:
          runner: of the level that embeds, with its weights in memory (see `LevelRunner.scorer`).
          tokens: of the text, at least one and at most the window.

        Raises:
          ConfigError: the text is empty or too long.
        """
        options = runner.options
        if not 0 < len(tokens) <= options.context_tokens:
            raise ConfigError(
                f"a text to embed must have 1 to {options.context_tokens} tokens, got {len(tokens)}"
            )
        self.vector: np.ndarray | None = None
        self._runner, self._count, at = runner, len(tokens), 0
        self._chunks: collections.deque[_Chunk] = collections.deque()
        for length in plan_chunks(len(tokens), options.chunk_tokens):
            self._chunks.append(_Chunk(tokens[at : at + length], _bucket(runner, length)))
            at += length
        self._sum: np.ndarray | None = None
        self._cache: KVCache | None = None

    def step(self) -> bool:
        """Computes the next chunk; where its bucket was not filled (see `embedding_buckets`) it is read from
        disk or compiled first.

        Returns:
          Whether there is more to do.

        Raises:
          NotFinite: the hidden states are not finite numbers.
        """
        runner, chunk = self._runner, self._chunks[0]
        runner.fill([_start(runner), chunk.bucket])
        with runner.lock:
            cache = runner.empty_cache(_capacity(runner)) if self._cache is None else self._cache
            row, valid = padded(chunk.tokens, chunk.bucket.tokens)
            compiled = runner.buckets.get(chunk.bucket)
            found, self._cache = compiled(runner.params, row, np.int32(valid), cache)
        total = np.asarray(found)[0] if self._sum is None else self._sum + np.asarray(found)[0]
        self._sum = total
        self._chunks.popleft()
        if self._chunks:
            return True
        self._cache = None
        self.vector = _of_length_one(total)
        return False


def embedding_buckets(runner: LevelRunner) -> list[Bucket]:
    """The buckets of all texts: caches have the longest length, so that there is one for each length of a
    chunk."""
    return [_start(runner), *(_bucket(runner, length) for length in runner.options.chunk_tokens)]


def _capacity(runner: LevelRunner) -> int:
    return runner.options.cache_tokens[-1]


def _start(runner: LevelRunner) -> StartBucket:
    return StartBucket(cache_tokens=_capacity(runner), level=runner.model.bucket_level)


def _bucket(runner: LevelRunner, tokens: int) -> EmbedBucket:
    level = runner.model.bucket_level
    return EmbedBucket(tokens=tokens, cache_tokens=_capacity(runner), level=level)


def _of_length_one(vector: np.ndarray) -> np.ndarray:
    length = float(np.linalg.norm(vector.astype(np.float64)))
    if not np.isfinite(length) or not length:
        raise NotFinite("the hidden states of a text are not finite numbers: prepare the model again")
    return (vector / length).astype(np.float32)
