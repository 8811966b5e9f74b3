"""Running a model whose weights come by pieces: the same calls as with all of them in memory."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.elastic.submodel import CountedSubModel
from jaxllm.kv.cache import KVCache, Places
from jaxllm.models.parameters import Params
from serving.graph_store import GraphStore
from serving.options import EngineOptions
from serving.streaming.layered_table import LayeredTable
from serving.streaming.weight_stream import Meanwhile
from serving.streaming.weights import StreamedWeights


class StreamedTable(LayeredTable):
    """The graphs of a model's pieces (see `GraphTable`), as calls.

    Attributes:
      weights: brings the pieces.
    """

    streams_layers = True

    def __init__(
        self,
        cfg: ModelConfig,
        params: Params | CountedSubModel,
        options: EngineOptions,
        weights: StreamedWeights,
        store: GraphStore | None = None,
    ) -> None:
        """Makes an empty table of the whole model.

        Args:
          cfg: the model.
          params: its parameters; those of layers and tables of tokens are not read (see
            `StreamedWeights.frozen`).
          options: resolved options.
          weights: brings the others.
          store: keeps graphs for later processes.
        """
        super().__init__(cfg, params, options, weights, store)
        self.weights = weights

    def begin_layers(self, tokens: np.ndarray, at: Places) -> jax.Array:
        """See `GraphTable`."""
        self.weights.begin(self.cfg)
        return super().begin_layers(tokens, at)

    def restore_layer(
        self,
        layer: int,
        x: jax.Array,
        at: Places,
        past: tuple[jax.Array, jax.Array],
        source: np.ndarray,
        bits: np.ndarray,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """See `GraphTable`."""
        graph = self.graph(self._restoring_bucket(layer, at, past))
        with self.weights.layer(self, layer) as weights:
            # The next piece takes the place of this one.
            return jax.block_until_ready(graph(weights, x, at, past, source, bits))

    def _pass(
        self, chunks: Sequence[tuple[np.ndarray, Places]], cache: KVCache, meanwhile: Meanwhile | None = None
    ) -> tuple[list[jax.Array], KVCache]:
        self.weights.begin(self.cfg)
        outputs = [self._embedded(tokens, at) for tokens, at in chunks]
        keys, values, mass = list(cache.keys), list(cache.values), cache.mass
        for layer in range(self.cfg.layers):
            past = keys[layer], values[layer]
            with self.weights.layer(self, layer, meanwhile) as weights:
                for number, (tokens, at) in enumerate(chunks):
                    kind = "layer" if at.tree is None else "tree"
                    bucket = self._layer_bucket(kind, len(tokens), cache.capacity_tokens, layer)
                    outputs[number], past, mass = self.graph(bucket)(weights, outputs[number], at, past, mass)
                # The next piece takes the place of this one.
                jax.block_until_ready(outputs)
            keys[layer], values[layer] = past
        return outputs, dataclasses.replace(cache, keys=tuple(keys), values=tuple(values), mass=mass)

    def _embedded(self, tokens: np.ndarray, at: Places) -> jax.Array:
        """What the first layer takes, `[1, T, D]`."""
        table, rows = self.weights.rows(tokens.tolist())
        graph = self.graph(self._rows_bucket(len(tokens)))
        return graph({**self._embedding, "embed.tokens": table}, rows, np.asarray(at.positions))
