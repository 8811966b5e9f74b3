"""The step that prefills a chunk in integers on one processor (mllm-NPU, arXiv 2407.05858)."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm.axes import shaped
from jaxllm.config import ModelConfig
from jaxllm.int8_prefill.shadow import PRODUCTS
from jaxllm.int8_prefill.subgraphs import IntegerLayer, calibration_of
from jaxllm.kv.cache import KVCache, TokenPositions
from jaxllm.models.decoder import embed_tokens, final_normed, logits
from jaxllm.models.layer_stack import layer_of
from jaxllm.models.parameters import Params
from jaxllm.models.scanned_layers import over_layers

# A layer's results, the cache, and the counts of outliers so far.
_Carry = tuple[jax.Array, KVCache, jax.Array]


@shaped(tokens="int32 B T", valid="int32", last="bool", B=1)
def prefill_integer_chunk(
    params: Params,
    tokens: jax.Array,
    valid: jax.Array,
    last: jax.Array,
    cache: KVCache,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array, KVCache]:
    """`jaxllm.steps.model.prefill_chunk` in integers.

    Args:
      params: the model's parameters, its layers by address with their calibration (see
        `jaxllm.int8_prefill.subgraphs`).
      tokens, valid, last, cache, cfg, dtype: see `prefill_chunk`; one sequence.

    Returns:
      Logits `[1, V]` float32 after the last real token (zeros unless `last`); per layer the number of
      channels with outliers of each of `PRODUCTS`, `[L, 4]` int32, zero for layers without a shadow; and the
      cache.
    """
    at = TokenPositions.after(cache.length, tokens.shape[1], valid)

    def layer(carry: _Carry, own: Params, like: int, number: jax.Array | int) -> _Carry:
        x, cache, counts = carry
        calibration, past = calibration_of(layer_of(own, like)), cache.past(like, number)
        x, past, mass, found = IntegerLayer(own, calibration, cfg, like).layer(x, at, past, cache.mass)
        if found is not None:
            counts = counts.at[number].set(found)
        return x, dataclasses.replace(cache.with_past(like, past), mass=mass), counts

    x = embed_tokens(params, tokens, at.positions, cfg=cfg, dtype=dtype)
    counts = jnp.zeros((cfg.layers, len(PRODUCTS)), jnp.int32)
    x, cache, counts = over_layers(params, cfg, layer, (x, cache, counts))
    final = jax.lax.dynamic_index_in_dim(x, valid - 1, axis=1, keepdims=False)

    def head(row: jax.Array) -> jax.Array:
        return logits(params, final_normed(params, row, cfg=cfg), cfg=cfg)

    out = jax.lax.cond(last, head, lambda row: jnp.zeros((row.shape[0], cfg.vocab_size), jnp.float32), final)
    return out, counts, dataclasses.replace(cache, length=cache.length + valid)
