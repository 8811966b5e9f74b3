"""Runs the second half of a layer of an encoder-decoder: a feed-forward block, or experts with a capacity
(Switch, arXiv 2101.03961)."""

from typing import TypedDict

import jax
import jax.numpy as jnp

from jaxllm.config import ModelConfig
from jaxllm.experts.mixture import mixture
from jaxllm.experts.routing import Routing, route
from jaxllm.kernels.used_units import UsedUnits
from jaxllm.models.layer_params import LayerParams
from jaxllm.nn.layers import activate
from jaxllm.nn.linear import FeedForward, feed_forward, from_units, to_units
from jaxllm.nn.norms import normalize


class SharedOptions(TypedDict):
    """Options that all products of a block take (see `jaxllm.nn.linear`)."""

    used: UsedUnits | None
    live: jax.Array | None
    rowwise: bool


def fed_forward(
    weights: LayerParams,
    x: jax.Array,
    cfg: ModelConfig,
    layer: int,
    valid: jax.Array,
    live: jax.Array | None,
    rowwise: bool = False,
) -> jax.Array:
    """The second half of a layer: a feed-forward block, or experts."""
    norm = weights.norm("ffn_norm", cfg)
    if cfg.is_sparse(layer):
        return _visited(weights, x, cfg, valid, rowwise)
    block = FeedForward(
        up=weights["ffn.up"],
        down=weights["ffn.down"],
        gate=weights["ffn.gate"] if cfg.gated_ffn else None,
        up_bias=weights.vector("ffn.up_bias"),
        down_bias=weights.vector("ffn.down_bias"),
        activation=cfg.activation,
    )
    _, neurons = weights.used
    shared: SharedOptions = {"used": neurons, "live": live, "rowwise": rowwise}
    if not cfg.norm_after:
        return feed_forward(x, norm, block, add_input=True, **shared)
    hidden = activate(to_units(x, block.up, block.up_bias, **shared), cfg.activation)
    mixed = from_units(hidden, block.down, block.down_bias, residual=x, **shared)
    return normalize(mixed, norm)


def _visited(
    weights: LayerParams, x: jax.Array, cfg: ModelConfig, valid: jax.Array, rowwise: bool
) -> jax.Array:
    """The experts of a layer (see `routed`)."""
    routing, taken = routed(weights, x, cfg, valid, rowwise)
    block = FeedForward(up=weights["experts.up"], down=weights["experts.down"], activation=cfg.activation)
    return mixture(x, weights.norm("ffn_norm", cfg), routing, block, add_input=True, live=taken)


def routed(
    weights: LayerParams, x: jax.Array, cfg: ModelConfig, valid: jax.Array, rowwise: bool
) -> tuple[Routing, jax.Array]:
    """The routing of tokens, and which of the T visit their expert: each token the likeliest one, unless as
    many tokens before it as the expert's capacity visit the same. Nodes of a tree (`rowwise`) come alone, so
    that none is too many."""
    norm = weights.norm("ffn_norm", cfg)
    routing = route(x, weights["router"], experts_per_token=1, normalize=False, norm=norm)  # pyright: ignore
    real = jnp.arange(x.shape[1], dtype=jnp.int32) < valid
    return routing, real if rowwise else within_capacity(routing, real, cfg)


def within_capacity(routing: Routing, real: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Which tokens visit their expert, `[B, T]` bool: of those that chose the same as many as it takes, the
    first ones of each row. `real` `[T]` or `[B, T]` bool is False for padding, which takes no place."""
    visits = jax.nn.one_hot(routing.ids[..., 0], cfg.experts, dtype=jnp.int32)
    visits = jnp.where(real[..., None], visits, 0)
    rank = jnp.take_along_axis(jnp.cumsum(visits, axis=1), routing.ids, axis=-1)[..., 0]
    return real & (rank <= cfg.expert_capacity)
