"""Everything that is ever compiled: one chunk of prefill, a few tokens of decode, the scoring of text.

Pure functions of static shapes. `serving/buckets.py` compiles them, with `cfg`, `block` and `dtype`
bound and the caches donated; nobody else does.
"""

import jax
import jax.numpy as jnp

from jaxllm.config import ModelConfig
from jaxllm.kv.cache import KVCache
from jaxllm.models.decoder import Params, forward, logits
from jaxllm.sampling import SamplerState, sample


def prefill_chunk(
    params: Params,
    tokens: jax.Array,
    valid: jax.Array,
    last: jax.Array,
    cache: KVCache,
    *,
    cfg: ModelConfig,
    dtype: jnp.dtype,
) -> tuple[jax.Array, KVCache]:
    """Feeds one chunk of a prompt.

    Args:
      params: the model's parameters.
      tokens: `[B, T]` int32; the first `valid` are real.
      valid: int32 scalar in [1, T].
      last: bool scalar; False for a chunk that others follow, whose logits nobody reads.
      cache: holds the tokens before; donated.
      cfg: the model.
      dtype: of the activations.

    Returns:
      Logits `[B, V]` float32 after the last real token (zeros unless `last`), and the cache.
    """
    hidden, cache = forward(params, tokens, cache, cfg=cfg, valid=valid, dtype=dtype)
    final = jax.lax.dynamic_index_in_dim(hidden, valid - 1, axis=1, keepdims=False)
    # The head of a large vocabulary costs as much as several layers: run it once per prompt.
    out = jax.lax.cond(
        last,
        lambda x: logits(params, x, cfg=cfg),
        lambda x: jnp.zeros((x.shape[0], cfg.vocab_size), jnp.float32),
        final,
    )
    return out, cache


def decode_step(
    params: Params,
    token: jax.Array,
    cache: KVCache,
    sampler: SamplerState,
    *,
    cfg: ModelConfig,
    dtype: jnp.dtype,
) -> tuple[jax.Array, KVCache, SamplerState]:
    """Feeds one token per row `[B]` int32 and chooses the next: ids `[B]`, cache, sampler."""
    hidden, cache = forward(params, token[:, None], cache, cfg=cfg, dtype=dtype)
    token, sampler = sample(logits(params, hidden[:, 0], cfg=cfg), sampler)
    return token, cache, sampler


def decode_tokens(
    params: Params,
    token: jax.Array,
    cache: KVCache,
    sampler: SamplerState,
    stop_ids: jax.Array,
    limit: jax.Array,
    *,
    cfg: ModelConfig,
    block: int,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array, KVCache, SamplerState]:
    """Decodes up to `limit` tokens in one dispatch, stopping on device at a stop token.

    Stop strings are the host's: it reads every token of the block in order, so none can be missed;
    what was decoded behind one is dropped.

    Args:
      params: the model's parameters.
      token: `[B]` int32, the last token chosen, not yet in the cache.
      cache: donated; must have room for `limit` more tokens.
      sampler: donated.
      stop_ids: `[n]` int32 token ids that end a row; pad with -1.
      limit: int32 scalar in [1, block].
      cfg: the model.
      block: most tokens per dispatch.
      dtype: of the activations.

    Returns:
      Tokens `[B, block]` int32 (-1 beyond the count), their count `[]` int32 (it ends early once every
      row has met a stop token), the cache with all but the last token, and the sampler.
    """
    batch = token.shape[0]
    rows = jnp.full((batch, block), -1, jnp.int32)
    running = jnp.ones(batch, jnp.bool_)

    def more(carry):
        done, running = carry[0], carry[2]
        return (done < limit) & jnp.any(running)

    def step(carry):
        done, token, running, rows, cache, sampler = carry
        token, cache, sampler = decode_step(params, token, cache, sampler, cfg=cfg, dtype=dtype)
        rows = jax.lax.dynamic_update_slice_in_dim(rows, token[:, None], done, axis=1)
        running = running & ~jnp.any(token[:, None] == stop_ids[None, :], axis=1)
        return done + 1, token, running, rows, cache, sampler

    start = (jnp.zeros((), jnp.int32), token, running, rows, cache, sampler)
    done, _, _, rows, cache, sampler = jax.lax.while_loop(more, step, start)
    return rows, done, cache, sampler


def score_chunk(
    params: Params,
    tokens: jax.Array,
    targets: jax.Array,
    valid: jax.Array,
    cache: KVCache,
    *,
    cfg: ModelConfig,
    dtype: jnp.dtype,
) -> tuple[jax.Array, KVCache]:
    """Log-probabilities of `targets` `[B, T]`, each the token after the one at its place in `tokens`.

    Returns:
      `[B, T]` float32 natural logarithms (padding gives numbers nobody should read), and the cache.
    """
    hidden, cache = forward(params, tokens, cache, cfg=cfg, valid=valid, dtype=dtype)
    scores = jax.nn.log_softmax(logits(params, hidden, cfg=cfg), axis=-1)
    return jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0], cache
