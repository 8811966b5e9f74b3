"""Draws tokens from the logits of programs, by buckets that are compiled before a request and kept for later
processes."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxllm.sampling import SamplerState
from jaxllm.speculative.tree import TokenTree
from serving.buckets.bucket_table import BucketTable
from serving.buckets.compiled_folder import CompiledBucketFolder
from serving.buckets.exported import ChoiceBucket
from serving.buckets.store import BucketStore


class Choosing:
    """Draws tokens of a vocabulary of so many.

    Args:
      vocab_size: V.
      folder: where executables are kept; None keeps none.
    """

    def __init__(self, vocab_size: int, folder: CompiledBucketFolder | None = None) -> None:
        self._vocab_size = vocab_size
        self._table = BucketTable(None, None if folder is None else BucketStore.of_programs(folder))

    def prepare(self, trees: Iterable[int] = ()) -> None:
        """Gets ready what draws the next token, and the tokens of trees of these sizes."""
        self._table.fill(self._bucket(nodes) for nodes in (0, *trees))

    def next_token(self, logits: Any, sampler: SamplerState) -> tuple[jax.Array, SamplerState]:
        """See `jaxllm.sampling.sample`, of logits `[1, V]`."""
        return self._ready(0)(np.asarray(logits), sampler)

    def of_tree(self, tree: TokenTree, logits: Any, sampler: SamplerState) -> jax.Array:
        """See `jaxllm.speculative.acceptance.choices`."""
        return self._ready(tree.room)(tree, np.asarray(logits), sampler)

    def _ready(self, nodes: int) -> Any:
        bucket = self._bucket(nodes)
        if not self._table.is_ready(bucket):
            self._table.fill([bucket])
        return self._table.get(bucket)

    def _bucket(self, nodes: int) -> ChoiceBucket:
        return ChoiceBucket(nodes=nodes, vocab_tokens=self._vocab_size)
