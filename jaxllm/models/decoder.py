"""The decoder that every architecture here shares: names and shapes of its parameters, and its forward.

Architectures differ only in `ModelConfig`; each file beside this one translates a checkpoint format
into it. Parameters are a flat dict with stable string keys:

    embed.tokens [V, D]            embed.positions [P, D]
    layers.{i}.attn_norm.scale/bias [D]          (and attn_post_norm, ffn_norm, ffn_post_norm)
    layers.{i}.attn.q [K, G·H, D]  .k [K, H, D]  .v [K, H, D]  .o [K, G·H, D]   (+ q_bias ...)
    layers.{i}.attn.q_norm.scale [H]             .k_norm.scale [H]
    layers.{i}.ffn.gate [F, D]     .up [F, D]    .down [F, D]                   (+ gate_bias ...)
    layers.{i}.router [E, D]       .experts.gate [E, F, D]  .up [E, F, D]  .down [E, F, D]   (or these)
    final_norm.scale/bias [D]      head [V, D]

The unit axis leads (kv-groups K, neurons F): a sub-model is a prefix of each buffer. Where a layer has
experts, an expert is one entry of the leading axis.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.experts.mixture import mixture
from jaxllm.experts.routing import Routing, route
from jaxllm.kv.cache import KVCache
from jaxllm.layers import (
    Norm,
    attention,
    cached_attention,
    causal_mask,
    normalize,
    rotary_tables,
    rotate,
)
from jaxllm.linear import FeedForward, embed, feed_forward, from_units, normed_to_units, to_units
from jaxllm.quant import Weight

Params = Mapping[str, Weight]
Role = Literal["embed", "to_units", "from_units", "vector"]


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """Shape of one parameter and the part it plays (which decides how it may be quantized)."""

    shape: tuple[int, ...]
    role: Role


def param_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """Every parameter of the model, layer by layer, in the order in which a step reads them."""
    width = cfg.hidden_size
    specs = {"embed.tokens": ParamSpec((cfg.vocab_size, width), "embed")}
    if cfg.learned_positions:
        specs["embed.positions"] = ParamSpec((cfg.window_tokens, width), "vector")
    for layer in range(cfg.layers):
        for name, spec in _layer_specs(cfg, layer).items():
            specs[f"layers.{layer}.{name}"] = spec
    specs.update(_norm_specs(cfg, "final_norm"))
    if not cfg.tied_head:
        specs["head"] = ParamSpec((cfg.vocab_size, width), "embed")
    return specs


def _norm_specs(cfg: ModelConfig, name: str) -> dict[str, ParamSpec]:
    parts = ("scale", "bias") if cfg.norm == "layer" else ("scale",)
    return {f"{name}.{part}": ParamSpec((cfg.hidden_size,), "vector") for part in parts}


def _layer_specs(cfg: ModelConfig, layer: int) -> dict[str, ParamSpec]:
    units, head, width = cfg.kv_heads, cfg.head_dim, cfg.hidden_size
    queries = cfg.group * head
    specs = _norm_specs(cfg, "attn_norm")
    rows = {"q": queries, "k": head, "v": head}
    for name, count in rows.items():
        specs[f"attn.{name}"] = ParamSpec((units, count, width), "to_units")
        if cfg.qkv_bias:
            specs[f"attn.{name}_bias"] = ParamSpec((units, count), "vector")
    if cfg.qk_norm:
        specs["attn.q_norm.scale"] = ParamSpec((head,), "vector")
        specs["attn.k_norm.scale"] = ParamSpec((head,), "vector")
    specs["attn.o"] = ParamSpec((units, queries, width), "from_units")
    if cfg.o_bias:
        specs["attn.o_bias"] = ParamSpec((width,), "vector")
    if cfg.post_norms:
        specs.update(_norm_specs(cfg, "attn_post_norm"))
    specs.update(_norm_specs(cfg, "ffn_norm"))
    specs.update(_expert_specs(cfg) if cfg.is_sparse(layer) else _ffn_specs(cfg))
    if cfg.post_norms:
        specs.update(_norm_specs(cfg, "ffn_post_norm"))
    return specs


def _ffn_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    specs = {}
    for name in ("gate", "up") if cfg.gated_ffn else ("up",):
        specs[f"ffn.{name}"] = ParamSpec((cfg.ffn_size, cfg.hidden_size), "to_units")
        if cfg.ffn_bias:
            specs[f"ffn.{name}_bias"] = ParamSpec((cfg.ffn_size,), "vector")
    specs["ffn.down"] = ParamSpec((cfg.ffn_size, cfg.hidden_size), "from_units")
    if cfg.ffn_bias:
        specs["ffn.down_bias"] = ParamSpec((cfg.hidden_size,), "vector")
    return specs


def _expert_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    shape = (cfg.experts, cfg.expert_ffn_size, cfg.hidden_size)
    return {
        # Small, and what it rounds away decides which experts run: never quantized.
        "router": ParamSpec((cfg.experts, cfg.hidden_size), "vector"),
        "experts.gate": ParamSpec(shape, "to_units"),
        "experts.up": ParamSpec(shape, "to_units"),
        "experts.down": ParamSpec(shape, "from_units"),
    }


def init_params(cfg: ModelConfig, key: jax.Array, dtype: jnp.dtype = jnp.float32) -> dict[str, jax.Array]:
    """Random parameters to train from: normal weights of variance 1/fan-in, norms at one."""
    specs = param_specs(cfg)
    keys = jax.random.split(key, len(specs))
    return {name: init_param(cfg, name, each, dtype) for name, each in zip(specs, keys, strict=True)}


def init_param(cfg: ModelConfig, name: str, key: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The initial value of one parameter (see `init_params`)."""
    spec = param_specs(cfg)[name]
    if name.endswith("norm.scale"):
        return jnp.ones(spec.shape, dtype)
    if name.endswith("bias"):
        return jnp.zeros(spec.shape, dtype)
    if name.startswith("embed.") or name == "head":
        return jax.random.normal(key, spec.shape, dtype) * np.asarray(0.02, dtype)
    # An expert contracts its own neurons, a kv head's output those of all heads.
    units = spec.shape[1:-1] if ".experts." in name else spec.shape[:-1]
    fan_in = int(np.prod(units)) if spec.role == "from_units" else spec.shape[-1]
    deviation = fan_in**-0.5
    if spec.role == "from_units":
        # Residual branches add up over 2·L blocks (GPT-2's scaling).
        deviation *= (2 * cfg.layers) ** -0.5
    return jax.random.normal(key, spec.shape, dtype) * np.asarray(deviation, dtype)


def parameter_count(cfg: ModelConfig) -> int:
    """Number of scalar parameters."""
    return sum(int(np.prod(spec.shape)) for spec in param_specs(cfg).values())


def active_parameter_count(cfg: ModelConfig) -> int:
    """Number of scalar parameters that one token uses: all, but of each layer's experts only its k."""
    idle = cfg.experts - cfg.experts_per_token
    return sum(
        int(np.prod((spec.shape[0] - idle, *spec.shape[1:]) if ".experts." in name else spec.shape))
        for name, spec in param_specs(cfg).items()
    )


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
    hidden, cache, _ = _forward(params, tokens, cache, cfg=cfg, valid=valid, dtype=dtype)
    return hidden, cache


def forward_with_routing(
    params: Params,
    tokens: jax.Array,
    cache: KVCache | None = None,
    *,
    cfg: ModelConfig,
    valid: jax.Array | None = None,
    dtype: jnp.dtype = jnp.float32,
) -> tuple[jax.Array, KVCache | None, Routing]:
    """`forward`, and what the routers decided, for losses and statistics.

    Returns:
      Hidden states and cache as `forward` returns them, and the routing of all tokens (padding too)
      with the sparse layers in front: logits `[L_sparse, B, T, E]`, ids and weights `[L_sparse, B, T, k]`.

    Raises:
      ConfigError: the model has no experts.
    """
    if not cfg.experts:
        raise ConfigError("a model without experts has no routing; call forward")
    hidden, cache, routings = _forward(params, tokens, cache, cfg=cfg, valid=valid, dtype=dtype)
    return hidden, cache, jax.tree.map(lambda *layers: jnp.stack(layers), *routings)


def _forward(
    params: Params,
    tokens: jax.Array,
    cache: KVCache | None,
    *,
    cfg: ModelConfig,
    valid: jax.Array | None,
    dtype: jnp.dtype,
) -> tuple[jax.Array, KVCache | None, list[Routing]]:
    """`forward`, and the routing of each sparse layer."""
    count = tokens.shape[1]
    start = jnp.zeros((), jnp.int32) if cache is None else cache.length
    live = None if valid is None else jnp.arange(count, dtype=jnp.int32) < valid
    valid = jnp.asarray(count, jnp.int32) if valid is None else valid
    positions = start + jnp.arange(count, dtype=jnp.int32)
    keys = count if cache is None else cache.capacity_tokens
    tables = {rope: rotary_tables(positions, rope) for rope in (cfg.rope, cfg.local_rope) if rope is not None}
    masks = {window: causal_mask(positions, keys, window) for window in sorted(set(cfg.attention_windows))}

    x = embed(tokens, params["embed.tokens"], dtype)
    if cfg.embed_scale != 1.0:
        x = x * np.asarray(cfg.embed_scale, x.dtype)
    if cfg.learned_positions:
        x = x + embed(positions, params["embed.positions"], dtype)
    new_keys, new_values, routings = [], [], []
    for layer in range(cfg.layers):
        weights = _LayerParams(params, f"layers.{layer}.")
        past = None if cache is None else (cache.keys[layer], cache.values[layer])
        rope = cfg.layer_rope(layer)
        mixed, k, v = _attend(
            weights,
            x,
            past,
            cfg,
            table=None if rope is None else tables[rope],
            mask=masks[cfg.attention_windows[layer]],
            window=cfg.attention_windows[layer],
            start=start,
            valid=valid,
        )
        new_keys.append(k)
        new_values.append(v)
        x = x + normalize(mixed, weights.norm("attn_post_norm", cfg)) if cfg.post_norms else mixed
        if cfg.is_sparse(layer):
            mixed, routing = _experts(weights, x, cfg, live=live, differentiable=cache is None)
            routings.append(routing)
        else:
            mixed = _ffn(weights, x, cfg)
        x = x + normalize(mixed, weights.norm("ffn_post_norm", cfg)) if cfg.post_norms else mixed
    x = normalize(x, _LayerParams(params, "").norm("final_norm", cfg))
    if cache is not None:
        cache = KVCache(keys=tuple(new_keys), values=tuple(new_values), length=start + valid)
    return x, cache, routings


def logits(params: Params, hidden: jax.Array, *, cfg: ModelConfig) -> jax.Array:
    """Next-token logits `[..., V]` float32 of hidden states `[..., D]`."""
    table = params["embed.tokens" if cfg.tied_head else "head"]
    out = to_units(hidden, table).astype(jnp.float32)
    if cfg.logit_softcap:
        cap = np.float32(cfg.logit_softcap)
        out = jnp.tanh(out / cap) * cap
    return out


class _LayerParams:
    """The parameters under one prefix; `bias` returns None where the model has none."""

    def __init__(self, params: Params, prefix: str) -> None:
        self._params, self._prefix = params, prefix

    def __getitem__(self, name: str) -> Weight:
        return self._params[self._prefix + name]

    def vector(self, name: str) -> jax.Array | None:
        found = self._params.get(self._prefix + name)
        assert found is None or isinstance(found, jax.Array | np.ndarray)
        return found

    def norm(self, name: str, cfg: ModelConfig) -> Norm:
        scale = self.vector(f"{name}.scale")
        assert scale is not None
        return Norm(scale=scale, bias=self.vector(f"{name}.bias"), eps=cfg.norm_eps)


def _attend(
    weights: _LayerParams,
    x: jax.Array,
    past: tuple[jax.Array, jax.Array] | None,
    cfg: ModelConfig,
    *,
    table: tuple[jax.Array, jax.Array] | None,
    mask: jax.Array,
    window: int,
    start: jax.Array,
    valid: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention block of `x` `[B, T, D]`: its output `[B, T, D]`, with x added unless a norm comes
    first, and the layer's keys and values."""
    q, k, v = normed_to_units(
        x,
        weights.norm("attn_norm", cfg),
        [weights[f"attn.{name}"] for name in "qkv"],
        [weights.vector(f"attn.{name}_bias") for name in "qkv"],
    )
    q = q.reshape(*q.shape[:3], -1, k.shape[-1])
    if cfg.qk_norm:
        q = normalize(q, weights.norm("attn.q_norm", cfg))
        k = normalize(k, weights.norm("attn.k_norm", cfg))
    scale, softcap = cfg.attention_scale, cfg.attention_softcap
    if past is None:
        if table is not None:
            q, k = rotate(q, *table), rotate(k, *table)
        k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        out = attention(q, k, v, mask, scale=scale, softcap=softcap)
    else:
        out, k, v = cached_attention(
            q, k, v, table, past, mask, start, valid, scale=scale, softcap=softcap, window=window
        )
    out = out.reshape(*out.shape[:3], -1)
    residual = None if cfg.post_norms else x
    return from_units(out, weights["attn.o"], weights.vector("attn.o_bias"), residual=residual), k, v


def _ffn(weights: _LayerParams, x: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Feed-forward block of `x` `[B, T, D]`, gated or plain, with x added unless a norm comes first."""
    gated = cfg.gated_ffn
    block = FeedForward(
        up=weights["ffn.up"],
        down=weights["ffn.down"],
        gate=weights["ffn.gate"] if gated else None,
        up_bias=weights.vector("ffn.up_bias"),
        down_bias=weights.vector("ffn.down_bias"),
        gate_bias=weights.vector("ffn.gate_bias") if gated else None,
    )
    norm = weights.norm("ffn_norm", cfg)
    return feed_forward(x, norm, block, cfg.activation, add_input=not cfg.post_norms)


def _experts(
    weights: _LayerParams, x: jax.Array, cfg: ModelConfig, *, live: jax.Array | None, differentiable: bool
) -> tuple[jax.Array, Routing]:
    """Mixture of experts of `x` `[B, T, D]`, with x added unless a norm comes first, and the routing."""
    norm = weights.norm("ffn_norm", cfg)
    routing = route(
        normalize(x, norm),
        weights["router"],
        experts_per_token=cfg.experts_per_token,
        normalize=cfg.normalize_expert_weights,
    )
    block = FeedForward(up=weights["experts.up"], down=weights["experts.down"], gate=weights["experts.gate"])
    out = mixture(x, norm, routing, block, cfg.activation, live=live, differentiable=differentiable)
    return out if cfg.post_norms else x + out, routing
