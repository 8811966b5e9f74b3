"""The step of decoding under a grammar, which asks another process for masks between the tokens."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.axes import Axes, shaped
from jaxllm.config import ModelConfig
from jaxllm.kernels.native_masks import CLOSED, KEPT, MASK, WAITING, follow
from jaxllm.kv.cache import KVCache
from jaxllm.models.parameters import Params
from jaxllm.sampling import NO_TOKEN, SamplerState
from jaxllm.steps.model import BlockEnd, decode_step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GuidedEnd(BlockEnd):
    """End conditions of a block, which also ends where the grammar has more to tell than a mask.

    Attributes:
      channel: `[2]` uint32, the handle of a `jaxllm.kernels.native_masks.MaskChannel` to the process that
        follows the answer (see `jaxllm.serving.guided`).
      left: int32 scalar, number of tokens that may follow; -1 for any number.
      mask: `[V]` float32, the first token's mask: 0, or -inf for tokens that are not allowed.
    """

    channel: jax.Array | np.ndarray
    left: jax.Array | np.integer
    mask: jax.Array | np.ndarray

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above at trace time."""
        super().check(axes)
        axes.check(jnp.uint32, "2", channel=self.channel)
        axes.check(jnp.int32, "", left=self.left)
        axes.check(jnp.float32, "V", mask=self.mask)


@shaped(token="int32 B")
def decode_guided(
    params: Params,
    token: jax.Array,
    cache: KVCache,
    sampler: SamplerState,
    end: GuidedEnd,
    *,
    cfg: ModelConfig,
    block: int,
    dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array, KVCache, SamplerState]:
    """Decodes up to `end.limit` tokens of one sequence in one dispatch (see `decode_tokens`). Where most
    tokens are allowed, such as within a string, plain text is sampled under the last mask, and asked about
    with the token after it; any other token has its own mask.

    Returns:
      Tokens `[1, block]` int32 (-1 beyond the count); `[3]` int32: their count, that of the first ones, which
      the grammar allows, and 1 if it was asked about the others and the reply was not read; the cache with
      all but the last token; and the sampler.
    """
    rows, limit = jnp.full((1, block), -1, jnp.int32), jnp.asarray(end.limit)

    def step(carry: Any) -> Any:
        done, first, token, _, rows, cache, sampler, mask = carry
        token, cache, sampler = decode_step(params, token, cache, sampler, mask, cfg=cfg, dtype=dtype)
        rows, done = jax.lax.dynamic_update_slice(rows, token[:, None], (0, done)), done + 1
        stopped = (token == NO_TOKEN) | jnp.any(token[:, None] == end.stop_ids[None, :], axis=1)
        asks = ~stopped[0] & (done < limit)
        left = jnp.where(end.left < 0, end.left, end.left - first)
        ints = jnp.stack([asks.astype(jnp.int32), first, done, left])
        mask, reply = follow(jnp.asarray(end.channel), rows, mask, ints)
        first = jnp.where(reply == MASK, done, first)
        reply = jnp.where(asks, reply, CLOSED)
        return done, first, token, reply, rows, cache, sampler, mask

    zero = jnp.zeros((), jnp.int32)
    start = (zero, zero, token, zero + KEPT, rows, cache, sampler, jnp.asarray(end.mask))
    found = jax.lax.while_loop(lambda carry: carry[3] <= MASK, step, start)
    done, first, _, reply, rows, cache, sampler, _ = found
    return rows, jnp.stack([done, first, (reply == WAITING).astype(jnp.int32)]), cache, sampler
