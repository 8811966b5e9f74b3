"""Buckets that score given text: log-probabilities of tokens, experts that tokens visit, hidden states."""

import dataclasses
from typing import Any

import jax

from jaxllm.nn.documents import Branches
from jaxllm.serving.buckets.bucket import SCALAR, ChunkBucket, ModelShapes, TokensBucket, ids
from jaxllm.steps.branching import target_room
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
        """(params, tokens, starts, branches, scored) -> log-probabilities."""
        rows: Any = ids(self.rows, self.tokens)
        flat: Any = ids(target_room(self.rows, self.tokens))
        count: Any = SCALAR
        scored = ScoredTokens(flat, flat, count)
        return model.lowered(score_branches, rows, rows, Branches(rows, rows), scored)
