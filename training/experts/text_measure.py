"""Measures the perplexity of a text, and which experts its tokens visit, for a mixture without an encoder."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.config import ModelConfig
from jaxllm.experts.prediction import PathCounts, TokenExperts, count_paths, count_tokens
from jaxllm.models import decoder
from jaxllm.models.parameters import Params
from jaxllm.training.data.packing import Batch
from jaxllm.training.experts.width_losses import perplexity_loss
from jaxllm.training.loop.losses import Outputs, next_token_losses
from jaxllm.training.loop.parallel import MeshShape, make_mesh, place_rows


@dataclasses.dataclass(frozen=True)
class Visited:
    """The visits of a text's tokens to the experts of a decoder, or of an encoder.

    Attributes:
      paths: counts of successive experts.
      tokens: the experts of each token.
    """

    paths: PathCounts
    tokens: TokenExperts

    @classmethod
    def of(cls, ids: np.ndarray, tokens: np.ndarray, experts: int) -> "Visited":
        """Counts visits.

        Args:
          ids: `[L_sparse, M, k]` int, experts that M tokens visit.
          tokens: `[M]` int, their ids.
          experts: number of experts of a layer (E).
        """
        return cls(count_paths(ids, experts), count_tokens(ids, tokens, experts))

    @property
    def shares(self) -> np.ndarray:
        """Shares of a layer's visits by expert, `[L_sparse, E]`."""
        return self.paths.alone / np.maximum(self.paths.alone.sum(-1, keepdims=True), 1.0)


class TextPerplexity:
    """Nats per token of a text (see `Measure`).

    Attributes:
      tokens: predicted ones.
    """

    others = 32

    def __init__(self, cfg: ModelConfig, batches: Sequence[Batch], mesh: Mesh | None = None) -> None:
        """Compiles nothing yet.

        Args:
          cfg: a mixture.
          batches: the text.
          mesh: the devices, over which rows are divided; None: the default one.
        """
        self._cfg, self._batches = cfg, batches
        self.tokens = int(sum((batch.weights > 0).sum() for batch in batches))
        self._mesh = mesh or make_mesh(MeshShape(data=1), 1)
        self._nats = nats_step(cfg, self._mesh)

    def value(self, params: Params) -> float:
        """Nats per token."""
        return sum(float(self._on_rows(self._nats, params, batch)) for batch in self._batches) / self.tokens

    def loss(self, value: float, whole: float) -> float:
        """The growth of the perplexity."""
        return perplexity_loss(value, whole)

    def visited(self, params: Params) -> Visited:
        """Counts the visits of experts by the text's tokens."""
        everywhere = NamedSharding(self._mesh, PartitionSpec())
        route = jax.jit(functools.partial(_visited, self._cfg), out_shardings=everywhere)
        read = [each.weights > 0 for each in self._batches]
        each_route = (np.asarray(self._on_rows(route, params, each)) for each in self._batches)
        ids = np.concatenate([found[:, where] for found, where in zip(each_route, read, strict=True)], axis=1)
        tokens = [np.asarray(each.tokens)[where] for each, where in zip(self._batches, read, strict=True)]
        return Visited.of(ids, np.concatenate(tokens), self._cfg.experts)

    def _on_rows(self, step: Callable[..., jax.Array], params: Params, batch: Batch) -> jax.Array:
        """Runs a step on a batch with rows divided over the mesh."""
        with jax.set_mesh(self._mesh):
            return step(params, jax.tree.map(lambda part: part[0], place_rows(batch, self._mesh, 1)))


def nats_step(cfg: ModelConfig, mesh: Mesh) -> Callable[[Params, Batch], jax.Array]:
    """The compiled step of (parameters, batch), both on the mesh, to the loss summed over the targets."""
    return jax.jit(functools.partial(_nats, cfg), out_shardings=NamedSharding(mesh, PartitionSpec()))


def _nats(cfg: ModelConfig, params: Params, batch: Any) -> jax.Array:
    """The loss of a batch, summed over its targets."""
    hidden = decoder.forward_documents(params, batch.tokens, batch.starts, cfg=cfg, differentiable=False)
    logits = decoder.logits(params, hidden, cfg=cfg)
    losses = next_token_losses(Outputs(params, hidden, logits, None, cfg), batch)
    return jnp.sum(jnp.where(batch.weights > 0, losses, jnp.zeros_like(losses)))


def _visited(cfg: ModelConfig, params: Params, batch: Any) -> jax.Array:
    """Returns the experts `[L_sparse, B, T, k]` that tokens visit."""
    inputs = params, batch.tokens, batch.starts
    _, routing = decoder.forward_documents_with_routing(*inputs, cfg=cfg, differentiable=False)
    return routing.ids
