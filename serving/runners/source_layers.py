"""Reads the sources of an encoder-decoder that runs layer by layer: the encoder once per prompt.

If layers are read from storage, the encoder's take turns in the decoder's memory, so that they leave no
memory in use when the answer begins. Then each layer of the decoder projects the encoder's outputs to keys
and values, which stay in the cache; the weights of that projection are not read again for the answer's
tokens.
"""

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax
import numpy as np

from jaxllm.kv.states import SourceKV
from jaxllm.models.encoder_decoder import encoder_params
from jaxllm.quant import Weight
from jaxllm.serving.buckets.bucket import Bucket
from jaxllm.serving.buckets.bucket_table import BucketTable
from jaxllm.serving.buckets.parts import norm_params, outer_params
from jaxllm.serving.buckets.source import (
    BeginEncoderBucket,
    EncoderLayerBucket,
    EndEncoderBucket,
    SourceLayerBucket,
    source_lengths,
)
from jaxllm.serving.runners.chunks import padded
from jaxllm.serving.weights.model_level import ModelLevel


class SourceWeights(Protocol):
    """Provides the weights for a source, in this order: rows of the embedding, the encoder's layers, the
    decoder's."""

    def begin_source(self) -> None:
        """Begins a source."""
        ...

    def rows(self, tokens: Sequence[int]) -> tuple[Weight, np.ndarray]:
        """A weight with the rows of some tokens, and the index of each token's row in it, `[1, T]` int32."""
        ...

    def encoder_layer(self, model: ModelLevel, layer: int) -> AbstractContextManager[dict[str, Any]]:
        """A layer's parameters of the encoder as a model; valid until the context ends."""
        ...

    def layer(self, model: ModelLevel, layer: int) -> AbstractContextManager[dict[str, Any]]:
        """The same of the decoder."""
        ...


class SourceLayers:
    """The layers that encode sources."""

    def __init__(
        self,
        model: ModelLevel,
        buckets: BucketTable,
        weights: SourceWeights,
        *,
        by_rows: bool = True,
        sparse: Any = None,
    ) -> None:
        """Makes the layers.

        Args:
          model: the whole model; for streamed layers shapes suffice.
          buckets: compiled buckets.
          weights: provider of the layers.
          by_rows: whether the embedding is passed by rows, or as a whole.
          sparse: runs the encoder's layers with experts, if these are loaded individually: a
            `jaxllm.serving.experts.expert_layers.SparseEncoderLayers`.
        """
        # Of a level: buckets are the whole model's, and its parameters have counts.
        encoder = model.bucket_cfg.encoder
        assert encoder is not None
        self._model, self._buckets, self._weights, self._sparse = model, buckets, weights, sparse
        own = encoder_params(model.weights)
        self._encoder = ModelLevel(encoder, own, model.options, level=model.level)
        self._outer = outer_params(self._encoder.params)
        self._norm = norm_params(self._encoder.params)
        self._by_rows = by_rows

    def buckets(self, tokens: int) -> list[Bucket]:
        """The buckets for sources of up to `tokens` tokens, one of `source_lengths`."""
        layers: list[Bucket] = []
        for layer in self._encoder.layer_kinds:
            if self._is_sparse(layer):
                assert self._sparse is not None
                layers += self._sparse.buckets(tokens, layer)
            else:
                layers.append(EncoderLayerBucket(tokens=tokens, layer=layer))
        projections = [SourceLayerBucket(tokens=tokens, layer=each) for each in self._model.layer_kinds]
        return [
            BeginEncoderBucket(tokens=tokens, by_rows=self._by_rows),
            *layers,
            EndEncoderBucket(tokens=tokens),
            *projections,
        ]

    def read(self, tokens: Sequence[int], source: SourceKV) -> SourceKV:
        """See `LayerwiseRunner.read_source`."""
        lengths = source_lengths(self._model.cfg, self._model.options)
        length = next(each for each in lengths if each >= len(tokens))
        row, count = padded(tokens, length)
        self._weights.begin_source()
        hidden, valid = self._encoded(row[0], np.int32(count)), np.int32(count)
        for layer, like in enumerate(self._model.alike):
            compiled = self._buckets.get(SourceLayerBucket(tokens=length, layer=like))
            with self._weights.layer(self._model, layer) as weights:
                source = compiled(weights, hidden, valid, source.in_layer(layer))
                # The next piece overwrites the memory of this one.
                jax.block_until_ready(source)
        return dataclasses.replace(source.in_layer(None), length=valid)  # pyright: ignore

    def _encoded(self, row: np.ndarray, valid: np.int32) -> jax.Array:
        """The encoder's output for tokens `[T]` with `valid` valid ones: `[1, T, D]`."""
        length, outer, rows = len(row), self._outer, row[None]
        if self._by_rows:
            some, rows = self._weights.rows(row.tolist())
            outer = {**outer, "embed.tokens": some}
        begin = self._buckets.get(BeginEncoderBucket(tokens=length, by_rows=self._by_rows))
        x, bias = begin(outer, rows, valid)
        for layer, like in enumerate(self._encoder.alike):
            with self._weights.encoder_layer(self._encoder, layer) as weights:
                if self._is_sparse(layer):
                    assert self._sparse is not None
                    x = self._sparse.run(layer, like, weights, (x, bias, valid))
                else:
                    x = self._buckets.get(EncoderLayerBucket(tokens=length, layer=like))(
                        weights, x, bias, valid
                    )
                jax.block_until_ready(x)
        return self._buckets.get(EndEncoderBucket(tokens=length))(self._norm, x)

    def _is_sparse(self, layer: int) -> bool:
        return self._sparse is not None and self._encoder.cfg.is_sparse(layer)
