"""The shared decoder of all architectures: its forward pass with a cache, and over whole documents.

Architectures differ only in `ModelConfig`; the files in `architectures/` translate checkpoints into it.
Parameters are those of `parameters.py`. Layers with a state, mixed layers and attention of documents are
imported where they run: most processes run none of them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.axes import Axes, shaped
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.kernels.native_call import UsedUnits
from jaxllm.kv.cache import KVCache, Past, TokenPositions
from jaxllm.kv.states import Source
from jaxllm.models.features import require_decoder_alone, require_feature
from jaxllm.models.layer import (
    ALL_ROWS,
    InputEmbeddings,
    Rows,
    TokenOrder,
    attend_cache,
    attend_documents,
    attended,
    fed_forward,
    query_growth,
    rotary_by_rope,
    run_layer,
)
from jaxllm.models.layer_stack import LayerParams, layer_of
from jaxllm.models.parameters import Params, head_name
from jaxllm.models.relative_positions import position_bias
from jaxllm.models.scanned_layers import Remat, is_stacked, over_layers, scan_layers
from jaxllm.nn.layers import Heads, by_sequence, constrained, normalize, source_attention
from jaxllm.nn.linear import embed, to_units

if TYPE_CHECKING:
    from jaxllm.experts.routing import Routing
    from jaxllm.models.mixed_layers import SharedKV
    from jaxllm.nn.documents import Branches

# A cache, or none.
Cache = TypeVar("Cache", KVCache, None)


@shaped(tokens="int32 B T", valid="int32")
def forward(
    params: Params,
    tokens: jax.Array,
    cache: Cache = None,
    *,
    cfg: ModelConfig,
    valid: jax.Array | None = None,
    row: jax.Array | None = None,
    inputs: InputEmbeddings | None = None,
    dtype: DTypeLike = jnp.float32,
) -> tuple[jax.Array, Cache]:
    """Hidden states of new tokens, and the cache with their keys and values.

    Args:
      params: see the module docstring; leaves may be quantized.
      tokens: `[B, T]` int32, ids in [0, V). They follow the `cache.length` tokens in the cache.
      cache: past keys and values; None attends only within `tokens` (training).
      valid: int32 scalar, number of valid tokens of T; the rest is padding at the end, which is not written
        to the cache, and whose hidden states are undefined. None: all are valid.
      row: int32 scalar, index of the only token to return; None: all.
      inputs: embeddings in place of tokens', only with a cache; None: tokens only.

    Returns:
      Hidden states after the final norm `[B, T, D]`, with `row` `[B, 1, D]`, and the cache with `length +
      valid` tokens (None without a cache).
    """
    if cache is None:
        if inputs is not None:
            raise ConfigError("rows in place of tokens need a cache; make one")
        hidden = forward_documents(params, tokens, cfg=cfg, dtype=dtype)
        return hidden if row is None else jax.lax.dynamic_slice_in_dim(hidden, row, 1, axis=1), cache
    count = tokens.shape[1]
    at = TokenPositions.after(cache.length, count, jnp.asarray(count, jnp.int32) if valid is None else valid)
    x, cache = forward_at(params, tokens, cache, at, cfg=cfg, dtype=dtype, row=row, inputs=inputs)
    return x, dataclasses.replace(cache, length=cache.length + at.valid)


@shaped(tokens="int32 B T")
def forward_at(
    params: Params,
    tokens: jax.Array,
    cache: KVCache,
    at: TokenPositions,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike = jnp.float32,
    row: jax.Array | None = None,
    inputs: InputEmbeddings | None = None,
) -> tuple[jax.Array, KVCache]:
    """`forward` of tokens at any positions of a cache; the cache's length stays unchanged.

    Args:
      params, tokens, cache, cfg, dtype, row, inputs: see `forward`.
      at: positions of the tokens (see `forward_layer`).
    """
    if inputs is not None:
        require_decoder_alone(cfg, "rows in place of tokens")
        if cfg.mixed is not None and cfg.mixed.layer_input_size:
            raise ConfigError(
                f"rows in place of tokens are not for models whose layers have inputs of each token, as "
                f"{cfg.model_type} has; give tokens"
            )
    rows = Rows.at(at)
    valid_rows = rows.valid if tokens.shape[0] == 1 else None
    x = embed_tokens(params, tokens, at.positions, cfg=cfg, dtype=dtype, valid_rows=valid_rows, inputs=inputs)
    rotaries, bias = rotary_by_rope(at.positions, cfg), position_bias(params, cfg)
    shared = _first_shared(params, tokens, x, cfg, rows)

    def layer(carry: Any, own: Params, like: int, number: jax.Array | int) -> Any:
        (x, cache, shared), weights = carry, layer_of(own, like)
        if cfg.is_state(like):
            from jaxllm.models.state_layer import cached_state_layer

            x, state = cached_state_layer(weights, x, at, cache.state(like, number, at), cfg=cfg, layer=like)
            return x, cache.with_state(like, number, state), shared
        order = rotaries.get(cfg.layer_rope(like)) if bias is None else bias
        how: Any = {"cfg": cfg, "layer": like, "order": order}
        if shared is None:
            x, past, mass = forward_layer(weights, x, at, cache.past(like, number), cache.mass, **how)
        else:
            attend = functools.partial(
                attend_cache, at=at, past=cache.past(like, number), mass=cache.mass, **how
            )
            from jaxllm.models.mixed_layers import run_mixed_layer

            of: Any = {"cfg": cfg, "like": like, "number": number, "rows": rows}
            x, shared, (past, mass) = run_mixed_layer(weights, x, shared, attend, **of)
        return x, dataclasses.replace(cache.with_past(like, past), mass=mass), shared

    x, cache, _ = over_layers(params, cfg, layer, (x, cache, shared))
    return final_normed(params, x, cfg=cfg, row=row), cache


def final_normed(
    params: Params,
    x: jax.Array,
    *,
    cfg: ModelConfig,
    row: jax.Array | None = None,
    batch_invariant: bool = False,
) -> jax.Array:
    """The outputs `[..., D]` of an encoder or a decoder from its last layer's: after the final norm, if there
    is one; with `row` only those of one of the T tokens `[B, 1, D]`. For `batch_invariant` see
    `by_sequence`."""
    if row is not None:
        x = jax.lax.dynamic_slice_in_dim(x, row, 1, axis=1)
    return (
        normalize(x, LayerParams(params, "").norm("final_norm", cfg), batch_invariant=batch_invariant)
        if cfg.final_norm
        else x
    )


def embed_tokens(
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike = jnp.float32,
    valid_rows: jax.Array | None = None,
    inputs: InputEmbeddings | None = None,
) -> jax.Array:
    """Input of the first layer `[B, T, D]` for tokens `[B, T]` int32 at `positions` `[T]` or `[B, T]`, and
    rows in place of some; for `valid_rows` see `linear.py`."""
    x = embed(tokens, params["embed.tokens"], dtype, valid_rows)
    if cfg.embed_scale != 1.0:
        x = x * np.asarray(cfg.embed_scale, x.dtype)
    if inputs is not None:
        x = inputs.over(x)
    if cfg.learned_positions:
        x = x + embed(positions, params["embed.positions"], dtype)
    if cfg.sinusoidal_positions:
        # Sines in the first half of the dimensions, cosines in the other (Marian).
        exponents = np.arange(0, cfg.hidden_size, 2, dtype=np.float64) / cfg.hidden_size
        angles = positions.astype(jnp.float32)[:, None] * (10000.0**-exponents).astype(np.float32)
        x = x + jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).astype(dtype)
    return normalize(x, LayerParams(params, "").norm("embed.norm", cfg)) if cfg.embed_norm else x


def forward_layer(
    weights: LayerParams,
    x: jax.Array,
    at: TokenPositions,
    past: Past,
    mass: jax.Array | None = None,
    *,
    cfg: ModelConfig,
    layer: int,
    order: TokenOrder | None = None,
) -> tuple[jax.Array, Past, jax.Array | None]:
    """One layer of `forward`, over new tokens at any positions of a cache.

    The positions need not be consecutive. Keys and values of the new tokens are written first; then each
    token attends to every position up to its own, all of which must be filled by then, and to the source of
    an encoder-decoder. Outputs of padding are undefined. Nodes of a tree are batch-invariant: bitwise equal
    to single ones if native kernels compute them.

    Args:
      x: `[B, T, D]`, the layer's input.
      at: positions of the tokens.
      mass: see `KVCache`; None if attention mass is not counted.
      layer: index of the layer, or of an equal one.
      order: the layer's cos and sin of the positions, if known (see `rotary_by_rope`); or `position_bias`.

    Returns:
      The next layer's input `[B, T, D]`, the updated keys and values, and the updated mass.
    """
    mixed, past, mass = attend_layer(weights, x, at, past, mass, cfg=cfg, layer=layer, order=order)
    out, _ = fed_forward(weights, mixed, x, cfg, layer, rows=Rows.at(at))
    return out, past, mass


def attend_layer(
    weights: LayerParams,
    x: jax.Array,
    at: TokenPositions,
    past: Past,
    mass: jax.Array | None = None,
    *,
    cfg: ModelConfig,
    layer: int,
    order: TokenOrder | None = None,
) -> tuple[jax.Array, Past, jax.Array | None]:
    """The first half of `forward_layer`: attention to the cache, and to the source of an encoder-decoder."""
    cached: Any = {"cfg": cfg, "layer": layer, "at": at, "past": past, "mass": mass, "order": order}
    attend, rows = functools.partial(attend_cache, **cached), Rows.at(at)
    x, (past, mass) = attended(weights, x, cfg, attend, rows=rows)
    if cfg.encoder is not None:
        encoded = past.source
        assert encoded is not None

        def attend_source(new: Heads, used: UsedUnits | None) -> tuple[jax.Array, Source]:
            return source_attention(new.q, encoded, at, scale=cfg.attention_scale, used=used)

        x, source = attended(weights, x, cfg, attend_source, name="cross", rows=rows)
        past = dataclasses.replace(past, source=source)
    return x, past, mass


def forward_documents(
    params: Params,
    tokens: jax.Array,
    starts: jax.Array | None = None,
    branches: "Branches | None" = None,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike = jnp.float32,
    remat: Remat = "none",
    differentiable: bool = True,
) -> jax.Array:
    """Hidden states of whole documents, packed consecutively, for training.

    Args:
      params: see `parameters.py`; leaves may be quantized, and equal layers in stacks (`scanned_layers.py`).
      tokens: `[B, T]` int32, ids in [0, V).
      starts: `[B, T]` int32, per token the index in the sequence where its document begins. Tokens attend
        within their document, and positions count from its beginning. None: a sequence is one document.
      branches: see `jaxllm.nn.documents`; None: documents do not branch.
      remat: residuals of each layer for the backward pass, which recomputes the rest: everything ("none"),
        the results of products with weights ("dots"), or only its input ("full").
      differentiable: whether gradients may be computed; False reads only the visited experts.

    Returns:
      Hidden states after the final norm `[B, T, D]`.
    """
    how: Any = {"cfg": cfg, "dtype": dtype, "differentiable": differentiable}
    carry, run = _begin_documents(params, tokens, starts, branches, **how)
    if cfg.mixed is not None:
        if is_stacked(params):
            raise ConfigError(
                f"layers that share keys and values ({cfg.model_type}) are not trained in stacks; train on a "
                "CPU"
            )
        remat = "none"
    x, _ = over_layers(params, cfg, lambda *of: run(*of)[0], carry, remat=remat)
    return final_normed(params, x, cfg=cfg)


def forward_documents_with_routing(
    params: Params,
    tokens: jax.Array,
    starts: jax.Array | None = None,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike = jnp.float32,
    remat: Remat = "none",
    differentiable: bool = True,
) -> "tuple[jax.Array, Routing]":
    """`forward_documents`, and the routing of all tokens, for losses and statistics.

    Returns:
      Hidden states, and the routing, stacked over sparse layers: logits `[L_sparse, B, T, E]`, ids and
        weights `[L_sparse, B, T, k]`.

    Raises:
      ConfigError: the model has no experts, or mixed layers.
    """
    if not cfg.experts or cfg.mixed is not None:
        raise ConfigError("no routing without experts, nor with mixed layers; call forward_documents")
    how: Any = {"cfg": cfg, "dtype": dtype, "differentiable": differentiable}
    carry, run = _begin_documents(params, tokens, starts, None, **how)
    (x, _), routings = scan_layers(params, cfg, run, carry, remat)
    return final_normed(params, x, cfg=cfg), jax.tree.map(lambda *layers: jnp.concatenate(layers), *routings)


# Input `[B, T, D]` of a layer over documents, and values of mixed layers.
_Carry = tuple[jax.Array, "SharedKV | None"]
# A layer over documents, for `scan_layers`, whose output is its routing if it is sparse.
_DocumentLayer = Callable[[_Carry, Params, int, Any], tuple[_Carry, "Routing | None"]]


def _begin_documents(
    params: Params,
    tokens: jax.Array,
    starts: jax.Array | None,
    branches: "Branches | None",
    *,
    cfg: ModelConfig,
    dtype: DTypeLike,
    differentiable: bool,
) -> tuple[_Carry, _DocumentLayer]:
    """The first layer's input, and the function of a layer."""
    from jaxllm.nn.documents import document_positions

    require_decoder_alone(cfg, "forward passes over whole documents")
    if branches is not None:
        require_feature(cfg, "tasks")
    axes = Axes("forward_documents")
    axes.check(jnp.int32, "B T", tokens=tokens, starts=starts)
    if branches is not None:
        branches.check(axes)
    starts = jnp.zeros(tokens.shape, jnp.int32) if starts is None else starts
    positions = document_positions(starts, branches)
    run = _document_layer(starts, positions, branches, cfg=cfg, differentiable=differentiable)
    x = constrained(embed_tokens(params, tokens, positions, cfg=cfg, dtype=dtype), "residual")
    return (x, _first_shared(params, tokens, x, cfg, ALL_ROWS)), run


def layer_of_documents(own: Params, x: jax.Array, *, cfg: ModelConfig, layer: int) -> jax.Array:
    """The output `[B, T, D]` of one layer of `x` `[B, T, D]`, whose sequences are one document each.

    Args:
      cfg: config of a model without mixed layers.
      layer: index of the layer, or of an equal one.
    """
    starts = jnp.zeros(x.shape[:2], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), starts.shape)
    run = _document_layer(starts, positions, None, cfg=cfg, differentiable=False)
    (x, _), _ = run((x, None), own, layer, layer)
    return x


def _document_layer(
    starts: jax.Array,
    positions: jax.Array,
    branches: "Branches | None",
    *,
    cfg: ModelConfig,
    differentiable: bool,
) -> _DocumentLayer:
    """The function of a layer; for the arguments see `forward_documents`."""
    rotaries = rotary_by_rope(positions, cfg)

    def run(carry: _Carry, own: Params, like: int, number: Any) -> "tuple[_Carry, Routing | None]":
        x, shared = carry
        weights, rope = layer_of(own, like), cfg.layer_rope(like)
        attend = functools.partial(
            attend_documents,
            cfg=cfg,
            rotary=rotaries.get(rope),
            growth=query_growth(positions, rope),
            starts=starts,
            branches=branches,
            window=cfg.attention_windows[like],
        )
        if shared is not None:
            from jaxllm.models.mixed_layers import run_mixed_layer

            of: Any = {"cfg": cfg, "like": like, "number": number, "rows": ALL_ROWS}
            return run_mixed_layer(weights, x, shared, attend, **of)[:2], None
        if cfg.is_state(like):
            from jaxllm.models.state_layer import document_state_layer

            how: Any = {"cfg": cfg, "layer": like, "differentiable": differentiable}
            x, routing = document_state_layer(weights, x, starts, **how)
        else:
            x, _, routing = run_layer(weights, x, cfg, like, attend, differentiable=differentiable)
        return (constrained(x, "residual"), None), routing

    return run


def _first_shared(
    params: Params, tokens: jax.Array, x: jax.Array, cfg: ModelConfig, rows: Rows
) -> "SharedKV | None":
    """What mixed layers share before the first; None without such layers."""
    if cfg.mixed is None:
        return None
    from jaxllm.models.mixed_layers import first_shared

    return first_shared(params, tokens, x, cfg, rows)


@shaped(hidden="float ... D")
def logits(
    params: Params,
    hidden: jax.Array,
    *,
    cfg: ModelConfig,
    batch_invariant: bool = False,
    valid_rows: jax.Array | None = None,
) -> jax.Array:
    """Next-token logits `[..., V]` float32 of hidden states `[..., D]`; for
    `batch_invariant` and `valid_rows` see `linear.py`."""
    bias = LayerParams(params, "").vector("head_bias")
    out = to_units(
        hidden, params[head_name(cfg)], bias, batch_invariant=batch_invariant, valid_rows=valid_rows
    ).astype(jnp.float32)
    if cfg.logit_scale != 1.0:
        out = out * np.float32(cfg.logit_scale)
    if cfg.logit_softcap:
        cap = np.float32(cfg.logit_softcap)
        out = by_sequence(lambda out: jnp.tanh(out / cap) * cap, out, batch_invariant=batch_invariant)
    return out
