"""Buckets of encoder-decoders: a source is encoded, and projected into a cache, at once or layer by layer."""

import dataclasses
import functools
from typing import Any

import jax

from jaxllm.config import ModelConfig
from jaxllm.models.decoder import final_normed
from jaxllm.models.encoder_decoder import begin_encoder, encoder_layer, read_source, source_layer
from jaxllm.models.parameters import Params
from jaxllm.serving.buckets.bucket import (
    SCALAR,
    ChunkBucket,
    ModelShapes,
    TokensBucket,
    ids,
    layer_shapes,
    norm_params,
    outer_params,
    row_step,
    some_rows,
)
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.steps.sparse_layers import SparseLayer, attend_encoder


class SourceBucket(ChunkBucket):
    """Reads a source into an empty cache (see `models.encoder_decoder.read_source`)."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, the encoder's, row, valid, cache) -> cache."""
        row, cache = ids(1, self.tokens), model.cache(self.cache_tokens)
        return model.lowered(read_source, model.encoder, row, SCALAR, cache, donated=(4,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeginEncoderBucket(TokensBucket):
    """Embeds a source (see `models.encoder_decoder.begin_encoder`).

    Attributes:
      by_rows: whether the embedding is passed as only the rows of the tokens.
    """

    by_rows: bool

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(the encoder's params outside of layers, row, valid) -> x, bias."""
        cfg, params = _encoder(model)
        outer = outer_params(params)
        if self.by_rows:
            rows: Any = outer["embed.tokens"]
            outer["embed.tokens"] = some_rows(rows, self.tokens * row_step(rows))
        step = functools.partial(begin_encoder, cfg=cfg, dtype=model.dtype)
        return jax.jit(step).lower(outer, ids(1, self.tokens), SCALAR)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfSourceLayerBucket(TokensBucket):
    """A family that runs one layer over a source.

    Attributes:
      layer: the first of the layers that share the bucket.
    """

    layer: int


class EncoderLayerBucket(OfSourceLayerBucket):
    """Runs one layer of the encoder (see `models.encoder_decoder.encoder_layer`)."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(layer's params, x, bias, valid) -> x."""
        step = functools.partial(encoder_layer, cfg=_encoder(model)[0], layer=self.layer)
        return _lowered_encoder_layer(model, step, self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttendEncoderBucket(OfSourceLayerBucket):
    """Runs a sparse layer of the encoder, up to its experts (see `steps.sparse_layers.attend_encoder`).

    Attributes:
      loss, ahead: see `jaxllm.serving.experts.bucket.AttendBucket`.
    """

    loss: float = 0.0
    ahead: int = 1

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(layer's params, x, bias, valid) -> tokens at experts, a buffer for their outputs."""
        layer = SparseLayer(_encoder(model)[0], self.layer, self.loss)
        step = functools.partial(attend_encoder, of=layer, ahead=self.ahead)
        return _lowered_encoder_layer(model, step, self)


class EndEncoderBucket(TokensBucket):
    """Applies the encoder's final norm."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(norm, x) -> hidden."""
        cfg, params = _encoder(model)
        step = jax.jit(functools.partial(final_normed, cfg=cfg))
        return step.lower(norm_params(params), model.hidden(self.tokens))


class SourceLayerBucket(OfSourceLayerBucket):
    """Projects the encoder's outputs to keys and values of one layer of the decoder (see
    `models.encoder_decoder.source_layer`)."""

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(layer's params, hidden, valid, the source as the layer has it) -> the source."""
        step = jax.jit(functools.partial(source_layer, layer=self.layer), donate_argnums=(3,))
        # Any cache length gives the same shapes.
        source = model.past(self.layer, model.options.cache_tokens[0]).source
        weights = layer_shapes(model.params, self.layer)
        return step.lower(weights, model.hidden(self.tokens), SCALAR, source)


def _lowered_encoder_layer(model: ModelShapes, step: Any, bucket: OfSourceLayerBucket) -> jax.stages.Lowered:
    """Lowers a step of one layer of the encoder, (layer's params, x, bias, valid)."""
    cfg, params = _encoder(model)
    begun = functools.partial(begin_encoder, cfg=cfg, dtype=model.dtype)
    x, bias = jax.eval_shape(begun, outer_params(params), ids(1, bucket.tokens), SCALAR)
    return jax.jit(step, donate_argnums=(1,)).lower(layer_shapes(params, bucket.layer), x, bias, SCALAR)


def _encoder(model: ModelShapes) -> tuple[ModelConfig, Params]:
    assert model.cfg.encoder is not None
    assert model.encoder is not None
    return model.cfg.encoder, model.encoder


def source_lengths(cfg: ModelConfig, options: EngineOptions) -> tuple[int, ...]:
    """The source lengths with buckets, ascending: those of prefill chunks, and the longest source. None for
    models without an encoder."""
    longest = options.source_tokens(cfg)
    if not longest:
        return ()
    return (*(each for each in options.chunk_tokens if each < longest), longest)
