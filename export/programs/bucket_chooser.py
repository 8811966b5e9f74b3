"""Samples tokens by buckets that are compiled ahead of time and cached on disk (see `TokenChooser`)."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxllm.export.programs.exported_bucket import ChoiceBucket
from jaxllm.sampling import SamplerState
from jaxllm.serving.buckets.bucket_table import BucketTable
from jaxllm.serving.buckets.store import BucketStore, CompiledBucketFolder
from jaxllm.speculation.token_tree import TokenTree


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
