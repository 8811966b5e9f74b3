"""The decoder that every architecture here shares: names and shapes of its parameters, and its forward.

Architectures differ only in `ModelConfig`; each file beside this one translates a checkpoint format
into it. Parameters are a flat dict with stable string keys:

    embed.tokens [V, D]            embed.positions [P, D]
    layers.{i}.attn_norm.scale/bias [D]          (and attn_post_norm, ffn_norm, ffn_post_norm)
    layers.{i}.attn.q [K, G·H, D]  .k [K, H, D]  .v [K, H, D]  .o [K, G·H, D]   (+ q_bias ...)
    layers.{i}.attn.q_norm.scale [H]             .k_norm.scale [H]
    layers.{i}.ffn.gate [F, D]     .up [F, D]    .down [F, D]                   (+ gate_bias ...)
    final_norm.scale/bias [D]      head [V, D]

The unit axis leads (kv-groups K, neurons F): a sub-model is a prefix of each buffer.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.documents import Branches, document_attention, document_positions
from jaxllm.kv.cache import KVCache
from jaxllm.layers import (
    Norm,
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
RotaryTable = tuple[jax.Array, jax.Array]
Kept = TypeVar("Kept")
# Queries, keys and values of new tokens -> what they attend to, and what the layer keeps of it.
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Kept]]


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
        for name, spec in _layer_specs(cfg).items():
            specs[f"layers.{layer}.{name}"] = spec
    specs.update(_norm_specs(cfg, "final_norm"))
    if not cfg.tied_head:
        specs["head"] = ParamSpec((cfg.vocab_size, width), "embed")
    return specs


def _norm_specs(cfg: ModelConfig, name: str) -> dict[str, ParamSpec]:
    parts = ("scale", "bias") if cfg.norm == "layer" else ("scale",)
    return {f"{name}.{part}": ParamSpec((cfg.hidden_size,), "vector") for part in parts}


def _layer_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
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
    for name in ("gate", "up") if cfg.gated_ffn else ("up",):
        specs[f"ffn.{name}"] = ParamSpec((cfg.ffn_size, width), "to_units")
        if cfg.ffn_bias:
            specs[f"ffn.{name}_bias"] = ParamSpec((cfg.ffn_size,), "vector")
    specs["ffn.down"] = ParamSpec((cfg.ffn_size, width), "from_units")
    if cfg.ffn_bias:
        specs["ffn.down_bias"] = ParamSpec((width,), "vector")
    if cfg.post_norms:
        specs.update(_norm_specs(cfg, "ffn_post_norm"))
    return specs


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
    fan_in = int(np.prod(spec.shape[:-1])) if spec.role == "from_units" else spec.shape[-1]
    deviation = fan_in**-0.5
    if spec.role == "from_units":
        # Residual branches add up over 2·L blocks (GPT-2's scaling).
        deviation *= (2 * cfg.layers) ** -0.5
    return jax.random.normal(key, spec.shape, dtype) * np.asarray(deviation, dtype)


def parameter_count(cfg: ModelConfig) -> int:
    """Number of scalar parameters."""
    return sum(int(np.prod(spec.shape)) for spec in param_specs(cfg).values())


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
    start, capacity = cache.length, cache.capacity_tokens
    valid = jnp.asarray(count, jnp.int32) if valid is None else valid
    positions = start + jnp.arange(count, dtype=jnp.int32)
    masks = {
        window: causal_mask(positions, capacity, window) for window in sorted(set(cfg.attention_windows))
    }
    tables = _rotary_tables(positions, cfg)

    x = _embed(params, tokens, positions, cfg, dtype)
    kept = []
    for layer in range(cfg.layers):
        window = cfg.attention_windows[layer]
        attend = functools.partial(
            _attend_cache,
            cfg=cfg,
            table=tables.get(cfg.layer_rope(layer)),
            past=(cache.keys[layer], cache.values[layer]),
            mask=masks[window],
            window=window,
            start=start,
            valid=valid,
        )
        x, past = _layer(_LayerParams(params, f"layers.{layer}."), x, cfg, attend)
        kept.append(past)
    x = normalize(x, _LayerParams(params, "").norm("final_norm", cfg))
    keys, values = zip(*kept, strict=True)
    return x, KVCache(keys=keys, values=values, length=start + valid)


def forward_documents(
    params: Params,
    tokens: jax.Array,
    starts: jax.Array | None = None,
    branches: Branches | None = None,
    *,
    cfg: ModelConfig,
    dtype: jnp.dtype = jnp.float32,
    remat: bool = False,
) -> jax.Array:
    """Hidden states of whole documents, packed one behind the other: what training differentiates.

    Args:
      params: see the module docstring.
      tokens: `[B, T]` int32, ids in [0, V).
      starts: `[B, T]` int32, where in its row the document of each token begins. Tokens attend within their
        document and positions count from its beginning. None: a row is one document.
      branches: documents with several ends; None: they have one.
      cfg: the model.
      dtype: of the activations.
      remat: keep only each layer's input for the backward pass, and compute the rest again.

    Returns:
      Hidden states after the final norm `[B, T, D]`.
    """
    starts = jnp.zeros(tokens.shape, jnp.int32) if starts is None else starts
    positions = document_positions(starts, branches)
    tables = _rotary_tables(positions, cfg)
    x = _embed(params, tokens, positions, cfg, dtype)
    for layer in range(cfg.layers):
        attend = functools.partial(
            _attend_documents,
            cfg=cfg,
            table=tables.get(cfg.layer_rope(layer)),
            starts=starts,
            branches=branches,
            window=cfg.attention_windows[layer],
        )
        prefix = f"layers.{layer}."
        weights = {name: params[name] for name in params if name.startswith(prefix)}

        def run(
            weights: Params, x: jax.Array, attend: Attend[None] = attend, prefix: str = prefix
        ) -> jax.Array:
            return _layer(_LayerParams(weights, prefix), x, cfg, attend)[0]

        x = (jax.checkpoint(run) if remat else run)(weights, x)
    return normalize(x, _LayerParams(params, "").norm("final_norm", cfg))


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


def _rotary_tables(positions: jax.Array, cfg: ModelConfig) -> dict[RopeConfig | None, RotaryTable]:
    """The tables of every rotary embedding that some layer uses."""
    return {rope: rotary_tables(positions, rope) for rope in (cfg.rope, cfg.local_rope) if rope is not None}


def _embed(
    params: Params, tokens: jax.Array, positions: jax.Array, cfg: ModelConfig, dtype: jnp.dtype
) -> jax.Array:
    x = embed(tokens, params["embed.tokens"], dtype)
    if cfg.embed_scale != 1.0:
        x = x * np.asarray(cfg.embed_scale, x.dtype)
    if cfg.learned_positions:
        x = x + embed(positions, params["embed.positions"], dtype)
    return x


def _layer(
    weights: _LayerParams, x: jax.Array, cfg: ModelConfig, attend: Attend[Kept]
) -> tuple[jax.Array, Kept]:
    """One layer of `x` `[B, T, D]`: its output `[B, T, D]`, and what `attend` keeps."""
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
    out, kept = attend(q, k, v)
    out = out.reshape(*out.shape[:3], -1)
    # A block adds its input to its output itself, unless a norm comes between.
    residual = None if cfg.post_norms else x
    mixed = from_units(out, weights["attn.o"], weights.vector("attn.o_bias"), residual=residual)
    x = x + normalize(mixed, weights.norm("attn_post_norm", cfg)) if cfg.post_norms else mixed
    mixed = _ffn(weights, x, cfg)
    x = x + normalize(mixed, weights.norm("ffn_post_norm", cfg)) if cfg.post_norms else mixed
    return x, kept


def _attend_cache(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    cfg: ModelConfig,
    table: RotaryTable | None,
    past: tuple[jax.Array, jax.Array],
    mask: jax.Array,
    window: int,
    start: jax.Array,
    valid: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    scale, softcap = cfg.attention_scale, cfg.attention_softcap
    out, keys, values = cached_attention(
        q, k, v, table, past, mask, start, valid, scale=scale, softcap=softcap, window=window
    )
    return out, (keys, values)


def _attend_documents(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    cfg: ModelConfig,
    table: RotaryTable | None,
    starts: jax.Array,
    branches: Branches | None,
    window: int,
) -> tuple[jax.Array, None]:
    if table is not None:
        q, k = rotate(q, *table), rotate(k, *table)
    scale, softcap = cfg.attention_scale, cfg.attention_softcap
    out = document_attention(q, k, v, starts, scale=scale, softcap=softcap, window=window, branches=branches)
    return out, None


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
