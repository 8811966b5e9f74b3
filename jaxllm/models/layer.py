"""Computes one layer: attention to a cache, a source or documents, then feed-forward block or experts."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes
from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.kernels.native_attention import row_attention
from jaxllm.kernels.native_call import UsedUnits, value
from jaxllm.kv.cache import Past, TokenPositions
from jaxllm.models.layer_stack import LayerParams
from jaxllm.nn.layers import (
    AttentionOptions,
    Heads,
    by_sequence,
    cached_attention,
    normalize,
    rotary_cos_sin,
    rotate,
)
from jaxllm.nn.linear import FeedForward, add_normed, feed_forward, from_units, normed_to_units

if TYPE_CHECKING:
    from jaxllm.experts.routing import Routing
    from jaxllm.nn.documents import Branches

CosSin = tuple[jax.Array, jax.Array]
# What gives attention the order of tokens: cos and sin of their positions, or a bias of relative positions.
TokenOrder = CosSin | jax.Array
Kept = TypeVar("Kept")
# (heads of new tokens, used heads) -> (attention outputs, the layer's state, such as the cache).
Attend = Callable[[Heads, UsedUnits | None], tuple[jax.Array, Kept]]
# Changes activations `[B, T, ...]` in training, such as by dropout.
Drop = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a layer's products.

    Attributes:
      valid: int32 scalar; the first `valid` of the T tokens are valid: outputs of the others are undefined.
        For several sequences of one token each it is the number of valid sequences. None: all.
      batch_invariant: see `linear.py`.
    """

    valid: jax.Array | None = None
    batch_invariant: bool = False

    @classmethod
    def at(cls, at: TokenPositions) -> "Rows":
        """Those of new tokens of a cache; nodes of a tree are batch-invariant."""
        return cls(at.valid if at.padded else None, at.tree is not None)

    def valid_rows(self, x: jax.Array) -> jax.Array | None:
        """The number of rows of `x` `[B, T, D]` that products compute; None for all, as of several sequences
        of several tokens."""
        return self.valid if 1 in x.shape[:2] else None


ALL_ROWS = Rows()


def run_layer(
    weights: LayerParams,
    x: jax.Array,
    cfg: ModelConfig,
    layer: int,
    attend: Attend[Kept],
    *,
    rows: Rows = ALL_ROWS,
    differentiable: bool = False,
) -> "tuple[jax.Array, Kept, Routing | None]":
    """One layer of `x` `[B, T, D]`: its output, the state from `attend`, and the routing if it is sparse."""
    before = x
    x, kept = attended(weights, x, cfg, attend, rows=rows)
    mixed, routing = fed_forward(weights, x, before, cfg, layer, rows=rows, differentiable=differentiable)
    return mixed, kept, routing


def fed_forward(
    weights: LayerParams,
    x: jax.Array,
    before: jax.Array,
    cfg: ModelConfig,
    layer: int,
    *,
    rows: Rows = ALL_ROWS,
    differentiable: bool = False,
) -> "tuple[jax.Array, Routing | None]":
    """The second half of a layer: feed-forward block or experts of `x` `[B, T, D]`, and the routing if it is
    sparse. `before` is the layer's input."""
    routing = None
    if cfg.is_sparse(layer) and rows.batch_invariant and x.shape[0] > 1:
        # Sequences visit different experts, and which of them share a product must not show.
        mixed = by_sequence(
            lambda x: _experts(weights, x, cfg, chosen_experts(weights, x, cfg)), x, batch_invariant=True
        )
    elif cfg.is_sparse(layer):
        routing = chosen_experts(weights, x, cfg, differentiable=differentiable)
        visiting = visiting_tokens(routing, cfg, rows)
        mixed = _experts(weights, x, cfg, routing, valid_rows=visiting, differentiable=differentiable)
    else:
        mixed = dense_block(weights, before if cfg.parallel_blocks else x, cfg, rows)
        mixed = x + mixed if cfg.parallel_blocks else mixed
    if cfg.post_norms:
        norm = weights.norm("ffn_post_norm", cfg)
        mixed = add_normed(x, mixed, norm, rows.valid_rows(x), batch_invariant=rows.batch_invariant)
    return (normalize(mixed, weights.norm("ffn_norm", cfg)) if cfg.norm_after else mixed), routing


def attended(
    weights: LayerParams,
    x: jax.Array,
    cfg: ModelConfig,
    attend: Attend[Kept],
    *,
    name: str = "attn",
    heads: Heads | None = None,
    rows: Rows = ALL_ROWS,
    drop: Drop | None = None,
) -> tuple[jax.Array, Kept]:
    """The first half of a layer: attention, and the state from `attend`.

    Args:
      weights, x, cfg, attend, rows: see `run_layer`.
      name: "attn", or "cross" for attention to a source, for which only queries are new.
      heads: inputs of attention; None for those of the layer's own products of x.
      drop: changes the output before x is added.
    """
    valid_rows, batch_invariant, (groups, _) = rows.valid_rows(x), rows.batch_invariant, weights.used
    shared: dict[str, Any] = {"used": groups, "batch_invariant": batch_invariant, "valid_rows": valid_rows}
    gate: list[jax.Array] = []
    if heads is None:
        names = ["q"] if name == "cross" else ["q", "k", "v", *(["gate"] if cfg.attention_gate else [])]
        matrices = [weights[f"{name}.{part}"] for part in names]
        biases = [weights.vector(f"{name}.{part}_bias") for part in names]
        q, *others = normed_to_units(x, weights.pre_norm(f"{name}_norm", cfg), matrices, biases, **shared)
        if name == "cross":
            heads = Heads(q.reshape(*q.shape[:3], cfg.group, cfg.head_dim), None, None)  # pyright: ignore
        else:
            k, v, *gate = others
            heads = normed_heads(weights, q, k, v, cfg, batch_invariant=batch_invariant)
    out, kept = attend(heads, groups)
    out = out.reshape(*out.shape[:3], out.shape[-2] * out.shape[-1])
    if gate:
        out = by_sequence(
            lambda out, gate: out * jax.nn.sigmoid(gate), out, *gate, batch_invariant=batch_invariant
        )
    # The output product adds the residual, unless something comes between.
    residual = None if cfg.post_norms or drop is not None else x
    o_bias = weights.vector(f"{name}.o_bias")
    mixed = from_units(out, weights[f"{name}.o"], o_bias, residual=residual, **shared)
    if drop is not None:
        mixed = x + drop(mixed)
    if cfg.post_norms:
        mixed = add_normed(
            x, mixed, weights.norm(f"{name}_post_norm", cfg), valid_rows, batch_invariant=batch_invariant
        )
    return (normalize(mixed, weights.norm(f"{name}_norm", cfg)) if cfg.norm_after else mixed), kept


def normed_heads(
    weights: LayerParams,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cfg: ModelConfig,
    *,
    batch_invariant: bool = False,
) -> Heads:
    """Inputs of attention from a layer's products `[B, T, K, G·H]` and `[B, T, K, H]`, normalized and clipped
    as the model does; for `batch_invariant` see `by_sequence`."""

    def normed(each: jax.Array, name: str) -> jax.Array:
        return normalize(each, weights.norm(f"attn.{name}_norm", cfg), batch_invariant=batch_invariant)

    if cfg.joint_qk_norm:
        q, k = (
            normed(each.reshape(*each.shape[:2], -1), name).reshape(each.shape)
            for name, each in (("q", q), ("k", k))
        )
    q = q.reshape(*q.shape[:3], q.shape[-1] // k.shape[-1], k.shape[-1])
    if cfg.qk_norm and not cfg.joint_qk_norm:
        q, k = normed(q, "q"), normed(k, "k")
    if cfg.qkv_clip:
        q, k, v = (jnp.clip(each, -cfg.qkv_clip, cfg.qkv_clip) for each in (q, k, v))
    return Heads(q, k, v, weights.vector("attn.sink_logits"))


def attend_cache(
    new: Heads,
    used: UsedUnits | None,
    *,
    cfg: ModelConfig,
    layer: int,
    at: TokenPositions,
    past: Past,
    mass: jax.Array | None,
    order: TokenOrder | None = None,
) -> tuple[jax.Array, tuple[Past, jax.Array | None]]:
    """Attention of new tokens over a cache, into which their keys and values are written; for the other
    arguments see `decoder.forward_layer`.

    Returns:
      Outputs in the shape of the queries; and the updated keys and values, and mass.
    """
    window, rope = cfg.attention_windows[layer], cfg.layer_rope(layer)
    rotary, bias = (order, None) if isinstance(order, tuple) else (None, order)
    if rotary is None and rope is not None:
        rotary = rotary_cos_sin(at.positions, rope)
    new = grown(new, query_growth(at.positions, rope))
    mask = at.visible(past.capacity_tokens, window)
    options = attention_options(cfg, window, new, bias)
    out, past, mass = cached_attention(new, rotary, past, mask, at, mass, options=options, used=used)
    return out, (past, mass)


def attend_rows(
    new: Heads,
    used: UsedUnits | None,
    rotary: Mapping[RopeConfig | None, CosSin],
    past: Sequence[Past],
    positions: jax.Array,
    written: jax.Array,
    *,
    cfg: ModelConfig,
    layer: int,
) -> tuple[jax.Array, list[Past]]:
    """Attention of one new token of each of B sequences over its own cache (see `attend_cache`), in one call
    of a native kernel.

    Args:
      rotary: cos and sin `[B, R]` at `positions`, by rotary embedding.
      positions: `[B]` int32, of the new tokens, also in the caches.
      written: `[B]` int32, 1 for sequences that run; of others the cache stays, and outputs are zeros.
    """
    rope, wide = cfg.layer_rope(layer), jnp.float32
    new = grown(new, query_growth(positions[:, None], rope))
    options = attention_options(cfg, cfg.attention_windows[layer], new)
    heads = None if used is None else value(used.counts)[..., used.column]
    if heads is not None:
        heads = heads[1:] if heads.ndim else jnp.broadcast_to(heads, positions.shape)
    out, caches = row_attention(
        new.q.astype(wide), new.k.astype(wide), new.v.astype(wide), rotary.get(rope),
        [(each.keys, each.values) for each in past], positions, written,
        slot=past[0].slot, scale=options.scale, softcap=options.softcap, window=options.window, heads=heads,
        sink_logits=options.sink_logits,
    )  # fmt: skip
    kept = [
        dataclasses.replace(each, keys=keys, values=values)
        for each, (keys, values) in zip(past, caches, strict=True)
    ]
    return out.astype(new.q.dtype), kept


def attend_documents(
    new: Heads,
    used: UsedUnits | None,
    *,
    cfg: ModelConfig,
    rotary: CosSin | None,
    growth: jax.Array | None,
    starts: jax.Array,
    branches: "Branches | None",
    window: int,
) -> tuple[jax.Array, None]:
    """Attention of whole documents without a cache (see `document_attention`); `rotary` is cos and sin of
    their positions, `growth` see `query_growth`."""
    from jaxllm.nn.documents import document_attention

    # Unused heads are computed anyway, and the output product leaves them out: documents are for training and
    # scoring, where time matters less.
    del used
    q, k, v, _ = grown(new, growth)
    if rotary is not None:
        q, k = rotate(q, *rotary), rotate(k, *rotary)
    options = attention_options(cfg, window, new)
    return document_attention(q, k, v, starts, options=options, branches=branches), None


def attention_options(
    cfg: ModelConfig, window: int, new: Heads, bias: jax.Array | None = None
) -> AttentionOptions:
    """Options of the attention of a layer with a window, or without, and with `AttentionOptions.bias`."""
    return AttentionOptions(
        scale=cfg.attention_scale,
        softcap=cfg.attention_softcap,
        window=window,
        bias=bias,
        sink_logits=new.sink_logits,
    )


def query_growth(positions: jax.Array, rope: RopeConfig | None) -> jax.Array | None:
    """Factors of queries `[..., T]` at `positions` `[..., T]`; None if they are all 1 (see `RopeConfig`)."""
    if rope is None or not rope.query_growth:
        return None
    windows = (positions // np.int32(rope.original_window_tokens)).astype(jnp.float32)
    return 1 + np.float32(rope.query_growth) * jnp.log1p(windows)


def grown(heads: Heads, growth: jax.Array | None) -> Heads:
    """Heads with queries `[B, T, ...]` multiplied by factors `[T]` or `[B, T]`, if any."""
    if growth is None:
        return heads
    lead = (growth.shape[0] if growth.ndim == 2 else 1, growth.shape[-1])
    factors = growth.reshape(lead + (1,) * (heads.q.ndim - 2))
    return heads._replace(q=(heads.q * factors).astype(heads.q.dtype))


def rotary_by_rope(positions: jax.Array, cfg: ModelConfig) -> dict[RopeConfig | None, CosSin]:
    """cos and sin at `positions` of every rotary embedding of the layers."""
    return {rope: rotary_cos_sin(positions, rope) for rope in (cfg.rope, cfg.local_rope) if rope is not None}


def dense_block(
    weights: LayerParams,
    x: jax.Array,
    cfg: ModelConfig,
    rows: Rows = ALL_ROWS,
    drop: Drop | None = None,
) -> jax.Array:
    """Feed-forward block of `x` `[B, T, D]`, gated or plain; x is added here unless a norm comes between, or
    parallel attention has added it, or `drop` changes the hidden activations and then the output."""
    gated = cfg.gated_ffn
    block = FeedForward(
        up=weights["ffn.up"],
        down=weights["ffn.down"],
        gate=weights["ffn.gate"] if gated else None,
        up_bias=weights.vector("ffn.up_bias"),
        down_bias=weights.vector("ffn.down_bias"),
        gate_bias=weights.vector("ffn.gate_bias") if gated else None,
        activation=cfg.activation,
        drop=drop,
    )
    norm = weights.pre_norm("attn_norm" if cfg.parallel_blocks else "ffn_norm", cfg)
    _, used = weights.used
    add_input = not cfg.post_norms and not cfg.parallel_blocks and drop is None
    how: dict[str, Any] = {
        "used": used,
        "batch_invariant": rows.batch_invariant,
        "valid_rows": rows.valid_rows(x),
    }
    return feed_forward(x, norm, block, add_input=add_input, **how)


def _experts(
    weights: LayerParams,
    x: jax.Array,
    cfg: ModelConfig,
    routing: "Routing",
    *,
    valid_rows: jax.Array | None = None,
    differentiable: bool = False,
) -> jax.Array:
    """Mixture of experts of `x` `[B, T, D]`; x is added here unless a norm comes between."""
    from jaxllm.experts.mixture import mixture

    norm = weights.norm("ffn_norm", cfg)
    how = {"add_input": not cfg.post_norms, "valid_rows": valid_rows, "differentiable": differentiable}
    out = mixture(x, norm, routing, expert_block(weights, cfg), **how)
    if not cfg.shared_expert_size:
        return out
    # An expert that all tokens visit, times its score.
    up, down, gate = (weights[f"shared.{part}"] for part in ("up", "down", "gate"))
    block = FeedForward(up=up, down=down, gate=gate, activation=cfg.activation)
    (score,) = normed_to_units(x, norm, [weights["shared.score"]], [None])
    return out + jax.nn.sigmoid(score) * feed_forward(x, norm, block, add_input=False)


def expert_block(weights: LayerParams, cfg: ModelConfig) -> FeedForward:
    """The weights `[E, F, D]` and biases of all experts."""
    return FeedForward(
        up=weights["experts.up"],
        down=weights["experts.down"],
        gate=weights["experts.gate"] if cfg.gated_ffn else None,
        activation=cfg.activation,
        **expert_biases(weights),
    )


def expert_biases(weights: LayerParams) -> dict[str, Any]:
    """The biases `[E, F]` and `[E, D]` of all experts, or None, by the names of `FeedForward`."""
    return {f"{part}_bias": weights.vector(f"expert_{part}_bias") for part in ("up", "down", "gate")}


def chosen_experts(
    weights: LayerParams, x: jax.Array, cfg: ModelConfig, *, differentiable: bool = False
) -> "Routing":
    """The routing of tokens `x` `[B, T, D]` by the norm and the router of `weights`."""
    from jaxllm.experts.routing import route

    return route(
        x,
        weights["router"],
        experts_per_token=cfg.experts_per_token,
        normalize=cfg.normalize_expert_weights,
        norm=weights.norm("ffn_norm", cfg),
        bias=weights.operand("router_bias"),
        differentiable=differentiable,
    )


def visiting_tokens(routing: "Routing", cfg: ModelConfig, rows: Rows) -> jax.Array | None:
    """Mask of the tokens that visit their experts, `[T]` or `[B, T]` bool: each valid one, unless as many
    earlier tokens as an expert's capacity visit the same. Nodes of a tree (`batch_invariant`) have no earlier
    tokens, so that the capacity is never exceeded. None if all visit."""
    if rows.valid is None:
        return None
    real = jnp.arange(routing.ids.shape[1], dtype=jnp.int32) < rows.valid
    return within_capacity(routing, real, cfg) if cfg.expert_capacity and not rows.batch_invariant else real


def within_capacity(routing: "Routing", real: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Mask of tokens that visit their expert, `[B, T]` bool: for each expert the first tokens of each row,
    up to its capacity (Switch, arXiv 2101.03961). `real` `[T]` or `[B, T]` bool is False for padding, which
    needs no capacity."""
    visits = jax.nn.one_hot(routing.ids[..., 0], cfg.experts, dtype=jnp.int32)
    visits = jnp.where(real[..., None], visits, 0)
    rank = jnp.take_along_axis(jnp.cumsum(visits, axis=1), routing.ids, axis=-1)[..., 0]
    return real & (rank <= cfg.expert_capacity)


def with_room(cfg: ModelConfig, tokens: int) -> ModelConfig:
    """The decoder with an expert capacity of at least `tokens`: tokens of a context that are recomputed
    together had come a few at a time, within the capacity."""
    most = max(cfg.expert_capacity, tokens)
    return dataclasses.replace(cfg, expert_capacity=most) if cfg.expert_capacity else cfg


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InputEmbeddings:
    """Embeddings of some of T new tokens, which no token id can reproduce, such as those of an image.

    Attributes:
      rows: `[T, D]` float32, as the first layer's input before positions are added.
      given: `[T]` bool, tokens with a row; the others have their embedding.
    """

    rows: jax.Array | np.ndarray
    given: jax.Array | np.ndarray

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above at trace time."""
        axes.check(jnp.float32, "T D", rows=self.rows)
        axes.check(jnp.bool_, "T", given=self.given)

    def over(self, x: jax.Array) -> jax.Array:
        """The embeddings `[B, T, D]` of tokens, with these rows in their places."""
        return jnp.where(jnp.asarray(self.given)[:, None], jnp.asarray(self.rows).astype(x.dtype), x)
