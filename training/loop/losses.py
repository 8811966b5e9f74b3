"""Computes losses of packed rows: of the next token, of a teacher's distribution over it, and of routers.

Where the logits of a batch would be large, they are computed and thrown away block by block of the vocabulary,
in the backward pass too: no array `[B, T, V]` exists.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxllm.config import ModelConfig
from jaxllm.experts.routing import Routing, load_balancing_loss, router_z_loss
from jaxllm.models import decoder
from jaxllm.models.parameters import Params, head_name
from jaxllm.models.scanned_layers import Remat
from jaxllm.nn.sharding import constrained
from jaxllm.quant import dequantize
from training.data.packing import Batch

# Logits of a batch up to this size are computed at once.
WHOLE_LOGITS_BYTES = 1 << 30
_BLOCK_TOKENS = 8192
# Fewer entries than this per block would make a step of many small products.
_LEAST_BLOCK_TOKENS = 1024


def hidden_states(
    params: Params,
    batch: Batch,
    *,
    cfg: ModelConfig,
    dtype: jnp.dtype = jnp.float32,
    remat: Remat = "none",
) -> tuple[jax.Array, Routing | None]:
    """Hidden states `[B, T, D]` after the final norm, and the routing of a model with experts."""
    inputs = (params, jnp.asarray(batch.tokens), jnp.asarray(batch.starts))
    if cfg.experts:
        return decoder.forward_documents_with_routing(*inputs, cfg=cfg, dtype=dtype, remat=remat)
    return decoder.forward_documents(*inputs, cfg=cfg, dtype=dtype, remat=remat), None


def next_token_losses(params: Params, hidden: jax.Array, batch: Batch, *, cfg: ModelConfig) -> jax.Array:
    """Cross entropy in nats `[B, T]` float32 of the targets of a batch, by hidden states `[B, T, D]`."""
    targets = jnp.asarray(batch.targets)
    if fits_whole(hidden, cfg):
        whole = decoder.logits(params, hidden, cfg=cfg)
        return optax.softmax_cross_entropy_with_integer_labels(whole, targets)
    sums, of_targets = _over_blocks(params, hidden, cfg, _targets_in(targets))
    return jax.nn.logsumexp(sums, axis=0) - of_targets.sum(0)


def distillation_losses(
    student: tuple[Params, jax.Array, ModelConfig],
    teacher: tuple[Params, jax.Array, ModelConfig],
    batch: Batch,
    *,
    teacher_share: float,
) -> jax.Array:
    """Losses `[B, T]` float32 of a student: `teacher_share` of the cross entropy with the teacher's
    distribution over the next token, the rest with the target itself (arXiv 1503.02531, section 2).

    Student and teacher are (parameters, hidden states `[B, T, D]`, config); no gradient reaches the teacher.
    """
    share, targets = np.float32(teacher_share), jnp.asarray(batch.targets)
    params, hidden, cfg = student
    taught_by = jax.lax.stop_gradient(teacher[:2])
    if fits_whole(hidden, cfg):
        whole = decoder.logits(params, hidden, cfg=cfg)
        wanted = jax.nn.softmax(decoder.logits(*taught_by, cfg=teacher[2]))
        soft = optax.softmax_cross_entropy(whole, wanted)
        hard = optax.softmax_cross_entropy_with_integer_labels(whole, targets)
        return share * soft + (np.float32(1) - share) * hard
    teacher_sums, _ = _over_blocks(*taught_by, teacher[2], _targets_in(targets))
    teacher_sum = jax.nn.logsumexp(teacher_sums, axis=0)
    sums, of_targets, expected = _beside_teacher(
        (params, hidden, cfg), (*taught_by, teacher[2]), targets, teacher_sum
    )
    soft = share * expected.sum(0) + (np.float32(1) - share) * of_targets.sum(0)
    return jax.nn.logsumexp(sums, axis=0) - soft


def router_penalty(routing: Routing, *, balance_weight: float, z_weight: float) -> jax.Array:
    """The routers' losses, a scalar: load balance of every layer by itself, and the z-loss of logits.

    A perfectly balanced layer still costs `balance_weight` times the experts per token.
    """
    balance = jnp.mean(jax.vmap(load_balancing_loss)(routing.probs, routing.ids))
    return np.float32(balance_weight) * balance + np.float32(z_weight) * router_z_loss(routing.logits)


def fits_whole(hidden: jax.Array, cfg: ModelConfig) -> bool:
    """Whether logits of hidden states `[B, T, D]` are few enough to compute at once."""
    return math.prod(hidden.shape[:-1]) * cfg.vocab_size * 4 <= WHOLE_LOGITS_BYTES


def vocabulary_blocks(vocab_size: int) -> int:
    """The number of equal blocks of a vocabulary: the least that makes them small enough. Of a vocabulary that
    no such number divides into large enough blocks the last block is padded."""
    least = -(-vocab_size // _BLOCK_TOKENS)
    most = max(vocab_size // _LEAST_BLOCK_TOKENS, least)
    return next((count for count in range(least, most + 1) if vocab_size % count == 0), least)


# Of a block's logits `[B, T, n]` float32, and the first entry's id: what is kept of the block, `[B, T]`.
_OfBlock = Callable[[jax.Array, jax.Array], jax.Array]


def _targets_in(targets: jax.Array) -> _OfBlock:
    """A function that gives the logits of targets that are in the block, zero elsewhere."""

    def of(block: jax.Array, first: jax.Array) -> jax.Array:
        place = targets - first
        inside = (place >= 0) & (place < block.shape[-1])
        found = jnp.take_along_axis(block, jnp.clip(place, 0, block.shape[-1] - 1)[..., None], axis=-1)
        return jnp.where(inside, found[..., 0], jnp.float32(0))

    return of


def _over_blocks(
    params: Params, hidden: jax.Array, cfg: ModelConfig, of_block: _OfBlock
) -> tuple[jax.Array, jax.Array]:
    """Per block of the vocabulary the logarithm of the summed exponentials of logits, and what `of_block`
    keeps: each `[blocks, B, T]` float32."""
    logits_of, blocks = _blocks(params, hidden, cfg)

    @jax.checkpoint
    def block(own: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        part = logits_of(hidden.astype(jnp.float32), *own)
        return jax.nn.logsumexp(part, axis=-1), of_block(part, own[1])

    return jax.lax.map(block, blocks)


def _beside_teacher(
    student: tuple[Params, jax.Array, ModelConfig],
    teacher: tuple[Params, jax.Array, ModelConfig],
    targets: jax.Array,
    teacher_sum: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`_over_blocks` of a student, and the expectation of its logits under the teacher's distribution, whose
    logarithms of summed exponentials are `teacher_sum` `[B, T]`."""
    logits_of, blocks = _blocks(*student)
    teacher_logits_of, teacher_blocks = _blocks(*teacher)
    of_targets = _targets_in(targets)

    @jax.checkpoint
    def block(each: tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, ...]:
        own, others = each
        part = logits_of(student[1].astype(jnp.float32), *own)
        wanted = jnp.exp(teacher_logits_of(teacher[1].astype(jnp.float32), *others) - teacher_sum[..., None])
        # Of padding a logit is -inf, which a probability of zero would make NaN.
        expected = jnp.where(wanted > 0, wanted * part, jnp.float32(0)).sum(-1)
        return jax.nn.logsumexp(part, axis=-1), of_targets(part, own[1]), expected

    return jax.lax.map(block, (blocks, teacher_blocks))


def _blocks(
    params: Params, hidden: jax.Array, cfg: ModelConfig
) -> tuple[Callable[..., jax.Array], tuple[jax.Array, jax.Array]]:
    """A function from hidden states `[B, T, D]` float32, rows of the head `[n, D]` and the id of the first to
    logits `[B, T, n]`; and these rows and ids for all blocks.

    Hidden states are given in float32 and rounded to their own dtype within, so that their gradient adds up
    over blocks in float32.
    """
    dtype, count = hidden.dtype, vocabulary_blocks(cfg.vocab_size)
    head = params[head_name(cfg)]
    dense = head if isinstance(head, jax.Array) else dequantize(head, dtype)
    size = -(-cfg.vocab_size // count)
    padded = jnp.pad(dense, ((0, count * size - cfg.vocab_size), (0, 0)))
    firsts = jnp.arange(count, dtype=jnp.int32) * jnp.int32(size)

    def logits_of(hidden: jax.Array, rows: jax.Array, first: jax.Array) -> jax.Array:
        part = decoder.logits({head_name(cfg): rows}, hidden.astype(dtype), cfg=cfg)
        part = constrained(part, "logits")
        real = first + jnp.arange(size, dtype=jnp.int32) < cfg.vocab_size
        return jnp.where(real, part, -jnp.inf)

    return logits_of, (padded.reshape(count, size, -1), firsts)
