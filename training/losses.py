"""The losses of packed rows: of the next token, and of a teacher's distribution over it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxllm.config import ModelConfig
from jaxllm.models import decoder
from training.packing import Batch

Params = decoder.Params


def next_token_losses(
    params: Params, batch: Batch, *, cfg: ModelConfig, dtype: jnp.dtype = jnp.float32, remat: bool = False
) -> jax.Array:
    """Cross entropy in nats `[B, T]` float32 of the targets of a batch."""
    hidden = decoder.forward_documents(params, batch.tokens, batch.starts, cfg=cfg, dtype=dtype, remat=remat)
    scores = decoder.logits(params, hidden, cfg=cfg)
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch.targets)


def distillation_losses(
    params: Params,
    teacher: Params,
    batch: Batch,
    *,
    cfg: ModelConfig,
    teacher_cfg: ModelConfig,
    teacher_share: float,
    dtype: jnp.dtype = jnp.float32,
    remat: bool = False,
) -> jax.Array:
    """Losses `[B, T]` float32 of a student: `teacher_share` of the cross entropy with the teacher's
    distribution over the next token, the rest with the target itself (arXiv 1503.02531, section 2)."""
    hidden = decoder.forward_documents(params, batch.tokens, batch.starts, cfg=cfg, dtype=dtype, remat=remat)
    scores = decoder.logits(params, hidden, cfg=cfg)
    seen = decoder.forward_documents(teacher, batch.tokens, batch.starts, cfg=teacher_cfg, dtype=dtype)
    wanted = jax.lax.stop_gradient(jax.nn.softmax(decoder.logits(teacher, seen, cfg=teacher_cfg)))
    soft = optax.softmax_cross_entropy(scores, wanted)
    hard = optax.softmax_cross_entropy_with_integer_labels(scores, batch.targets)
    share = np.float32(teacher_share)
    return share * soft + (np.float32(1) - share) * hard
