"""Draws tokens from the logits of programs, by buckets that are compiled ahead and kept on disk."""

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


class TokenChooser:
    """Draws tokens of a vocabulary.

    Args:
      vocab_size: V.
      folder: keeps compiled buckets; None keeps none.
    """

    def __init__(self, vocab_size: int, folder: CompiledBucketFolder | None = None) -> None:
        self._vocab_size = vocab_size
        self._buckets = BucketTable(None, None if folder is None else BucketStore.of_programs(folder))

    def prepare(self, trees: Iterable[int] = ()) -> None:
        """Gets the buckets ready that draw the next token, and the tokens of trees of these sizes."""
        self._buckets.fill(self._bucket(nodes) for nodes in (0, *trees))

    def next_token(self, logits: Any, sampler: SamplerState) -> tuple[jax.Array, SamplerState]:
        """See `jaxllm.sampling.sample`; logits are `[1, V]`."""
        return self._ready(0)(np.asarray(logits), sampler)

    def of_tree(self, tree: TokenTree, logits: Any, sampler: SamplerState) -> jax.Array:
        """See `jaxllm.speculative.acceptance.choices`."""
        return self._ready(tree.room)(tree, np.asarray(logits), sampler)

    def _ready(self, nodes: int) -> Any:
        bucket = self._bucket(nodes)
        if not self._buckets.is_ready(bucket):
            self._buckets.fill([bucket])
        return self._buckets.get(bucket)

    def _bucket(self, nodes: int) -> ChoiceBucket:
        return ChoiceBucket(nodes=nodes, vocab_tokens=self._vocab_size)
