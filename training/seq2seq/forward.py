"""Runs an encoder-decoder on batches of pairs: each row has a source and a target of its own length.

Layers are those of `jaxllm.models.layer`, as in serving; here all rows run at once, all tokens of a target at
once, with dropout, and experts can be differentiated.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.config import ModelConfig
from jaxllm.experts.mixture import mixture
from jaxllm.experts.routing import Routing
from jaxllm.kernels.native_call import UsedUnits
from jaxllm.models.decoder import embed_tokens, final_normed
from jaxllm.models.encoder_decoder import encoder_params
from jaxllm.models.layer import Attend, attended, chosen_experts, dense_block, expert_block, within_capacity
from jaxllm.models.layer_stack import LayerParams
from jaxllm.models.parameters import Params, head_name
from jaxllm.models.relative_positions import position_biases
from jaxllm.models.scanned_layers import Remat, remembering
from jaxllm.nn.layers import MASKED, Heads, attention
from jaxllm.nn.linear import to_units
from jaxllm.training.data.rows import Batch
from jaxllm.training.loop.losses import Outputs, outputs_of, outputs_of_hidden
from jaxllm.training.seq2seq.pairs import PairBatch

# Keys and values `[B, K, S, H]`.
KeysValues = tuple[jax.Array, jax.Array]
# Places of dropout in a layer, and the first place of the decoder.
_PLACES, _DECODER = 4, 1000


# Dropout of activations at a place of the model, by its number.
Drop = Callable[[jax.Array, int], jax.Array]


def no_drop(x: jax.Array, place: int) -> jax.Array:
    """Changes nothing."""
    del place
    return x


def dropout(key: jax.Array, share: float) -> Drop:
    """Sets a share of all numbers to zero (in steps of 1/256), and scales the others up.

    Args:
      share: dropped share in [0, 1).
    """
    lost = round(share * 256)
    factor = np.float32(256 / (256 - lost))
    # Random bits are no small part of a step on a CPU: so one byte for each number, cut from words of XLA's
    # own generator.
    own = jax.random.wrap_key_data(jax.random.bits(key, (4,), jnp.uint32), impl="rbg")
    shifts = np.arange(0, 32, 8, dtype=np.uint32)

    def drop(x: jax.Array, place: int) -> jax.Array:
        words = jax.random.bits(jax.random.fold_in(own, place), (*x.shape[:-1], -(-x.shape[-1] // 4)))
        sampled = (words[..., None] >> shifts) & np.uint32(255)
        kept = sampled.reshape(*words.shape[:-1], -1)[..., : x.shape[-1]] >= np.uint32(lost)
        # In float32: in bfloat16 XLA's CPU backend generates the bits again for the gradient.
        return (x.astype(jnp.float32) * jnp.where(kept, factor, np.float32(0))).astype(x.dtype)

    return drop if lost else no_drop


def target_hidden(
    params: Params,
    batch: PairBatch,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike = jnp.float32,
    drop: Drop = no_drop,
    remat: Remat = "none",
) -> tuple[dict[str, Any], jax.Array, list[Routing]]:
    """Runs the model on a batch's sources and targets.

    Args:
      params: floats, or frozen weights of any format, also with adapters; a level has the counts of its
        units (see `jaxllm.training.elastic.job`).

    Returns:
      The parameters in the dtypes of the computation; hidden states `[B, T, D]` of the targets after the
      final norm; and the routing of each layer with experts.
    """
    options: dict[str, Any] = {"cfg": cfg, "dtype": dtype, "drop": drop, "remat": remat}
    computed = as_computed(params, dtype)
    source = jnp.asarray(batch.read), jnp.asarray(batch.read_tokens)
    encoded, routings = encode_rows(computed, *source, **options)
    hidden, others = decode_rows(computed, jnp.asarray(batch.tokens), encoded, source[1], **options)
    # An embedding is looked up unrounded, but a head tied to it is a product.
    head = computed[head_name(cfg)]
    if isinstance(head, jax.Array):
        computed[head_name(cfg)] = head.astype(dtype)
    return computed, hidden, [*routings, *others]


def as_computed(params: Params, dtype: DTypeLike) -> dict[str, Any]:
    """Casts matrices to the dtype of activations, once for all their products. Embeddings, whose gradient
    is a sum over many tokens, routers, biases of positions, vectors, and frozen weights of other formats
    stay unchanged."""
    apart = ("embed.tokens", ".router", "relative_positions")

    def cast(name: str, weight: Any) -> Any:
        matrix = isinstance(weight, jax.Array) and weight.ndim > 1 and not name.endswith(apart)
        return weight.astype(dtype) if matrix else weight

    return {name: cast(name, weight) for name, weight in params.items()}


def encode_rows(
    params: Params,
    tokens: jax.Array,
    valid: jax.Array,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike = jnp.float32,
    drop: Drop = no_drop,
    remat: Remat = "none",
) -> tuple[jax.Array, list[Routing]]:
    """Runs the encoder on a source in each row.

    Args:
      tokens: `[B, S]` int32.
      valid: `[B]` int32, number of each row's valid tokens, at least 1.

    Returns:
      Hidden states `[B, S, D]`, undefined for padding; and the routing of each layer with experts.
    """
    assert cfg.encoder is not None
    own, side = encoder_params(params), cfg.encoder
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    bias = _relative(own, positions, positions, side, both_ways=True) + _padding(valid, tokens.shape[1])
    attend = _attending(bias, side)

    def block(x: jax.Array, *, layer: int) -> tuple[jax.Array, list[Routing]]:
        weights, first = LayerParams(own, f"layers.{layer}."), 1 + layer * _PLACES
        x, _ = attended(weights, x, side, attend, drop=lambda x: drop(x, first))
        return _fed_forward(weights, x, side, layer, drop, first + 2, valid)

    x = drop(embed_tokens(own, tokens, positions, cfg=side, dtype=dtype), 0)
    x, routings = _through(block, x, side.layers, remat)
    return drop(final_normed(own, x, cfg=side), 1 + side.layers * _PLACES), routings


def decode_rows(
    params: Params,
    tokens: jax.Array,
    encoded: jax.Array,
    read_tokens: jax.Array,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike = jnp.float32,
    drop: Drop = no_drop,
    remat: Remat = "none",
) -> tuple[jax.Array, list[Routing]]:
    """The decoder over whole targets `[B, T]` int32, and sources as `encode_rows` returns them, of which each
    has `read_tokens` `[B]`: hidden states `[B, T, D]` after the final norm, and the routing of each layer
    with experts. For the other arguments see `encode_rows`."""
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    attend = _attending(_causal(params, positions, positions, cfg), cfg)
    mask = _padding(read_tokens, encoded.shape[1])

    def attending(layer: int) -> tuple[Attend[Any], Attend[Any]]:
        return attend, _attending(mask, cfg, _source_keys_values(params, encoded, layer))

    x = embed_tokens(params, tokens, positions, cfg=cfg, dtype=dtype)
    return _decoded(params, x, attending, cfg, drop, remat)


def decode_next(
    params: Params,
    tokens: jax.Array,
    position: jax.Array,
    past: list[KeysValues],
    sources: list[KeysValues],
    read_tokens: jax.Array,
    *,
    cfg: ModelConfig,
) -> tuple[jax.Array, list[KeysValues]]:
    """The decoder over one more token of each row.

    Args:
      tokens: `[B]` int32.
      position: int32 scalar, number of preceding tokens of each row.
      past: keys and values of each layer, with room for all tokens of an answer.
      sources: see `source_keys_values`.
      read_tokens: `[B]` int32, number of valid tokens of each source.

    Returns:
      Hidden states `[B, D]` after the final norm, and `past` with the new token.
    """
    grown: list[KeysValues] = []
    room = jnp.arange(past[0][0].shape[2], dtype=jnp.int32)
    bias, mask = _causal(params, position[None], room, cfg), _padding(read_tokens, sources[0][0].shape[2])

    def attending(layer: int) -> tuple[Attend[Any], Attend[Any]]:
        def attend(new: Heads, used: UsedUnits | None) -> tuple[jax.Array, None]:
            keys, values = (
                jax.lax.dynamic_update_slice_in_dim(old, each.transpose(0, 2, 1, 3), position, axis=2)
                for old, each in zip(past[layer], (new.k, new.v), strict=True)
            )
            grown.append((keys, values))
            return _attending(bias, cfg, (keys, values))(new, used)

        return attend, _attending(mask, cfg, sources[layer])

    x = embed_tokens(params, tokens[:, None], position[None], cfg=cfg)
    hidden, _ = _decoded(params, x, attending, cfg, no_drop)
    return hidden[:, 0], grown


def source_keys_values(params: Params, encoded: jax.Array, *, cfg: ModelConfig) -> list[KeysValues]:
    """The keys and values of the sources in each layer of the decoder."""
    return [_source_keys_values(params, encoded, layer) for layer in range(cfg.layers)]


def _source_keys_values(params: Params, encoded: jax.Array, layer: int) -> KeysValues:
    weights = LayerParams(params, f"layers.{layer}.")
    keys, values = (to_units(encoded, weights[f"cross.{part}"]).transpose(0, 2, 1, 3) for part in "kv")
    return keys, values


def _through(
    block: Callable[..., tuple[jax.Array, list[Routing]]], x: jax.Array, layers: int, remat: Remat
) -> tuple[jax.Array, list[Routing]]:
    """`x` after all layers, and their routings."""
    routings: list[Routing] = []
    for layer in range(layers):
        x, own = remembering(functools.partial(block, layer=layer), remat)(x)
        routings += own
    return x, routings


def _decoded(
    params: Params,
    x: jax.Array,
    attending: Callable[[int], tuple[Attend[Any], Attend[Any]]],
    cfg: ModelConfig,
    drop: Drop,
    remat: Remat = "none",
) -> tuple[jax.Array, list[Routing]]:
    """Runs the decoder on embedded tokens `[B, T, D]`; `attending` returns the attention of a layer to its
    own tokens, and to the sources."""

    def block(x: jax.Array, *, layer: int) -> tuple[jax.Array, list[Routing]]:
        weights, first = LayerParams(params, f"layers.{layer}."), _DECODER + 1 + layer * _PLACES
        own, cross = attending(layer)
        x, _ = attended(weights, x, cfg, own, drop=lambda x: drop(x, first))
        x, _ = attended(weights, x, cfg, cross, name="cross", drop=lambda x: drop(x, first + 1))
        return _fed_forward(weights, x, cfg, layer, drop, first + 2)

    x, routings = _through(block, drop(x, _DECODER), cfg.layers, remat)
    return drop(final_normed(params, x, cfg=cfg), _DECODER + 1 + cfg.layers * _PLACES), routings


def _attending(bias: jax.Array, cfg: ModelConfig, kept: KeysValues | None = None) -> Attend[None]:
    """Attention with a bias of scores, to a layer's own tokens or to other keys and values."""

    def attend(new: Heads, used: UsedUnits | None) -> tuple[jax.Array, None]:
        del used
        keys, values = kept or (new.k.transpose(0, 2, 1, 3), new.v.transpose(0, 2, 1, 3))
        return attention(new.q, keys, values, bias, scale=cfg.attention_scale), None

    return attend


def _causal(params: Params, queries: jax.Array, keys: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Bias of the scores of the decoder's own tokens, `[1, K, T, S]` float32."""
    hidden = jnp.where(keys[None, :] <= queries[:, None], np.float32(0), np.float32(MASKED))
    return _relative(params, queries, keys, cfg, both_ways=False) + hidden


def _relative(
    params: Params, queries: jax.Array, keys: jax.Array, cfg: ModelConfig, *, both_ways: bool
) -> jax.Array:
    """Bias of scores by relative positions, `[1, K, T, S]` float32."""
    # A product has a product as gradient; that of a lookup is a slow scatter.
    biases = position_biases(params, keys[None, :] - queries[:, None], cfg, both_ways=both_ways, lookup=False)
    return biases.transpose(2, 0, 1)[None]


def _padding(valid: jax.Array, count: int) -> jax.Array:
    """Mask of padding for scores, `[B, 1, 1, S]` float32."""
    real = jnp.arange(count, dtype=jnp.int32)[None, :] < valid[:, None]
    return jnp.where(real, np.float32(0), np.float32(MASKED))[:, None, None, :]


def _fed_forward(
    weights: LayerParams,
    x: jax.Array,
    cfg: ModelConfig,
    layer: int,
    drop: Drop,
    place: int,
    valid: jax.Array | None = None,
) -> tuple[jax.Array, list[Routing]]:
    """The second half of a layer of `x` `[B, T, D]`, and the routing of experts; dropout is at `place` and
    the next one.

    Experts have a capacity if `valid` `[B]`, the number of valid tokens of each row, is given: for sources.
    Served targets come one token at a time and never exceed a capacity.
    """
    if not cfg.is_sparse(layer):
        out = dense_block(weights, x, cfg, drop=lambda x: drop(x, place))
        return x + drop(out, place + 1), []
    routing = chosen_experts(weights, x, cfg, differentiable=True)
    experts = expert_block(weights, cfg)
    mixed = mixture(x, weights.norm("ffn_norm", cfg), routing, experts, differentiable=True)
    if valid is not None and cfg.expert_capacity < x.shape[1]:
        real = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :] < valid[:, None]
        visiting = within_capacity(routing, real, cfg)[..., None]
        mixed = jnp.where(visiting, mixed, jnp.zeros_like(mixed))
    return x + drop(mixed, place + 1), [routing]


AnyBatch = Batch | PairBatch


def outputs_of_any(
    params: Params,
    batch: AnyBatch,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike = jnp.float32,
    remat: Remat = "none",
) -> Outputs:
    """Returns a model's outputs for the targets of a batch; for `remat` see `decoder.forward_documents`."""
    if not isinstance(batch, PairBatch):
        return outputs_of(params, batch, cfg=cfg, dtype=dtype, remat=remat)
    computed, hidden, _ = target_hidden(params, batch, cfg=cfg, dtype=dtype, remat=remat)
    return outputs_of_hidden(computed, hidden, cfg=cfg)
