"""Samples tokens by buckets that are compiled ahead of time and cached on disk (see `TokenChooser`)."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxllm.sampling import SamplerState, Sampling, sample, sampler_state
from jaxllm.serving.buckets.bucket import Bucket, shapes_of, tree_shapes
from jaxllm.serving.buckets.bucket_table import BucketTable
from jaxllm.serving.buckets.compiled_folder import CompiledBucketFolder
from jaxllm.serving.buckets.store import BucketStore
from jaxllm.speculation.token_tree import TokenTree
from jaxllm.speculation.tree import choices


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceBucket(Bucket):
    """Draws a token after each node of a tree from logits on the host (see
    `jaxllm.speculation.tree.choices`).

    Attributes:
      nodes: capacity of the tree; 0 for the next token of a sequence (see `jaxllm.sampling.sample`).
      vocab_tokens: size of the vocabulary (V).
    """

    nodes: int
    vocab_tokens: int

    def lower(self, model: None, /) -> jax.stages.Lowered:
        """([tree,] logits, sampler) -> token and sampler, or tokens."""
        del model
        logits = jax.ShapeDtypeStruct((max(1, self.nodes), self.vocab_tokens), np.float32)
        sampler = shapes_of(sampler_state(Sampling(), [], self.vocab_tokens, 0))
        if not self.nodes:
            return jax.jit(sample).lower(logits, sampler)
        return jax.jit(choices).lower(tree_shapes(self.nodes), logits, sampler)


class BucketChooser:
    """Samples tokens of a vocabulary.

    Args:
      vocab_size: V.
      folder: cache of compiled buckets; None caches none.
    """

    def __init__(self, vocab_size: int, folder: CompiledBucketFolder | None = None) -> None:
        self._vocab_size = vocab_size
        self._buckets = BucketTable(None, None if folder is None else BucketStore.of_programs(folder))

    def prepare(self, trees: Iterable[int] = ()) -> None:
        """See `TokenChooser`: compiles the buckets."""
        self._buckets.fill(self._bucket(nodes) for nodes in (0, *trees))

    def next_token(self, logits: Any, sampler: SamplerState) -> tuple[jax.Array, SamplerState]:
        """See `TokenChooser`."""
        return self._ready(0)(np.asarray(logits), sampler)

    def of_tree(self, tree: TokenTree, logits: Any, sampler: SamplerState) -> jax.Array:
        """See `TokenChooser`."""
        return self._ready(tree.room)(tree, np.asarray(logits), sampler)

    def _ready(self, nodes: int) -> Any:
        bucket = self._bucket(nodes)
        if not self._buckets.is_ready(bucket):
            self._buckets.fill([bucket])
        return self._buckets.get(bucket)

    def _bucket(self, nodes: int) -> ChoiceBucket:
        return ChoiceBucket(nodes=nodes, vocab_tokens=self._vocab_size)
