"""Steps of models that run by parts: prefetched layers, individually loaded experts, contexts restored
layer by layer."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes
from jaxllm.config import ModelConfig
from jaxllm.contexts.codecs import ChunkFormat
from jaxllm.experts.mixture import Tiles, no_visits, run_stored, run_tile, sum_visits, tiles_and_weights
from jaxllm.kernels.native_call import PARAMETER, value
from jaxllm.kernels.native_products import StoredExperts
from jaxllm.kv.cache import KVCache, Past, TokenPositions
from jaxllm.kv.chunks import LayerChunks, load_chunks, load_layer
from jaxllm.kv.states import SourceKV
from jaxllm.models import encoder_decoder
from jaxllm.models.decoder import forward_layer, forward_to_experts, logits
from jaxllm.models.encoder_decoder import final_normed, with_room
from jaxllm.models.layer import LayerParams, chosen_experts, expert_biases, rotary_by_rope
from jaxllm.models.layer_stack import STACK, LayersAt, layer_of
from jaxllm.models.parameters import Params
from jaxllm.nn.linear import FeedForward

# Defines the steps of models that run by parts: layers whose weights are prefetched, individually loaded
# experts, and contexts whose chunks are restored layer by layer.
#
# Pure functions of static shapes, as in `model.py`.


def final_rows(params: Params, x: jax.Array, rows: jax.Array, *, cfg: ModelConfig) -> jax.Array:
    """The head's input for some tokens, `[n, D]`: their rows of the last layer's output after the final
    norm, if there is one.

    Args:
      params: parameters of the final norm.
      x: `[1, T, D]`, the last layer's output.
      rows: `[n]` int32, indices among the T tokens.
      cfg: config of the model.
    """
    axes = Axes("final_rows", D=cfg.hidden_size)
    axes.check(jnp.floating, "1 T D", x=x)
    axes.check(jnp.int32, "n", rows=rows)
    return final_normed(params, x[0, rows], cfg=cfg)


def head_piece(head: Params, hidden: jax.Array, *, cfg: ModelConfig) -> jax.Array:
    """Logits `[n, v]` float32 for v tokens of the vocabulary.

    Args:
      head: the rows `[v, D]` of these tokens, named like the whole head, and their biases `[v]`, if any.
      hidden: `[n, D]`, see `final_rows`.
      cfg: config of the model.
    """
    Axes("head_piece", D=cfg.hidden_size).check(jnp.floating, "n D", hidden=hidden)
    # Several rows are the nodes of a tree.
    return logits(head, hidden, cfg=cfg, rowwise=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AtExperts:
    """T tokens of one sequence before the experts of a layer.

    Attributes:
      x: `[1, T, D]`.
      tiles: tiles of the pairs of token and expert.
      weights: `[T, k]` float32, factors of the outputs of pairs.
      ids: `[T, k]` int32, the visited experts; undefined for padding.
      ahead: `[n, E]` float32, probabilities of the experts of the next n sparse layers by their routers, the
        mean over valid tokens.
    """

    x: jax.Array
    tiles: Tiles
    weights: jax.Array
    ids: jax.Array
    ahead: jax.Array

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above at trace time."""
        axes.check(jnp.floating, "1 T D", x=self.x)
        axes.check(jnp.float32, "T k", weights=self.weights)
        axes.check(jnp.int32, "T k", ids=self.ids)
        axes.check(jnp.float32, "n E", ahead=self.ahead)


@dataclasses.dataclass(frozen=True)
class SparseLayer:
    """Static properties of a sparse layer.

    Attributes:
      cfg: the model.
      layer: its index.
      loss: see `tiles_and_weights`.
    """

    cfg: ModelConfig
    layer: int
    loss: float = 0.0


def attend_layer(
    params: Params,
    next_routers: Sequence[Params],
    x: jax.Array,
    at: TokenPositions,
    past: Past,
    mass: jax.Array | None,
    *,
    of: SparseLayer,
) -> tuple[AtExperts, jax.Array, Past, jax.Array | None]:
    """A sparse layer up to its experts (see `decoder.forward_to_experts`).

    The next routers are applied to this layer's hidden states: the residual stream changes so little from
    layer to layer that their choices are mostly those of the next layers.

    Args:
      params: parameters of the layer, without experts.
      next_routers: "router" and "ffn_norm" of the next sparse layers, nearest first.
      x, at, past, mass: see `decoder.forward_layer`; x, past and mass are donated.
      of: the layer.

    Returns:
      The tokens before the experts, a buffer for the outputs of all tiles, keys and values, the mass.
    """
    cfg = of.cfg
    _check_layer("attend_layer", x, at, past, cfg)
    how = {"cfg": cfg, "layer": of.layer}
    count = x.shape[1]
    live = visiting = jnp.arange(count, dtype=jnp.int32) < at.valid if count > 1 else None
    if cfg.encoder is None:
        x, routing, past, mass = forward_to_experts(layer_of(params, of.layer), x, at, past, mass, **how)
    else:
        x, routing, visiting, past, mass = encoder_decoder.forward_to_experts(
            params, x, at, past, mass, **how
        )
    tiles, weights = tiles_and_weights(routing, cfg.experts, live=visiting, loss=of.loss)
    following = [chosen_experts(LayerParams(each, ""), x, cfg).probs[0] for each in next_routers]
    real = jnp.ones((count, 1), jnp.bool_) if live is None else live[:, None]
    # Probabilities of padding are undefined, perhaps NaN.
    sums = jnp.sum(jnp.where(real, jnp.stack(following), 0.0), axis=1)
    ahead = sums / jnp.sum(real, dtype=jnp.float32)
    tokens = AtExperts(x=x, tiles=tiles, weights=weights, ids=routing.ids[0], ahead=ahead)
    return tokens, no_visits(x.reshape(-1, x.shape[-1]), tiles), past, mass


def attend_encoder(
    params: Params, x: jax.Array, bias: jax.Array | None, valid: jax.Array, *, of: SparseLayer, ahead: int
) -> tuple[AtExperts, jax.Array]:
    """A sparse layer of an encoder up to its experts.

    Args:
      params: parameters of the layer, without experts.
      x, bias, valid: see `encoder_decoder.encoder_layer`; x is donated.
      of: the layer, of the encoder.
      ahead: number of layers for which `AtExperts` has probabilities; here zeros.

    Returns:
      The tokens before the experts, and a buffer for the outputs of all tiles.
    """
    cfg = of.cfg
    how = {"cfg": cfg, "layer": of.layer}
    x, routing, visiting = encoder_decoder.encoder_to_experts(params, x, bias, valid, **how)
    tiles, weights = tiles_and_weights(routing, cfg.experts, live=visiting, loss=of.loss)
    zeros = jnp.zeros((ahead, cfg.experts), jnp.float32)
    tokens = AtExperts(x=x, tiles=tiles, weights=weights, ids=routing.ids[0], ahead=zeros)
    return tokens, no_visits(x.reshape(-1, x.shape[-1]), tiles)


def attend_restored(
    params: Params,
    next_routers: Sequence[Params],
    x: jax.Array,
    at: TokenPositions,
    past: Past,
    chunks: LayerChunks,
    *,
    of: SparseLayer,
) -> tuple[AtExperts, jax.Array, Past]:
    """`restore_layer` of a sparse layer up to its experts; see there and `attend_layer`."""
    past = _loaded_layer(params, past, chunks, of.layer)
    of = dataclasses.replace(of, cfg=with_room(of.cfg, x.shape[1]))
    tokens, out, past, _ = attend_layer(params, next_routers, x, at, past, None, of=of)
    return tokens, out, past


def expert_tile(
    expert: Params,
    norm: Params,
    tokens: AtExperts,
    number: jax.Array,
    out: jax.Array,
    *,
    cfg: ModelConfig,
) -> jax.Array:
    """Runs one tile of tokens through its expert.

    Args:
      expert: "gate", "up" and "down" `[F, D]`.
      norm: "ffn_norm" of the layer, and the biases of all its experts if they have any.
      tokens: tokens before the experts.
      number: index of the tile, int32 scalar.
      out: the outputs of all tiles so far; donated.
      cfg: the model.
    """
    axes = Axes("expert_tile", D=cfg.hidden_size, k=cfg.experts_per_token)
    tokens.check(axes)
    axes.check(jnp.int32, "", number=number)
    # An expert's number plus E denotes only its high plane.
    chosen = tokens.tiles.expert[number] % np.int32(cfg.experts)
    beside = LayerParams(norm, "")
    biases = {name: None if each is None else each[chosen] for name, each in expert_biases(beside).items()}
    block = FeedForward(
        up=expert["up"], down=expert["down"], gate=expert.get("gate"), activation=cfg.activation, **biases
    )
    rows = tokens.x.reshape(-1, tokens.x.shape[-1])
    return run_tile(rows, beside.norm("ffn_norm", cfg), tokens.tiles, number, out, block)


def stored_tiles(
    weights: StoredExperts,
    norm: Params,
    tokens: AtExperts,
    actions: jax.Array,
    out: jax.Array,
    begun: jax.Array,
    *,
    cfg: ModelConfig,
) -> tuple[jax.Array, jax.Array]:
    """Runs some tiles of tokens through their experts, in one call of a native kernel.

    Args:
      weights: the experts of the layer; those of the tiles are in memory.
      norm: "ffn_norm" of the layer.
      tokens: tokens before the experts.
      actions: `[m]` int32, action for each tile (see `native_experts.stored_visits`).
      out: the outputs of all tiles so far; donated.
      begun: partial results of begun tiles; donated.
      cfg: config of the model.
    """
    axes = Axes("stored_tiles", D=cfg.hidden_size, k=cfg.experts_per_token)
    tokens.check(axes)
    axes.check(jnp.int32, "m", actions=actions)
    rows = tokens.x.reshape(-1, tokens.x.shape[-1])
    scale = LayerParams(norm, "").norm("ffn_norm", cfg)
    before = out, begun
    return run_stored(rows, scale, tokens.tiles, actions, weights, before, activation=cfg.activation)


def combine_experts(tokens: AtExperts, out: jax.Array) -> jax.Array:
    """The layer's output `[1, T, D]`: the weighted sum of its experts' outputs and the residual."""
    tokens.check(Axes("combine_experts"))
    rows = tokens.x.reshape(-1, tokens.x.shape[-1])
    return sum_visits(out, tokens.tiles, tokens.weights, rows).reshape(tokens.x.shape)


def load_cache(
    heads: jax.Array | None,
    cache: KVCache,
    sources: jax.Array | tuple[jax.Array, ...],
    bits: jax.Array,
    *,
    form: ChunkFormat,
) -> KVCache:
    """Loads stored chunks into all layers of a cache.

    Args:
      heads: `[L]` int32, numbers of used kv heads, if levels share the bucket; else None.
      cache: cache of one sequence; donated. The caller sets its length.
      sources: blobs of all layers, or their addresses (see `load_chunks`).
      bits: bit widths of the chunks (see `load_chunks`).
      form: format of the stored chunks.
    """
    return load_chunks(cache, range(cache.layers), sources, bits, form=form, heads=heads)


def restore_layer(
    params: Params,
    x: jax.Array,
    at: TokenPositions,
    past: Past,
    chunks: LayerChunks,
    *,
    cfg: ModelConfig,
    layer: int,
) -> tuple[jax.Array, Past]:
    """Restores one layer of a context: loads its stored chunks into the cache, then runs the tokens of the
    other chunks through the layer, which writes their keys and values (LLMS, section 3.3).

    Exact: a token attends to all tokens before it, which are in the cache by then, loaded or recomputed.

    Args:
      params: parameters of the layer, and the counts of used units, if any.
      x: `[1, T, D]`, the layer's input; donated.
      at: positions of the T tokens.
      past: the layer's keys and values; donated.
      chunks: the stored ones.
      cfg: the model.
      layer: its index.

    Returns:
      The next layer's input, keys and values.
    """
    _check_layer("restore_layer", x, at, past, cfg)
    past = _loaded_layer(params, past, chunks, layer)
    x, past, _ = one_layer(params, x, at, past, None, cfg=with_room(cfg, x.shape[1]), layer=layer)
    return x, past


def prefill_restored(
    params: Params,
    x: jax.Array,
    at: TokenPositions,
    past: Past,
    mass: jax.Array | None,
    chunks: LayerChunks,
    *,
    cfg: ModelConfig,
    layer: int,
) -> tuple[jax.Array, Past, jax.Array | None]:
    """Runs new tokens through one layer of a context as soon as the layer is restored: loads its stored
    chunks into the cache, then does the same as `one_layer`.

    Args:
      params: parameters of the layer, and the counts of used units, if any.
      x: `[1, T, D]`, the layer's input for the new tokens; donated.
      at: their positions, after those of the chunks.
      past: the layer's keys and values, possibly with some chunks in or before it; donated.
      mass: see `KVCache`; donated.
      chunks: stored chunks to load.
      cfg: config of the model.
      layer: index of the layer.

    Returns:
      The next layer's input, keys and values, and the mass.
    """
    rows = _loaded_layer(params, past, chunks, layer)
    past = dataclasses.replace(past, keys=rows.keys, values=rows.values)
    return one_layer(params, x, at, past, mass, cfg=cfg, layer=layer)


def last_logits(params: Params, x: jax.Array, row: jax.Array, *, cfg: ModelConfig) -> jax.Array:
    """Logits `[1, V]` float32 after one token of the last layer's output.

    Args:
      params: parameters of the final norm and the head.
      x: `[1, T, D]`, the last layer's output.
      row: `[1]` int32, the token's index among the T.
      cfg: the model.
    """
    return logits(params, final_rows(params, x, row, cfg=cfg), cfg=cfg)


def one_layer(
    params: Params,
    x: jax.Array,
    at: TokenPositions,
    past: Past,
    mass: jax.Array | None,
    *,
    cfg: ModelConfig,
    layer: int,
) -> tuple[jax.Array, Past, jax.Array | None]:
    """`decoder.forward_layer` of the parameters of one layer (see `layer_of`)."""
    _check_layer("one_layer", x, at, past, cfg)
    if cfg.encoder is not None:
        return encoder_decoder.forward_layer(params, x, at, past, mass, cfg=cfg, layer=layer)
    weights = layer_of(params, layer)
    return forward_layer(weights, x, at, past, mass, cfg=cfg, layer=layer)


def _check_layer(step: str, x: jax.Array, at: TokenPositions, past: Past, cfg: ModelConfig) -> None:
    """Asserts the shapes of the arguments of a step over one layer of one sequence."""
    axes = Axes(step, B=1, D=cfg.hidden_size, H=cfg.head_dim)
    axes.check(jnp.floating, "B T D", x=x)
    at.check(axes)
    past.check(axes)


def _loaded_layer(params: Params, past: Past, chunks: LayerChunks, layer: int) -> Past:
    """`load_layer` of the used kv heads."""
    counts = layer_of(params, layer).operand(PARAMETER)
    heads = None if counts is None else value(counts)[0]
    return load_layer(
        past, jnp.asarray(chunks.source), jnp.asarray(chunks.bits), form=chunks.form, heads=heads
    )


# Defines the step of consecutive layers in separate weight tables, such as prefetched layers.
#
# A pure function of static shapes, as in `layers.py`.


# A layer's input, keys and values, and the attention mass.
_Carry = tuple[jax.Array, Past, jax.Array | None]


def consecutive_layers(
    params: Params,
    x: jax.Array,
    at: TokenPositions,
    past: Past,
    mass: jax.Array | None,
    count: jax.Array,
    *,
    cfg: ModelConfig,
    layer: int,
) -> _Carry:
    """Runs equal consecutive layers, each like `decoder.forward_layer`.

    A loop for any number of them, so that a layer's bits do not depend on which others run with it.

    Args:
      params: parameters of the layers, `LayersAt`, and the shared ones of all layers.
      x: `[1, T, D]`, the first layer's input; donated.
      at: positions of the T tokens.
      past: keys and values of the first of them, in the stack of all; donated.
      mass: see `KVCache`; donated.
      count: int32 scalar, number of layers.
      cfg: config of the model.
      layer: the first layer that equals them.

    Returns:
      The next layer's input, `past` with keys and values of all of them, and the mass.
    """
    axes = Axes("consecutive_layers", B=1, D=cfg.hidden_size, H=cfg.head_dim)
    axes.check(jnp.floating, "B T D", x=x)
    axes.check(jnp.int32, "", count=count)
    at.check(axes)
    past.check(axes)
    layers: Any = params[STACK]
    assert isinstance(layers, LayersAt)
    rotaries = {} if cfg.encoder is not None else rotary_by_rope(at.positions, cfg)
    rotary = rotaries.get(cfg.layer_rope(layer))

    def run(number: jax.Array, carry: _Carry) -> _Carry:
        x, first, mass = carry
        own: Any = {**params, STACK: layers.at(number)}
        how: Any = {"cfg": cfg, "layer": layer}
        here = _of_later_layer(first, number)
        if cfg.encoder is None:
            x, here, mass = forward_layer(layer_of(own, layer), x, at, here, mass, rotary=rotary, **how)
        else:
            x, here, mass = encoder_decoder.forward_layer(own, x, at, here, mass, **how)
        return x, _of_layer_of(first, here), mass

    return jax.lax.fori_loop(0, count, run, (x, past, mass))


def _of_later_layer(past: Past, number: jax.Array) -> Past:
    """Keys and values of the layer `number` layers after that of `past`, in the same stack."""
    assert past.slot is not None
    # Who streams weights attends to no coded chunks.
    assert past.coded is None
    source = past.source
    if isinstance(source, SourceKV):
        source = source.in_layer(jnp.asarray(source.layer) + number)
    return dataclasses.replace(past, slot=past.slot + number, source=source)


def _of_layer_of(first: Past, past: Past) -> Past:
    """`past` of another layer of the same stack, relabelled as that of the layer of `first`."""
    source = past.source
    if isinstance(source, SourceKV) and isinstance(first.source, SourceKV):
        source = dataclasses.replace(source, layer=first.source.layer)
    return dataclasses.replace(past, slot=first.slot, source=source)
