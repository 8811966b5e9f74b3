"""Buckets that score given text: log-probabilities of tokens, experts that tokens visit, hidden states."""

import dataclasses
from typing import Any

import jax

from jaxllm.nn.documents import Branches
from jaxllm.serving.buckets.bucket import SCALAR, Bucket, ModelShapes, ids
from jaxllm.steps.branching import target_room
from jaxllm.steps.model import ScoredTokens, embed_chunk, route_documents, score_branches, score_chunk


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreBucket(Bucket):
    """Scores one chunk of a text after a cache (see `steps.model.score_chunk`).

    Attributes:
      tokens: length of the chunk, including padding.
      cache_tokens: length of the cache.
    """

    tokens: int
    cache_tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, row, targets, valid, cache) -> log-probabilities, likeliest tokens, cache."""
        row = ids(1, self.tokens)
        step = model.jitted(score_chunk, 4)
        return step.lower(model.params, row, row, SCALAR, model.cache(self.cache_tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedBucket(Bucket):
    """Sums the hidden states of one chunk of a text after a cache (see `steps.model.embed_chunk`).

    Attributes:
      tokens: length of the chunk, including padding.
      cache_tokens: length of the cache.
    """

    tokens: int
    cache_tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, row, valid, cache) -> sum, cache."""
        step = model.jitted(embed_chunk, 3)
        return step.lower(model.params, ids(1, self.tokens), SCALAR, model.cache(self.cache_tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BranchesBucket(Bucket):
    """Scores tokens of packed documents with many ends, without a cache (see `steps.model.score_branches`).

    Attributes:
      rows: number of rows per dispatch (B).
      tokens: length of a row (T).
    """

    rows: int
    tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, tokens, starts, branches, scored) -> log-probabilities."""
        rows = ids(self.rows, self.tokens)
        flat: Any = ids(target_room(self.rows, self.tokens))
        count: Any = SCALAR
        branches = Branches(rows, rows)  # pyright: ignore[reportArgumentType]: shapes
        step = model.jitted(score_branches)
        return step.lower(model.params, rows, rows, branches, ScoredTokens(flat, flat, count))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingBucket(Bucket):
    """Computes the experts that the tokens of packed documents visit (see `steps.model.route_documents`).

    Attributes:
      rows: number of rows per dispatch (B).
      tokens: length of a row (T).
    """

    rows: int
    tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, tokens, starts) -> ids of experts."""
        rows = ids(self.rows, self.tokens)
        return model.jitted(route_documents).lower(model.params, rows, rows)
