"""Encodes the sources of an encoder-decoder of which only experts are loaded from storage.

A layer of the encoder processes the whole source at once: its tokens are sorted by expert, so that each
expert is loaded at most once per prompt, and used when it arrives (EdgeMoE, arXiv 2308.14352, section 3.3).
The visits predict nothing of the next prompt: there is no prediction and no learning, and these experts are
evicted first (see `jaxllm.serving.experts.eviction`).
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.models.encoder_decoder import encoder_params
from jaxllm.models.parameters import Params
from jaxllm.quant import Weight
from jaxllm.serving.buckets.bucket import Bucket
from jaxllm.serving.buckets.bucket_table import BucketTable
from jaxllm.serving.buckets.parts import expert_norm, layer_params
from jaxllm.serving.buckets.source import AttendEncoderBucket
from jaxllm.serving.experts.bucket import CombineBucket
from jaxllm.serving.experts.expert_visits import Visit, Visits
from jaxllm.serving.experts.weights import ExpertWeights
from jaxllm.serving.weights.model_level import ModelLevel


class ResidentSources:
    """The layers for sources, all resident except experts (see `SourceWeights`)."""

    def begin_source(self) -> None:
        """See `SourceWeights`."""

    def rows(self, tokens: Sequence[int]) -> tuple[Weight, np.ndarray]:
        """See `SourceWeights`; the whole embedding is in memory."""
        raise NotImplementedError

    def encoder_layer(
        self, model: ModelLevel, layer: int
    ) -> contextlib.AbstractContextManager[dict[str, Any]]:
        """See `SourceWeights`."""
        return self.layer(model, layer)

    @contextlib.contextmanager
    def layer(self, model: ModelLevel, layer: int) -> Iterator[dict[str, Any]]:
        """See `SourceWeights`."""
        yield layer_params(model.params, layer, model.alike[layer])


class SparseEncoderLayers:
    """The layers of an encoder with individually loaded experts."""

    def __init__(
        self, model: ModelLevel, buckets: BucketTable, experts: ExpertWeights, visits: Visits
    ) -> None:
        """See the class; `model` is the whole model; `visits` runs tokens through resident experts."""
        assert model.cfg.encoder is not None
        self._buckets, self._experts, self._visits = buckets, experts, visits
        self._how = experts.bucket_options
        own: Params = encoder_params(model.weights)
        # By the index of a sparse layer: the norm before its experts.
        self._sparse = [
            layer for layer in range(model.cfg.encoder.layers) if model.cfg.encoder.is_sparse(layer)
        ]
        self._norms = [expert_norm(own, layer) for layer in self._sparse]
        self._total = model.cfg.experts

    def buckets(self, tokens: int, layer: int) -> list[Bucket]:
        """The buckets of layers like one, for sources of up to `tokens` tokens."""
        return [
            AttendEncoderBucket(tokens=tokens, layer=layer, **self._how),
            *self._visits.buckets(tokens),
            CombineBucket(tokens=tokens, **self._how),
        ]

    def run(
        self,
        layer: int,
        like: int,
        weights: dict[str, Any],
        inputs: tuple[jax.Array, jax.Array | None, np.int32],
    ) -> jax.Array:
        """Runs a layer, with `weights` besides its experts, over its input, the bias and the number of valid
        tokens: returns the next layer's input."""
        tokens, index = inputs[0].shape[1], self._sparse.index(layer)
        attend = self._buckets.get(AttendEncoderBucket(tokens=tokens, layer=like, **self._how))
        before, out = attend(weights, *inputs)
        visit, outs = Visit.of(index, self._norms[index], [before]), [out]
        for arrived in self._experts.cache.visit(index, visit.needs(self._total)):
            self._visits.run(visit, arrived, outs)
        return self._buckets.get(CombineBucket(tokens=tokens, **self._how))(before, outs[0])
