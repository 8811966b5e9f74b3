"""Steps of models that run by parts: prefetched layers, and contexts restored layer by layer."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.axes import shaped
from jaxllm.config import ModelConfig
from jaxllm.contexts.codecs import ChunkFormat
from jaxllm.kernels.native_call import PARAMETER, value
from jaxllm.kv.cache import KVCache, Past, TokenPositions
from jaxllm.kv.chunks import LayerChunks, load_chunks, load_layer
from jaxllm.kv.states import SourceKV
from jaxllm.models.decoder import final_normed, forward_layer, logits
from jaxllm.models.layer import rotary_by_rope, with_room
from jaxllm.models.layer_stack import STACK, LayersAt, layer_of
from jaxllm.models.parameters import Params
from jaxllm.models.relative_positions import position_bias


@shaped(x="float 1 T D", rows="int32 n")
def final_rows(params: Params, x: jax.Array, rows: jax.Array, *, cfg: ModelConfig) -> jax.Array:
    """The head's input for some tokens, `[n, D]`: their rows of the last layer's output after the final
    norm, if there is one.

    Args:
      params: parameters of the final norm.
      x: `[1, T, D]`, the last layer's output.
      rows: `[n]` int32, indices among the T tokens.
    """
    return final_normed(params, x[0, rows], cfg=cfg)


@shaped(hidden="float n D")
def head_piece(head: Params, hidden: jax.Array, *, cfg: ModelConfig) -> jax.Array:
    """Logits `[n, v]` float32 for v tokens of the vocabulary.

    Args:
      head: the rows `[v, D]` of these tokens, named like the whole head, and their biases `[v]`, if any.
      hidden: `[n, D]`, see `final_rows`.
    """
    # Several rows are the nodes of a tree.
    return logits(head, hidden, cfg=cfg, batch_invariant=True)


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


@shaped(x="float B T D", B=1)
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

    Returns:
      The next layer's input, keys and values.
    """
    past = loaded_layer(params, past, chunks, layer)
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

    Returns:
      The next layer's input, keys and values, and the mass.
    """
    rows = loaded_layer(params, past, chunks, layer)
    past = dataclasses.replace(past, keys=rows.keys, values=rows.values)
    return one_layer(params, x, at, past, mass, cfg=cfg, layer=layer)


def last_logits(params: Params, x: jax.Array, row: jax.Array, *, cfg: ModelConfig) -> jax.Array:
    """Logits `[1, V]` float32 after one token of the last layer's output.

    Args:
      params: parameters of the final norm and the head.
      x: `[1, T, D]`, the last layer's output.
      row: `[1]` int32, the token's index among the T.
    """
    return logits(params, final_rows(params, x, row, cfg=cfg), cfg=cfg)


@shaped(x="float B T D", B=1)
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
    """`decoder.forward_layer` of the parameters of one layer (see `layer_of`), and "relative_positions" if
    the model has them."""
    weights, bias = layer_of(params, layer), position_bias(params, cfg)
    return forward_layer(weights, x, at, past, mass, cfg=cfg, layer=layer, order=bias)


def loaded_layer(params: Params, past: Past, chunks: LayerChunks, layer: int) -> Past:
    """`load_layer` of the used kv heads."""
    counts = layer_of(params, layer).operand(PARAMETER)
    heads = None if counts is None else value(counts)[0]
    return load_layer(
        past, jnp.asarray(chunks.source), jnp.asarray(chunks.bits), form=chunks.form, heads=heads
    )


# A layer's input, keys and values, and the attention mass.
_Carry = tuple[jax.Array, Past, jax.Array | None]


@shaped(x="float B T D", count="int32", B=1)
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
      layer: the first layer that equals them.

    Returns:
      The next layer's input, `past` with keys and values of all of them, and the mass.
    """
    layers: Any = params[STACK]
    assert isinstance(layers, LayersAt)
    bias = position_bias(params, cfg)
    order = rotary_by_rope(at.positions, cfg).get(cfg.layer_rope(layer)) if bias is None else bias
    how: Any = {"cfg": cfg, "layer": layer, "order": order}

    def run(number: jax.Array, carry: _Carry) -> _Carry:
        x, first, mass = carry
        own: Any = {**params, STACK: layers.at(number)}
        x, here, mass = forward_layer(layer_of(own, layer), x, at, _layers_on(first, number), mass, **how)
        return x, _layers_on(here, -number), mass

    return jax.lax.fori_loop(0, count, run, (x, past, mass))


def _layers_on(past: Past, count: jax.Array) -> Past:
    """`past`, labelled as that of the layer `count` layers after it, in the same stack."""
    assert past.slot is not None
    # Who streams weights attends to no coded chunks.
    assert past.coded is None
    source = past.source
    if isinstance(source, SourceKV):
        source = source.in_layer(jnp.asarray(source.layer) + count)
    return dataclasses.replace(past, slot=past.slot + count, source=source)
