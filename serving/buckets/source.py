"""Buckets of encoder-decoders: a source is encoded, and projected into a cache, at once or layer by layer."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.config import ModelConfig
from jaxllm.models.decoder import final_normed
from jaxllm.models.encoder_decoder import (
    begin_encoder,
    encoder_layer,
    read_source,
    source_layer,
)
from jaxllm.models.parameters import Params
from jaxllm.serving.buckets.bucket import SCALAR, Bucket, ModelShapes, ids
from jaxllm.serving.buckets.parts import layer_shapes, norm_params, outer_params, row_step, some_rows
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.steps.sparse_layers import SparseLayer, attend_encoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceBucket(Bucket):
    """Reads a source into an empty cache (see `models.encoder_decoder.read_source`).

    Attributes:
      tokens: length of the source, padding included.
      cache_tokens: length of the cache.
    """

    tokens: int
    cache_tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, the encoder's, row, valid, cache) -> cache."""
        step = model.jitted(read_source, 4)
        cache = model.cache(self.cache_tokens)
        return step.lower(model.params, model.encoder, ids(1, self.tokens), SCALAR, cache)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeginEncoderBucket(Bucket):
    """Embeds a source (see `models.encoder_decoder.begin_encoder`).

    Attributes:
      tokens: length of the source, including padding.
      by_rows: whether the embedding is passed as only the rows of the tokens.
    """

    tokens: int
    by_rows: bool

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(the encoder's params outside of layers, row, valid) -> x, bias."""
        step = functools.partial(begin_encoder, cfg=_encoder(model), dtype=model.dtype)
        return jax.jit(step).lower(self._params(model), ids(1, self.tokens), SCALAR)

    def _params(self, model: ModelShapes) -> dict[str, Any]:
        assert model.encoder is not None
        params = outer_params(model.encoder)
        if self.by_rows:
            rows: Any = params["embed.tokens"]
            params["embed.tokens"] = some_rows(rows, self.tokens * row_step(rows))
        return params


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderLayerBucket(Bucket):
    """Runs one layer of the encoder (see `models.encoder_decoder.encoder_layer`).

    Attributes:
      tokens: length of the source, including padding.
      layer: the first of the encoder's layers that share the bucket.
    """

    tokens: int
    layer: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(layer's params, x, bias, valid) -> x."""
        assert model.encoder is not None
        step = functools.partial(encoder_layer, cfg=_encoder(model), layer=self.layer)
        x, bias = _begun(model, self.tokens)
        weights = layer_shapes(model.encoder, self.layer)
        return jax.jit(step, donate_argnums=(1,)).lower(weights, x, bias, SCALAR)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttendEncoderBucket(Bucket):
    """Runs a sparse layer of the encoder, up to its experts (see `steps.sparse_layers.attend_encoder`).

    Attributes:
      tokens: length of the source, including padding.
      layer: the first of the encoder's layers that share the bucket.
      loss, ahead: see `jaxllm.serving.experts.bucket.AttendBucket`.
    """

    tokens: int
    layer: int
    loss: float = 0.0
    ahead: int = 1

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(layer's params, x, bias, valid) -> tokens at experts, a buffer for their outputs."""
        assert model.encoder is not None
        layer = SparseLayer(_encoder(model), self.layer, self.loss)
        step = functools.partial(attend_encoder, of=layer, ahead=self.ahead)
        x, bias = _begun(model, self.tokens)
        weights = layer_shapes(model.encoder, self.layer)
        return jax.jit(step, donate_argnums=(1,)).lower(weights, x, bias, SCALAR)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndEncoderBucket(Bucket):
    """Applies the encoder's final norm.

    Attributes:
      tokens: length of the source, padding included.
    """

    tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(norm, x) -> hidden."""
        assert model.encoder is not None
        step = jax.jit(functools.partial(final_normed, cfg=_encoder(model)))
        return step.lower(norm_params(model.encoder), model.hidden(self.tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceLayerBucket(Bucket):
    """Projects the encoder's outputs to keys and values of one layer of the decoder (see
    `models.encoder_decoder.source_layer`).

    Attributes:
      tokens: length of the source, including padding.
      layer: the first of the layers that share the bucket.
    """

    tokens: int
    layer: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(layer's params, hidden, valid, the source as the layer has it) -> the source."""
        step = jax.jit(functools.partial(source_layer, layer=self.layer), donate_argnums=(3,))
        # Any cache length gives the same shapes.
        source = model.past(self.layer, model.options.cache_tokens[0]).source
        weights = layer_shapes(model.params, self.layer)
        return step.lower(weights, model.hidden(self.tokens), SCALAR, source)


def _encoder(model: ModelShapes) -> ModelConfig:
    assert model.cfg.encoder is not None
    return model.cfg.encoder


def _begun(model: ModelShapes, tokens: int) -> tuple[Any, Any]:
    """Shapes of the first layer's input, and of the bias."""

    def begun(params: Params, row: jax.Array, valid: jax.Array) -> Any:
        return begin_encoder(params, row, valid, cfg=_encoder(model), dtype=jnp.dtype(model.dtype))

    assert model.encoder is not None
    return jax.eval_shape(begun, outer_params(model.encoder), ids(1, tokens), SCALAR)


def source_lengths(cfg: ModelConfig, options: EngineOptions) -> tuple[int, ...]:
    """The source lengths with buckets, ascending: those of prefill chunks, and the longest source. None for
    models without an encoder."""
    longest = options.source_tokens(cfg)
    if not longest:
        return ()
    return (*(each for each in options.chunk_tokens if each < longest), longest)
