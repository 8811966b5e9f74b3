"""What is compiled of a model by pieces, where all of it at once is not there: layers whose weights are read
while others run, and the way of a context's chunks back into a cache, layer by layer.

Pure functions of static shapes, as in `steps.py`.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxllm.config import ModelConfig
from jaxllm.kv.cache import KVCache, Places
from jaxllm.kv.chunks import Past, load_chunks
from jaxllm.kv.codecs import ChunkFormat
from jaxllm.layers import normalize
from jaxllm.models.decoder import forward_layer, logits
from jaxllm.models.layer_params import LayerParams
from jaxllm.models.parameters import Params
from jaxllm.quant import Weight
from jaxllm.used_units import used_in_layer


def final_rows(params: Params, x: jax.Array, rows: jax.Array, *, cfg: ModelConfig) -> jax.Array:
    """What the head takes of some tokens, `[N, D]`.

    Args:
      params: the final norm's.
      x: `[1, T, D]`, the last layer's output.
      rows: `[N]` int32, which of the T tokens.
      cfg: the model.
    """
    return normalize(x[0, rows], LayerParams(params, "").norm("final_norm", cfg))


def head_piece(table: Weight, hidden: jax.Array, *, cfg: ModelConfig) -> jax.Array:
    """Logits `[N, R]` float32 for R tokens of the vocabulary.

    Args:
      table: their rows `[R, D]`.
      hidden: `[N, D]`, see `final_rows`.
      cfg: the model.
    """
    # Several rows are those of a tree.
    return logits({"embed.tokens" if cfg.tied_head else "head": table}, hidden, cfg=cfg, rowwise=True)


def load_cache(
    params: Params,
    cache: KVCache,
    sources: jax.Array | tuple[jax.Array, ...],
    bits: jax.Array,
    *,
    cfg: ModelConfig,
    form: ChunkFormat,
) -> KVCache:
    """Puts stored chunks into all layers of a cache.

    Args:
      params: what says how many units are used, where anything does (see `jaxllm.used_units`).
      cache: of one sequence; donated. Its length is the caller's business.
      sources: where the blobs of all layers are, and
      bits: how wide they are (see `load_chunks`).
      cfg: the model.
      form: how they were stored.
    """
    pasts = list(zip(cache.keys, cache.values, strict=True))
    keys, values = zip(*_loaded(params, pasts, sources, bits, range(cfg.layers), form=form), strict=True)
    return dataclasses.replace(cache, keys=keys, values=values)


def restore_layer(
    params: Params,
    x: jax.Array,
    at: Places,
    past: tuple[jax.Array, jax.Array],
    source: jax.Array,
    bits: jax.Array,
    *,
    cfg: ModelConfig,
    layer: int,
    form: ChunkFormat,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One layer of a context that comes back: stored chunks are put into its cache, then tokens of the other
    chunks pass the layer and write their own keys and values (LLMS, section 3.3).

    Exact: a token attends to all before it, which are there by then, stored or of the same pass.

    Args:
      params: the layer's, and what says how many units are used.
      x: `[1, T, D]`, the layer's input; donated.
      at: where the T tokens stand.
      past: keys and values `[1, K, S, H]`; donated.
      source: where the layer's blobs are: addresses `[N, 2]`, or the blobs themselves.
      bits: how wide they are (see `load_chunks`).
      cfg: the model.
      layer: its index.
      form: how chunks were stored.

    Returns:
      The next layer's input, keys and values.
    """
    sources = source[None] if source.dtype == jnp.uint32 else (source,)
    (past,) = _loaded(params, [past], sources, bits, [layer], form=form)
    x, past, _ = forward_layer(params, x, at, past, cfg=cfg, layer=layer)
    return x, past


def _loaded(
    params: Params,
    pasts: Sequence[Past],
    sources: jax.Array | tuple[jax.Array, ...],
    bits: jax.Array,
    layers: Sequence[int],
    *,
    form: ChunkFormat,
) -> tuple[Past, ...]:
    """`load_chunks` into some layers."""
    counts = LayerParams(params, "").counts
    # Blobs that come by value have all of the cache's heads.
    used = [used_in_layer(counts, layer)[0] for layer in layers] if isinstance(sources, jax.Array) else ()
    return load_chunks(pasts, sources, bits, form=form, used=used)
