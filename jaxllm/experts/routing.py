"""Routes tokens to experts, and computes the auxiliary losses of routers.

The router is one matrix `[E, D]`. The softmax is over all experts; then the k most probable are chosen and,
if the model normalizes, their probabilities divided by their sum, in the order of Mixtral and Qwen3-MoE.
Without normalization the weights of a token sum to less than one.
"""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.kernels import native_products
from jaxllm.kernels.converted import natively
from jaxllm.kernels.native import Operand, TableArray
from jaxllm.kernels.native_call import value
from jaxllm.nn.layers import Norm
from jaxllm.nn.layers import normalize as normalized
from jaxllm.nn.linear import to_units
from jaxllm.quant import Weight, dequantize

Floats = TypeVar("Floats", jax.Array, np.ndarray)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """A router's decisions; leading axes are those of the tokens (`[B, T]`, after a layer axis when stacked).

    Attributes:
      logits: `[..., E]` float32, the router's scores.
      ids: `[..., k]` int32, the chosen experts, most probable first, each once.
      weights: `[..., k]` float32, factors of the experts' outputs.
    """

    logits: jax.Array
    ids: jax.Array
    weights: jax.Array

    @property
    def probs(self) -> jax.Array:
        """Probabilities of all experts `[..., E]` float32."""
        return jax.nn.softmax(self.logits, axis=-1)


def route(
    x: jax.Array,
    router: Weight | TableArray,
    *,
    experts_per_token: int,
    normalize: bool,
    norm: Norm | None = None,
    bias: Operand | None = None,
    differentiable: bool = False,
) -> Routing:
    """Chooses experts for tokens.

    Args:
      x: `[..., D]`.
      router: `[E, D]`.
      experts_per_token: number of experts per token (k).
      normalize: whether the weights of a token sum to one.
      norm: the norm before the experts, if x is not yet normalized.
      bias: `[E]`, added to the scores; None for none.
      differentiable: whether gradients may be computed; they reach the router through the weights.

    Returns:
      The routing; of equal probabilities the lower id comes first. With native kernels routing is
      batch-invariant bitwise, because a near tie that flips changes the answer.
    """

    def by_xla(x: jax.Array, router: Weight | TableArray, bias: Operand | None, norm: Norm | None) -> Routing:
        added = None if bias is None else value(bias)
        matrix = value(router) if isinstance(router, TableArray) else router
        logits = to_units(x if norm is None else normalized(x, norm), matrix, added)
        weights, ids = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), experts_per_token)
        if normalize:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return Routing(logits=logits, ids=ids, weights=weights)

    def by_kernel(
        x: jax.Array, router: Weight | TableArray, bias: Operand | None, norm: Norm | None
    ) -> Routing:
        logits, weights, ids = native_products.route(
            x.reshape(-1, x.shape[-1]),
            router if isinstance(router, TableArray) else dequantize(router, jnp.dtype(jnp.float32)),
            experts_per_token=experts_per_token,
            normalize=normalize,
            norm_scale=None if norm is None else norm.scale,
            norm_eps=0.0 if norm is None else norm.eps,
            bias=bias,
        )
        return Routing(*(each.reshape(*x.shape[:-1], -1) for each in (logits, ids, weights)))

    # In float32 for any dtype of activations, so that near ties do not depend on it.
    x = x.astype(jnp.float32)
    if differentiable or (norm is not None and norm.bias is not None):
        return by_xla(x, router, bias, norm)
    return natively(by_kernel, by_xla, x, router, bias, norm)


def high_alone(weights: Floats, loss: float) -> Floats:
    """Experts of a token that can be approximated by their high plane, `[..., k]` bool.

    These are the least probable ones, with together at most `loss` of the sum of the weights
    (HOBBIT's idea). Independent of other tokens.

    Args:
      weights: `[..., k]` float32, most probable first; host arrays stay on the host.
      loss: a share in [0, 1].
    """
    xp = np if isinstance(weights, np.ndarray) else jnp
    behind = xp.flip(xp.cumsum(xp.flip(weights, -1), -1), -1)
    # Weights may be zero.
    alone: Any = (behind <= np.float32(loss) * behind[..., :1]) & (loss > 0)
    return alone


def load_balancing_loss(probs: jax.Array, ids: jax.Array) -> jax.Array:
    """E times the sum over experts of (share of tokens sent there) · (mean probability).

    Switch Transformer (arXiv 2101.03961), eq. 4 to 6, without its coefficient; as in transformers, all
    tokens of all layers are counted together, and with k choices per token the shares sum to k. So the loss
    is at least k, its value for a uniform router.

    Args:
      probs: `[..., E]`, a router's probabilities.
      ids: `[..., k]` int32, the chosen experts.

    Returns:
      A float32 scalar, differentiable in `probs`.
    """
    experts = probs.shape[-1]
    mean = jnp.mean(probs.astype(jnp.float32).reshape(-1, experts), axis=0)
    visits = jnp.bincount(ids.reshape(-1), length=experts).astype(jnp.float32)
    return jnp.sum(visits / np.float32(ids.size // ids.shape[-1]) * mean) * np.float32(experts)


def router_z_loss(logits: jax.Array) -> jax.Array:
    """Mean over tokens of the squared log of the sum of exponentials of `logits` `[..., E]`: a scalar.

    ST-MoE (arXiv 2202.08906), eq. 5, without its coefficient: keeps the logits small, where float32 and
    narrower types are exact.
    """
    return jnp.mean(jnp.square(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)))
