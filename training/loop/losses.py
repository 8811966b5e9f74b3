"""Computes losses of rows: of the next token, of a teacher's distribution over it, and of routers.

Where the logits of a batch would be large, they are computed and thrown away block by block of the
vocabulary, in the backward pass too: no array `[B, T, V]` exists.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from jaxllm.config import ModelConfig
from jaxllm.experts.routing import Routing, load_balancing_loss, router_z_loss
from jaxllm.models import decoder
from jaxllm.models.parameters import Params, head_name
from jaxllm.models.scanned_layers import STACKS, Remat
from jaxllm.nn.layers import MASKED, constrained
from jaxllm.quant import dequantize
from jaxllm.training.data.rows import Batch

# Logits of a batch up to this size are computed at once.
WHOLE_LOGITS_BYTES = 1 << 30
_BLOCK_TOKENS = 8192
# Fewer entries than this per block would make a step of many small products.
_LEAST_BLOCK_TOKENS = 1024
# Rows of the head `[n, D]`, and the id of the first, an int32 scalar.
_Block = tuple[jax.Array, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outputs:
    """Outputs of a model for the targets of a batch.

    Attributes:
      hidden: hidden states `[B, T, D]` after the final norm.
      logits: logits `[B, T, V]` float32; None if they are computed block by block.
      routing: routing of a decoder with experts.
    """

    params: Params
    hidden: jax.Array
    logits: jax.Array | None
    routing: Routing | None
    cfg: ModelConfig = dataclasses.field(metadata={"static": True})


def outputs_of(
    params: Params,
    batch: Batch,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike = jnp.float32,
    remat: Remat = "none",
) -> Outputs:
    """Runs a decoder over a batch; for `remat` see `decoder.forward_documents`."""
    inputs = (as_computed(params, dtype), jnp.asarray(batch.tokens), jnp.asarray(batch.starts))
    if cfg.experts:
        hidden, routing = decoder.forward_documents_with_routing(*inputs, cfg=cfg, dtype=dtype, remat=remat)
    else:
        hidden, routing = decoder.forward_documents(*inputs, cfg=cfg, dtype=dtype, remat=remat), None
    return outputs_of_hidden(params, hidden, routing, cfg=cfg)


def outputs_of_hidden(
    params: Params, hidden: jax.Array, routing: Routing | None = None, *, cfg: ModelConfig
) -> Outputs:
    """Returns outputs from hidden states, with logits if they are not too large."""
    size = math.prod(hidden.shape[:-1]) * cfg.vocab_size * 4
    logits = decoder.logits(params, hidden, cfg=cfg) if size <= WHOLE_LOGITS_BYTES else None
    return Outputs(params, hidden, logits, routing, cfg)


def as_computed(params: Params, dtype: DTypeLike) -> Params:
    """The parameters with stacked float32 matrices in the dtype of activations: rounded once, before a loop
    over layers gathers them from other devices. Vectors, routers and embeddings stay unchanged."""

    def cast(name: str, weight: Any) -> Any:
        apart = name.endswith((".scale", "bias", ".router"))
        plain = isinstance(weight, jax.Array) and weight.dtype == jnp.float32
        return weight.astype(dtype) if plain and name.startswith(STACKS) and not apart else weight

    return {name: cast(name, weight) for name, weight in params.items()}


def next_token_losses(outputs: Outputs, batch: Any) -> jax.Array:
    """Cross entropy in nats `[B, T]` float32 of the targets of a batch."""
    targets = jnp.asarray(batch.targets)
    if outputs.logits is not None:
        return optax.softmax_cross_entropy_with_integer_labels(outputs.logits, targets)
    sums, of_targets, _ = _over_blocks(outputs, targets)
    return jax.nn.logsumexp(sums, axis=0) - of_targets.sum(0)


def distillation_losses(outputs: Outputs, teacher: Outputs, batch: Any, *, teacher_share: float) -> jax.Array:
    """Returns losses `[B, T]` float32 of a student: `teacher_share` times the cross entropy with the
    teacher's distribution over the next token, plus the rest with the target (arXiv 1503.02531, section 2).
    No gradient reaches the teacher."""
    share, teacher = np.float32(teacher_share), jax.lax.stop_gradient(teacher)
    rest = np.float32(1) - share
    if outputs.logits is not None and teacher.logits is not None:
        wanted = jax.nn.softmax(teacher.logits)
        soft = optax.softmax_cross_entropy(outputs.logits, wanted)
        return share * soft + rest * next_token_losses(outputs, batch)
    targets = jnp.asarray(batch.targets)
    sums, of_targets, expected = _over_blocks(outputs, targets, teacher)
    return jax.nn.logsumexp(sums, axis=0) - share * expected.sum(0) - rest * of_targets.sum(0)


def divergences(outputs: Outputs, teacher: Outputs, batch: Any) -> jax.Array:
    """Kullback-Leibler divergences `[B, T]` float32, in nats, of a model's distribution over the next token
    from the teacher's. No gradient reaches the teacher."""
    teacher = jax.lax.stop_gradient(teacher)
    of_teacher = distillation_losses(teacher, teacher, batch, teacher_share=1.0)
    return distillation_losses(outputs, teacher, batch, teacher_share=1.0) - of_teacher


def router_penalty(routing: Routing, *, balance_weight: float, z_weight: float) -> jax.Array:
    """Returns the routers' losses, a scalar: load balance of each layer, and the z-loss of logits.

    A perfectly balanced layer still costs `balance_weight` times the experts per token.
    """
    balance = jnp.mean(jax.vmap(load_balancing_loss)(routing.probs, routing.ids))
    return np.float32(balance_weight) * balance + np.float32(z_weight) * router_z_loss(routing.logits)


def vocabulary_blocks(vocab_size: int) -> int:
    """Returns the minimum number of equal blocks of a vocabulary that are small enough. If no such number
    divides the vocabulary into large enough blocks, the last block is padded."""
    least = -(-vocab_size // _BLOCK_TOKENS)
    most = max(vocab_size // _LEAST_BLOCK_TOKENS, least)
    return next((count for count in range(least, most + 1) if vocab_size % count == 0), least)


def _over_blocks(
    outputs: Outputs, targets: jax.Array, teacher: Outputs | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns, per block of the vocabulary, the logarithm of the summed exponentials of logits, the logits of
    the targets in it, else zero, and the expectation of its logits under the teacher's distribution, zero
    without one: each `[blocks, B, T]` float32."""
    logits_of, blocks = _blocks(outputs)
    teacher_logits_of, teacher_blocks = (None, None) if teacher is None else _blocks(teacher)
    total = None if teacher is None else jax.nn.logsumexp(_over_blocks(teacher, targets)[0], axis=0)

    @jax.checkpoint
    def block(each: tuple[_Block, _Block | None]) -> tuple[jax.Array, jax.Array, jax.Array]:
        own, others = each
        part, expected = logits_of(own), jnp.zeros(targets.shape, jnp.float32)
        if teacher_logits_of is not None and others is not None and total is not None:
            wanted = jnp.exp(teacher_logits_of(others) - total[..., None])
            # A padded entry's logit is far below zero, but finite, so that its probability of zero wins.
            expected = (wanted * part).sum(-1)
        place = targets - own[1]
        inside = (place >= 0) & (place < part.shape[-1])
        found = jnp.take_along_axis(part, jnp.clip(place, 0, part.shape[-1] - 1)[..., None], axis=-1)
        return jax.nn.logsumexp(part, axis=-1), jnp.where(inside, found[..., 0], jnp.float32(0)), expected

    return jax.lax.map(block, (blocks, teacher_blocks))


def _blocks(outputs: Outputs) -> tuple[Callable[[_Block], jax.Array], _Block]:
    """A function from a block to logits `[B, T, n]` float32, and all blocks, with a leading axis."""
    cfg, dtype = outputs.cfg, outputs.hidden.dtype
    count = vocabulary_blocks(cfg.vocab_size)
    size = -(-cfg.vocab_size // count)
    head = outputs.params[head_name(cfg)]
    dense = head if isinstance(head, jax.Array) else dequantize(head, dtype)
    padded = jnp.pad(dense, ((0, count * size - cfg.vocab_size), (0, 0)))
    firsts = jnp.arange(count, dtype=jnp.int32) * jnp.int32(size)
    # Rounded to its own dtype within each block, so that the gradient adds up over blocks in float32.
    hidden = constrained(outputs.hidden.astype(jnp.float32), "residual")

    def logits_of(block: _Block) -> jax.Array:
        rows, first = block
        part = decoder.logits({head_name(cfg): rows}, hidden.astype(dtype), cfg=cfg)
        real = first + jnp.arange(size, dtype=jnp.int32) < cfg.vocab_size
        return jnp.where(real, constrained(part, "logits"), np.float32(MASKED))

    return logits_of, (padded.reshape(count, size, -1), firsts)
