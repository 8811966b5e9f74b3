"""Reads the sources of an encoder-decoder whose weights are read from storage: the encoder once per prompt.

The encoder's layers take turns in the memory that the decoder's layers take turns in, so that none of it is
left of them when the answer begins. Then each layer of the decoder projects the encoder's outputs to keys and
values, which stay in the cache; what it reads for that is not read again for the answer's tokens.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxllm.kv.source import SourceKV
from jaxllm.models.encoder_decoder import encoder_params
from serving.buckets.bucket import Bucket
from serving.buckets.bucket_table import BucketTable
from serving.buckets.parts import norm_params, outer_params
from serving.buckets.source import (
    BeginEncoderBucket,
    EncoderLayerBucket,
    EndEncoderBucket,
    SourceLayerBucket,
    source_lengths,
)
from serving.runners.chunks import padded
from serving.weights.model_level import ModelLevel
from serving.weights.streamed import StreamedWeights


class SourceLayers:
    """The layers that read sources, prefetched."""

    def __init__(self, model: ModelLevel, buckets: BucketTable, weights: StreamedWeights) -> None:
        """`model` has the shapes of its layers and embedding alone (see `StreamedWeights.frozen`)."""
        assert model.cfg.encoder is not None
        self._model, self._buckets, self._weights = model, buckets, weights
        self._encoder = ModelLevel(model.cfg.encoder, encoder_params(model.weights), model.options)
        self._outer = outer_params(self._encoder.params)
        self._norm = norm_params(self._encoder.params)

    def buckets(self, tokens: int) -> list[Bucket]:
        """The buckets for sources of up to `tokens` tokens, one of `source_lengths`."""
        layers = [EncoderLayerBucket(tokens=tokens, layer=each) for each in self._encoder.layer_kinds]
        projections = [SourceLayerBucket(tokens=tokens, layer=each) for each in self._model.layer_kinds]
        return [
            BeginEncoderBucket(tokens=tokens, by_rows=True),
            *layers,
            EndEncoderBucket(tokens=tokens),
            *projections,
        ]

    def read(self, tokens: Sequence[int], source: SourceKV) -> SourceKV:
        """See `LayerSource.read_source`."""
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
        """What the encoder says of tokens `[T]`, of which `valid` are real: `[1, T, D]`."""
        length = len(row)
        some, rows = self._weights.rows(row.tolist())
        begin = self._buckets.get(BeginEncoderBucket(tokens=length, by_rows=True))
        x, mask = begin({**self._outer, "embed.tokens": some}, rows, valid)
        for layer, like in enumerate(self._encoder.alike):
            compiled = self._buckets.get(EncoderLayerBucket(tokens=length, layer=like))
            with self._weights.encoder_layer(self._encoder, layer) as weights:
                x = jax.block_until_ready(compiled(weights, x, mask, valid))
        return self._buckets.get(EndEncoderBucket(tokens=length))(self._norm, x)
