"""Prefills a chunk of a prompt layer by layer, each as soon as the context before it is restored.

Resident weights are otherwise run by one bucket of all layers, which cannot begin before the last layer's
chunks have been read.
"""

from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxllm.kv.cache import Past
from jaxllm.kv.chunks import LayerChunks
from jaxllm.kv.positions import TokenPositions
from serving.buckets.bucket import Bucket
from serving.buckets.context import LastLogitsBucket, PrefillRestoredBucket
from serving.buckets.parts import head_params

if TYPE_CHECKING:
    from serving.runners.resident import ResidentRunner


class RestoredPrefill:
    """The buckets of one level whose weights are resident, for one layer after the other. The caller takes
    the runner's lock."""

    def __init__(self, runner: "ResidentRunner") -> None:
        self._runner = runner

    def all_buckets(self) -> list[Bucket]:
        """Those of each length of a chunk and of a cache."""
        runner, options = self._runner, self._runner.options
        buckets: list[Bucket] = []
        for tokens in options.chunk_tokens:
            buckets += [runner.embed_bucket(tokens), LastLogitsBucket(tokens=tokens)]
            buckets += [
                self._layer_bucket(tokens, cache, layer)
                for cache in options.cache_tokens
                for layer in runner.model.layer_kinds
            ]
        return buckets

    def layer(
        self,
        layer: int,
        x: jax.Array,
        at: TokenPositions,
        past: Past,
        mass: jax.Array | None,
        chunks: LayerChunks,
    ) -> tuple[jax.Array, Past, jax.Array | None]:
        """Loads a layer's stored chunks, and runs new tokens through it (see
        `jaxllm.steps.layers.prefill_restored`).

        Args:
          layer: its index.
          x: its input `[1, T, D]` (see `ContextRunner.begin_layers`); donated.
          at: positions of the tokens, consecutive.
          past: its keys and values; donated.
          mass: of the cache; donated.
          chunks: the stored ones.

        Returns:
          The next layer's input, this layer's keys and values, and the mass.
        """
        bucket = self._layer_bucket(len(at.positions), past.capacity_tokens, layer)
        compiled = self._runner.buckets.get(bucket)
        return compiled(self._runner.layer_params(layer), x, at, past, mass, chunks)

    def logits(self, x: jax.Array, row: int) -> jax.Array:
        """Logits `[1, V]` after token `row` of the last layer's output `[1, T, D]`."""
        runner = self._runner
        compiled = runner.buckets.get(LastLogitsBucket(tokens=x.shape[1]))
        return compiled(head_params(runner.params, runner.cfg), x, np.array([row], np.int32))

    def _layer_bucket(self, tokens: int, cache: int, layer: int) -> PrefillRestoredBucket:
        model = self._runner.model
        return PrefillRestoredBucket(
            tokens=tokens, cache_tokens=cache, layer=model.alike[layer], level=model.bucket_level
        )
