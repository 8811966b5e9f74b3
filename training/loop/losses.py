"""Computes losses of packed rows: of the next token, of a teacher's distribution over it, and of routers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxllm.config import ModelConfig
from jaxllm.experts.routing import Routing, load_balancing_loss, router_z_loss
from jaxllm.models import decoder
from jaxllm.models.parameters import Params
from training.data.packing import Batch


def next_token_logits(
    params: Params, batch: Batch, *, cfg: ModelConfig, dtype: jnp.dtype = jnp.float32, remat: bool = False
) -> tuple[jax.Array, Routing | None]:
    """Logits `[B, T, V]` float32 of the tokens that follow, and the routing of a model with experts."""
    inputs = (params, jnp.asarray(batch.tokens), jnp.asarray(batch.starts))
    if cfg.experts:
        hidden, routing = decoder.forward_documents_with_routing(*inputs, cfg=cfg, dtype=dtype, remat=remat)
    else:
        hidden, routing = decoder.forward_documents(*inputs, cfg=cfg, dtype=dtype, remat=remat), None
    return decoder.logits(params, hidden, cfg=cfg), routing


def next_token_losses(logits: jax.Array, batch: Batch) -> jax.Array:
    """Cross entropy in nats `[B, T]` float32 of the targets of a batch."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)


def distillation_losses(
    logits: jax.Array, teacher_logits: jax.Array, batch: Batch, *, teacher_share: float
) -> jax.Array:
    """Losses `[B, T]` float32 of a student: `teacher_share` of the cross entropy with the teacher's
    distribution over the next token, the rest with the target itself (arXiv 1503.02531, section 2)."""
    wanted = jax.lax.stop_gradient(jax.nn.softmax(teacher_logits))
    share = np.float32(teacher_share)
    soft = optax.softmax_cross_entropy(logits, wanted)
    return share * soft + (np.float32(1) - share) * next_token_losses(logits, batch)


def router_penalty(routing: Routing, *, balance_weight: float, z_weight: float) -> jax.Array:
    """The routers' losses, a scalar: load balance of every layer by itself, and the z-loss of logits.

    A perfectly balanced layer still costs `balance_weight` times the experts per token.
    """
    balance = jnp.mean(jax.vmap(load_balancing_loss)(routing.probs, routing.ids))
    return np.float32(balance_weight) * balance + np.float32(z_weight) * router_z_loss(routing.logits)
