"""Steps of a whole model: prefill of a chunk, decode of a block of tokens, scoring and embedding."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.axes import Axes, shaped
from jaxllm.config import ModelConfig
from jaxllm.kv.cache import KVCache
from jaxllm.models.decoder import (
    forward,
    forward_documents,
    forward_documents_with_routing,
    logits,
)
from jaxllm.models.layer import InputEmbeddings
from jaxllm.models.parameters import Params
from jaxllm.sampling import NO_TOKEN, SamplerState, sample

if TYPE_CHECKING:
    from jaxllm.nn.documents import Branches

# Pure functions of static shapes. Only `serving/buckets/` compiles them, with `cfg`, `block` and `dtype`
# bound and the caches donated.


# Number of tokens whose logits `score_chunk` and `score_branches` have in memory together.
SCORE_BLOCK = 128


@shaped(tokens="int32 B T", valid="int32", last="bool")
def prefill_chunk(
    params: Params,
    tokens: jax.Array,
    valid: jax.Array,
    last: jax.Array,
    cache: KVCache,
    inputs: InputEmbeddings | None = None,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike,
) -> tuple[jax.Array, KVCache]:
    """Prefills one chunk of a prompt.

    Args:
      tokens: `[B, T]` int32; the first `valid` are valid.
      valid: int32 scalar in [1, T].
      last: bool scalar; False if more chunks follow, so that no logits are needed.
      cache: cache of the tokens before; donated.
      inputs: embeddings in place of some of the tokens; None for none.

    Returns:
      Logits `[B, V]` float32 after the last valid token (zeros unless `last`), and the cache.
    """
    row = valid - 1
    hidden, cache = forward(params, tokens, cache, cfg=cfg, valid=valid, row=row, inputs=inputs, dtype=dtype)
    final = hidden[:, 0]
    # The head of a large vocabulary costs as much as several layers: run it once per prompt.
    out = jax.lax.cond(
        last,
        lambda x: logits(params, x, cfg=cfg),
        lambda x: jnp.zeros((x.shape[0], cfg.vocab_size), jnp.float32),
        final,
    )
    return out, cache


@shaped(token="int32 B")
def decode_step(
    params: Params,
    token: jax.Array,
    cache: KVCache,
    sampler: SamplerState,
    mask: jax.Array | None = None,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike,
) -> tuple[jax.Array, KVCache, SamplerState]:
    """Runs one token per sequence, `[B]` int32, and samples the next: ids `[B]`, cache, sampler. `mask`,
    `[V]` float32, is added to its logits."""
    hidden, cache = forward(params, token[:, None], cache, cfg=cfg, dtype=dtype)
    found = logits(params, hidden[:, 0], cfg=cfg)
    token, sampler = sample(found if mask is None else found + mask, sampler)
    return token, cache, sampler


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockEnd:
    """End conditions of a block of decoding.

    Attributes:
      stop_ids: `[n]` int32, token ids that end a row; pad with -1.
      limit: int32 scalar, maximum number of tokens, at least 1.
    """

    stop_ids: jax.Array | np.ndarray
    limit: jax.Array | np.integer

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above at trace time."""
        axes.check(jnp.int32, "n", stop_ids=self.stop_ids)
        axes.check(jnp.int32, "", limit=self.limit)


@shaped(token="int32 B")
def decode_tokens(
    params: Params,
    token: jax.Array,
    cache: KVCache,
    sampler: SamplerState,
    end: BlockEnd,
    *,
    cfg: ModelConfig,
    block: int,
    dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array, KVCache, SamplerState]:
    """Decodes up to `end.limit` tokens in one dispatch, stopping on device at a stop token.

    Stop strings are found on the host, which checks each token of the block in order and drops the tokens
    after a match.

    Args:
      token: `[B]` int32, the last sampled token, not yet in the cache.
      cache: cache; donated; must have room for `end.limit` more tokens.
      sampler: sampler state; donated.
      end: end conditions, within `block` tokens.
      block: maximum number of tokens per dispatch.

    Returns:
      Tokens `[B, block]` int32 (-1 beyond the count), their count `[]` int32 (less than `limit` if each
      sequence has reached a stop token or `NO_TOKEN`), the cache with all but the last token, and the
      sampler.
    """
    batch = token.shape[0]
    rows = jnp.full((batch, block), -1, jnp.int32)
    running = jnp.ones(batch, jnp.bool_)

    def more(carry: Any) -> jax.Array:
        done, running = carry[0], carry[2]
        return (done < end.limit) & jnp.any(running)

    def step(carry: Any) -> Any:
        done, token, running, rows, cache, sampler = carry
        token, cache, sampler = decode_step(params, token, cache, sampler, cfg=cfg, dtype=dtype)
        rows = jax.lax.dynamic_update_slice_in_dim(rows, token[:, None], done, axis=1)
        stopped = (token == NO_TOKEN) | jnp.any(token[:, None] == end.stop_ids[None, :], axis=1)
        running = running & ~stopped
        return done + 1, token, running, rows, cache, sampler

    start = (jnp.zeros((), jnp.int32), token, running, rows, cache, sampler)
    done, _, _, rows, cache, sampler = jax.lax.while_loop(more, step, start)
    return rows, done, cache, sampler


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScoredChunk:
    """Scores of a chunk's targets, each the possible token after a position. Log-probabilities are natural.

    Attributes:
      logprobs: `[B, T]` float32, log-probability of each target.
      ranks: `[B, T]` int32, 1 plus the number of likelier tokens.
      top_ids: `[B, T, K]` int32, the likeliest tokens, likeliest first; of equal ones the lower id.
      top_logprobs: `[B, T, K]` float32, theirs.
    """

    logprobs: jax.Array
    ranks: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


@shaped(tokens="int32 B T", targets="int32 B T", valid="int32")
def score_chunk(
    params: Params,
    tokens: jax.Array,
    targets: jax.Array,
    valid: jax.Array,
    cache: KVCache,
    *,
    top: int = 1,
    cfg: ModelConfig,
    dtype: DTypeLike,
) -> tuple[ScoredChunk, KVCache]:
    """Scores `targets` `[B, T]`, each the token after the one at its index in `tokens`.

    Args:
      tokens, targets: `[B, T]` int32; the first `valid` are valid.
      valid: int32 scalar in [1, T].
      cache: cache of the tokens before; donated.
      top: number of likeliest tokens (K).

    Returns:
      The scores, undefined for padding, and the cache.
    """
    hidden, cache = forward(params, tokens, cache, cfg=cfg, valid=valid, dtype=dtype)
    size = min(tokens.shape[1], SCORE_BLOCK)

    def block(index: jax.Array, found: ScoredChunk) -> ScoredChunk:
        at = index * size
        rows = jax.lax.dynamic_slice_in_dim(hidden, at, size, axis=1)
        goals = jax.lax.dynamic_slice_in_dim(targets, at, size, axis=1)[..., None]
        scores = jax.nn.log_softmax(logits(params, rows, cfg=cfg), axis=-1)
        chosen = jnp.take_along_axis(scores, goals, axis=-1)
        # Sorting costs more than finding the largest.
        ids = jnp.argmax(scores, axis=-1)[..., None] if top == 1 else jax.lax.top_k(scores, top)[1]
        here = ScoredChunk(
            logprobs=chosen[..., 0],
            ranks=1 + jnp.sum(scores > chosen, axis=-1, dtype=jnp.int32),
            top_ids=ids.astype(jnp.int32),
            top_logprobs=jnp.take_along_axis(scores, ids, axis=-1),
        )
        return jax.tree.map(
            lambda all_, part: jax.lax.dynamic_update_slice_in_dim(all_, part, at, axis=1), found, here
        )

    # By blocks, so that the logits of all tokens are never in memory together.
    each, several = tokens.shape, (*tokens.shape, top)
    empty = ScoredChunk(
        logprobs=jnp.zeros(each, jnp.float32),
        ranks=jnp.zeros(each, jnp.int32),
        top_ids=jnp.zeros(several, jnp.int32),
        top_logprobs=jnp.zeros(several, jnp.float32),
    )
    return jax.lax.fori_loop(0, (valid + size - 1) // size, block, empty), cache


@shaped(tokens="int32 B T", valid="int32")
def embed_chunk(
    params: Params,
    tokens: jax.Array,
    valid: jax.Array,
    cache: KVCache,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike,
) -> tuple[jax.Array, KVCache]:
    """The sum of the hidden states after the final norm of `valid` tokens `[B, T]`.

    Returns:
      `[B, D]` float32, and the cache.
    """
    hidden, cache = forward(params, tokens, cache, cfg=cfg, valid=valid, dtype=dtype)
    # Selected, not multiplied: hidden states of padding may be anything.
    real = (jnp.arange(tokens.shape[1], dtype=jnp.int32) < valid)[None, :, None]
    return jnp.sum(jnp.where(real, hidden.astype(jnp.float32), jnp.float32(0)), axis=1), cache


@shaped(tokens="int32 B T", starts="int32 B T")
def route_documents(
    params: Params, tokens: jax.Array, starts: jax.Array, *, cfg: ModelConfig, dtype: DTypeLike
) -> jax.Array:
    """The experts `[L_sparse, B, T, k]` int32 that tokens `[B, T]` of packed documents visit, best first."""
    _, routing = forward_documents_with_routing(
        params, tokens, starts, cfg=cfg, dtype=dtype, differentiable=False
    )
    return routing.ids


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScoredTokens:
    """Targets of `score_branches`.

    Attributes:
      places: `[P]` int32, indices of the tokens before them in the flattened `[B·T]`; P is a multiple of
        `SCORE_BLOCK`.
      targets: `[P]` int32, the possible next token of each of those.
      count: int32 scalar, number of valid targets.
    """

    places: jax.Array | np.ndarray
    targets: jax.Array | np.ndarray
    count: jax.Array | np.integer

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above at trace time."""
        axes.check(jnp.int32, "P", places=self.places, targets=self.targets)
        axes.check(jnp.int32, "", count=self.count)


@shaped(tokens="int32 B T", starts="int32 B T")
def score_branches(
    params: Params,
    tokens: jax.Array,
    starts: jax.Array,
    branches: "Branches",
    scored: ScoredTokens,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of tokens in many short documents, each with several ends, in one dispatch.

    Args:
      tokens: `[B, T]` int32; consecutively packed documents.
      starts: `[B, T]` int32 (see `forward_documents`); padding is a separate document.
      scored: tokens to score.

    Returns:
      `[P]` float32 natural logarithms, and `[P]` bool, whether no other token is likelier; zeros after the
      last block with a valid target.
    """
    hidden = forward_documents(params, tokens, starts, branches, cfg=cfg, dtype=dtype, differentiable=False)
    hidden = hidden.reshape(-1, hidden.shape[-1])

    def block(index: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        at = index * SCORE_BLOCK
        rows = hidden[jax.lax.dynamic_slice_in_dim(jnp.asarray(scored.places), at, SCORE_BLOCK)]
        goals = jax.lax.dynamic_slice_in_dim(jnp.asarray(scored.targets), at, SCORE_BLOCK)
        out = logits(params, rows, cfg=cfg)
        chosen = jnp.take_along_axis(out, goals[:, None], axis=-1)[:, 0]
        here = chosen - jax.nn.logsumexp(out, axis=-1), chosen >= out.max(axis=-1)
        update = jax.lax.dynamic_update_slice_in_dim
        return update(found[0], here[0], at, axis=0), update(found[1], here[1], at, axis=0)

    # By blocks, so that the logits of all targets are never in memory together, and none are computed for
    # padding.
    blocks = (scored.count + SCORE_BLOCK - 1) // SCORE_BLOCK
    size = scored.places.shape
    return jax.lax.fori_loop(0, blocks, block, (jnp.zeros(size, jnp.float32), jnp.zeros(size, bool)))
