"""The decoder that every architecture here shares: its forward with a cache, and over whole documents.

Architectures differ only in `ModelConfig`; each file beside this one translates a checkpoint format
into it. Parameters are those of `parameters.py`.
"""

import dataclasses
import functools
from typing import overload

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.documents import Branches, document_positions
from jaxllm.errors import ConfigError
from jaxllm.experts.routing import Routing
from jaxllm.kv.cache import KVCache, Places
from jaxllm.layers import (
    normalize,
)
from jaxllm.linear import embed, to_units
from jaxllm.models.block import (
    Attend,
    attend_cache,
    attend_documents,
    attended,
    chosen_experts,
    rotary_tables_of,
    run_layer,
)
from jaxllm.models.layer_params import LayerParams
from jaxllm.models.parameters import Params
from jaxllm.used_units import PARAMETER


@overload
def forward(
    params: Params,
    tokens: jax.Array,
    cache: None = None,
    *,
    cfg: ModelConfig,
    valid: jax.Array | None = None,
    dtype: jnp.dtype = ...,
) -> tuple[jax.Array, None]: ...


@overload
def forward(
    params: Params,
    tokens: jax.Array,
    cache: KVCache,
    *,
    cfg: ModelConfig,
    valid: jax.Array | None = None,
    dtype: jnp.dtype = ...,
) -> tuple[jax.Array, KVCache]: ...


def forward(
    params: Params,
    tokens: jax.Array,
    cache: KVCache | None = None,
    *,
    cfg: ModelConfig,
    valid: jax.Array | None = None,
    dtype: jnp.dtype = jnp.float32,
) -> tuple[jax.Array, KVCache | None]:
    """Hidden states of new tokens, and the cache with their keys and values.

    Args:
      params: see the module docstring; leaves may be quantized.
      tokens: `[B, T]` int32, ids in [0, V). They follow the `cache.length` tokens already seen.
      cache: where past keys and values are; None attends within `tokens` alone (training).
      cfg: the model.
      valid: int32 scalar, how many of the T tokens are real; the rest is padding at the end, written
        nowhere. None means all.
      dtype: of the activations.

    Returns:
      Hidden states after the final norm `[B, T, D]`, and the cache with `length + valid` tokens (None
      without a cache).
    """
    if cache is None:
        return forward_documents(params, tokens, cfg=cfg, dtype=dtype), None
    count = tokens.shape[1]
    padded = valid is not None
    at = Places.after(cache.length, count, valid if padded else jnp.asarray(count, jnp.int32))
    x, cache = forward_at(params, tokens, cache, at, cfg=cfg, dtype=dtype, padded=padded)
    return x, dataclasses.replace(cache, length=cache.length + at.valid)


def forward_at(
    params: Params,
    tokens: jax.Array,
    cache: KVCache,
    at: Places,
    *,
    cfg: ModelConfig,
    dtype: jnp.dtype = jnp.float32,
    padded: bool = True,
) -> tuple[jax.Array, KVCache]:
    """`forward` of tokens that stand anywhere in a cache, whose length it leaves as it is.

    Args:
      params, tokens, cache, cfg, dtype: see `forward`.
      at: where the tokens stand (see `forward_layer`).
      padded: whether some tokens may not be real.
    """
    x = embed_tokens(params, tokens, at.positions, cfg=cfg, dtype=dtype)
    kept, mass = [], cache.mass
    for layer in range(cfg.layers):
        past = (cache.keys[layer], cache.values[layer])
        x, past, mass = forward_layer(params, x, at, past, mass, cfg=cfg, layer=layer, padded=padded)
        kept.append(past)
    x = normalize(x, LayerParams(params, "").norm("final_norm", cfg))
    keys, values = zip(*kept, strict=True)
    return x, KVCache(keys=keys, values=values, length=cache.length, mass=mass)


def embed_tokens(
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    *,
    cfg: ModelConfig,
    dtype: jnp.dtype = jnp.float32,
) -> jax.Array:
    """What the first layer takes, `[B, T, D]`, for tokens `[B, T]` int32 at `positions` `[T]` or `[B, T]`."""
    x = embed(tokens, params["embed.tokens"], dtype)
    if cfg.embed_scale != 1.0:
        x = x * np.asarray(cfg.embed_scale, x.dtype)
    if cfg.learned_positions:
        x = x + embed(positions, params["embed.positions"], dtype)
    return x


def forward_layer(
    params: Params,
    x: jax.Array,
    at: Places,
    past: tuple[jax.Array, jax.Array],
    mass: jax.Array | None = None,
    *,
    cfg: ModelConfig,
    layer: int,
    padded: bool = True,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array], jax.Array | None]:
    """One layer over new tokens anywhere in a cache: what `forward` does with each.

    The tokens need not follow one another: each attends to every position up to its own, which must hold
    keys and values by then, and gets those of its own. Those of a tree come out as each would alone, to the
    bit where native kernels compute them.

    Args:
      params: at least the layer's.
      x: `[B, T, D]`, the layer's input.
      at: where the tokens stand.
      past: keys and values of this layer `[B, K, S, H]`.
      mass: see `KVCache`; None where nobody asked for it.
      cfg: the model.
      layer: its index.
      padded: whether some tokens may not be real.

    Returns:
      The next layer's input, keys and values with the new rows, and the mass with these tokens' share.
    """
    attend = functools.partial(attend_cache, cfg=cfg, layer=layer, at=at, past=past, mass=mass)
    live = jnp.arange(x.shape[1], dtype=jnp.int32) < at.valid if padded else None
    weights, rowwise = LayerParams(params, f"layers.{layer}."), at.tree is not None
    x, (keys, values, mass), _ = run_layer(weights, x, cfg, layer, attend, live=live, rowwise=rowwise)
    return x, (keys, values), mass


def forward_to_experts(
    params: Params,
    x: jax.Array,
    at: Places,
    past: tuple[jax.Array, jax.Array],
    mass: jax.Array | None = None,
    *,
    cfg: ModelConfig,
    layer: int,
) -> tuple[jax.Array, Routing, tuple[jax.Array, jax.Array], jax.Array | None]:
    """`forward_layer` of a sparse layer up to its experts.

    Returns:
      What the experts take, whom the tokens visit, keys and values, and the mass.
    """
    weights = LayerParams(params, f"layers.{layer}.")
    attend = functools.partial(attend_cache, cfg=cfg, layer=layer, at=at, past=past, mass=mass)
    x, (keys, values, mass) = attended(weights, x, cfg, layer, attend, at.tree is not None)
    return x, chosen_experts(weights, x, cfg), (keys, values), mass


def forward_documents(
    params: Params,
    tokens: jax.Array,
    starts: jax.Array | None = None,
    branches: Branches | None = None,
    *,
    cfg: ModelConfig,
    dtype: jnp.dtype = jnp.float32,
    remat: bool = False,
    differentiable: bool = True,
) -> jax.Array:
    """Hidden states of whole documents, packed one behind the other: what training differentiates.

    Args:
      params: see `parameters.py`; leaves may be quantized.
      tokens: `[B, T]` int32, ids in [0, V).
      starts: `[B, T]` int32, where in its row the document of each token begins. Tokens attend within their
        document and positions count from its beginning. None: a row is one document.
      branches: documents with several ends; None: they have one.
      cfg: the model.
      dtype: of the activations.
      remat: keep only each layer's input for the backward pass, and compute the rest again.
      differentiable: whether gradients may be asked for; False reads fewer experts.

    Returns:
      Hidden states after the final norm `[B, T, D]`.
    """
    return _forward_documents(params, tokens, starts, branches, cfg, dtype, remat, differentiable)[0]


def forward_documents_with_routing(
    params: Params,
    tokens: jax.Array,
    starts: jax.Array | None = None,
    *,
    cfg: ModelConfig,
    dtype: jnp.dtype = jnp.float32,
    remat: bool = False,
) -> tuple[jax.Array, Routing]:
    """`forward_documents`, and what the routers decided, for losses and statistics.

    Returns:
      Hidden states, and the routing of all tokens with the sparse layers in front: logits
      `[L_sparse, B, T, E]`, ids and weights `[L_sparse, B, T, k]`.

    Raises:
      ConfigError: the model has no experts.
    """
    if not cfg.experts:
        raise ConfigError("a model without experts has no routing; call forward_documents")
    hidden, routings = _forward_documents(params, tokens, starts, None, cfg, dtype, remat, True)
    return hidden, jax.tree.map(lambda *layers: jnp.stack(layers), *routings)


def _forward_documents(
    params: Params,
    tokens: jax.Array,
    starts: jax.Array | None,
    branches: Branches | None,
    cfg: ModelConfig,
    dtype: jnp.dtype,
    remat: bool,
    differentiable: bool,
) -> tuple[jax.Array, list[Routing]]:
    """`forward_documents`, and the routing of each sparse layer."""
    starts = jnp.zeros(tokens.shape, jnp.int32) if starts is None else starts
    positions = document_positions(starts, branches)
    tables = rotary_tables_of(positions, cfg)
    x = embed_tokens(params, tokens, positions, cfg=cfg, dtype=dtype)
    routings = []
    for layer in range(cfg.layers):
        attend = functools.partial(
            attend_documents,
            cfg=cfg,
            table=tables.get(cfg.layer_rope(layer)),
            starts=starts,
            branches=branches,
            window=cfg.attention_windows[layer],
        )
        prefix = f"layers.{layer}."
        run = functools.partial(
            _document_layer, cfg=cfg, layer=layer, attend=attend, differentiable=differentiable
        )
        # What is computed again must be told from what is kept: a layer takes its own parameters alone.
        weights = {name: params[name] for name in params if name.startswith(prefix) or name == PARAMETER}
        x, routing = (jax.checkpoint(run) if remat else run)(weights, x)
        routings += [] if routing is None else [routing]
    return normalize(x, LayerParams(params, "").norm("final_norm", cfg)), routings


def logits(params: Params, hidden: jax.Array, *, cfg: ModelConfig, rowwise: bool = False) -> jax.Array:
    """Next-token logits `[..., V]` float32 of hidden states `[..., D]`; for `rowwise` see `linear.py`."""
    table = params["embed.tokens" if cfg.tied_head else "head"]
    out = to_units(hidden, table, rowwise=rowwise).astype(jnp.float32)
    if cfg.logit_softcap:
        cap = np.float32(cfg.logit_softcap)
        out = jnp.tanh(out / cap) * cap
    return out


def _document_layer(
    weights: Params,
    x: jax.Array,
    *,
    cfg: ModelConfig,
    layer: int,
    attend: Attend[None],
    differentiable: bool,
) -> tuple[jax.Array, Routing | None]:
    prefixed = LayerParams(weights, f"layers.{layer}.")
    x, _, routing = run_layer(prefixed, x, cfg, layer, attend, differentiable=differentiable)
    return x, routing
