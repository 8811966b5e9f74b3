"""Defines the training of an encoder-decoder: on targets alone, or with a teacher."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxllm.checkpoints import huggingface
from jaxllm.config import ModelConfig
from jaxllm.experts.routing import Routing
from jaxllm.models import decoder, parameters
from jaxllm.models.parameters import ENCODER
from training.loop.checkpoints import Params
from training.loop.losses import router_penalty
from training.loop.trainer import Job
from training.seq2seq.batches import PairBatch
from training.seq2seq.forward import Drop, dropout, no_drop, target_hidden
from training.seq2seq.recipe import Seq2SeqRecipe


@dataclasses.dataclass(frozen=True)
class Seq2SeqTeacher:
    """A trained model to distil; its vocabulary is the student's."""

    cfg: ModelConfig
    params: Mapping[str, jax.Array]

    @classmethod
    def read(cls, folder: Path) -> "Seq2SeqTeacher":
        """Reads a Hugging Face folder."""
        cfg = huggingface.read_config(folder)
        return cls(cfg, {name: jnp.asarray(value) for name, value in huggingface.read_params(folder, cfg)})


def seq2seq_job(recipe: Seq2SeqRecipe, teacher: Seq2SeqTeacher | None = None) -> Job:
    """The job that trains a recipe's model."""
    cfg = recipe.cfg

    def init(key: jax.Array) -> Params:
        return init_seq2seq(cfg, key)

    def losses(params: Params, frozen: Any, batch: PairBatch) -> tuple[jax.Array, jax.Array]:
        logits, _ = target_logits(params, batch, cfg=cfg, dtype=jnp.dtype(recipe.precision))
        return cross_entropy(logits, batch.targets), jnp.zeros(())

    def drawn(params: Params, frozen: Any, batch: PairBatch, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        dtype, drop = jnp.dtype(recipe.precision), dropout(key, recipe.dropout)
        logits, routings = target_logits(params, batch, cfg=cfg, dtype=dtype, drop=drop)
        penalty = jnp.zeros(())
        for routing in routings:
            one = jax.tree.map(lambda each: each[None], routing)
            penalty += router_penalty(
                one, balance_weight=recipe.balance_weight, z_weight=recipe.router_z_weight
            ) / np.float32(len(routings))
        found = cross_entropy(logits, batch.targets, recipe.label_smoothing)
        if teacher is None:
            return found, penalty
        wanted, _ = target_logits(frozen, batch, cfg=teacher.cfg, dtype=dtype)
        share = np.float32(recipe.teacher_share)
        soft = optax.softmax_cross_entropy(logits, jax.nn.softmax(wanted))
        return share * soft + (np.float32(1) - share) * found, penalty

    flops = step_flops_per_token(cfg)
    if teacher is None:
        return Job(init, losses, drawn_losses=drawn, flops_per_token=flops)
    # A teacher runs forward alone.
    flops += step_flops_per_token(teacher.cfg) / 3
    return Job(init, losses, dict(teacher.params), drawn_losses=drawn, flops_per_token=flops)


def target_logits(
    params: Mapping[str, jax.Array],
    batch: PairBatch,
    *,
    cfg: ModelConfig,
    dtype: jnp.dtype = jnp.float32,
    drop: Drop = no_drop,
) -> tuple[jax.Array, list[Routing]]:
    """Logits `[B, T, V]` float32 of a batch's targets, and the routing of each layer with experts."""
    computed, hidden, routings = target_hidden(params, batch, cfg=cfg, dtype=dtype, drop=drop)
    return decoder.logits(computed, hidden, cfg=cfg), routings


def cross_entropy(logits: jax.Array, targets: jax.Array | np.ndarray, smoothing: float = 0.0) -> jax.Array:
    """Cross entropy in nats `[B, T]` float32 of targets, of which `smoothing` is spread over all tokens
    (arXiv 1512.00567, section 7)."""
    targets = jnp.asarray(targets)
    found = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    if not smoothing:
        return found
    even = jax.nn.logsumexp(logits, axis=-1) - jnp.mean(logits, axis=-1)
    return np.float32(1 - smoothing) * found + np.float32(smoothing) * even


def init_seq2seq(cfg: ModelConfig, key: jax.Array) -> Params:
    """Random parameters to train from, such that the first scores and logits are near a variance of one
    though T5 does not scale scores: queries are smaller by H^-0.5, and embeddings that the head is tied to
    are larger, since the head scales them by D^-0.5."""
    params = parameters.init_params(cfg, key)
    for name in params:
        if name.endswith(".q"):
            params[name] *= np.float32(cfg.head_dim**-0.5)
    if cfg.tied_head and cfg.logit_scale != 1.0:
        params["embed.tokens"] *= np.float32(0.25 / 0.02)
    return params


def step_flops_per_token(cfg: ModelConfig) -> float:
    """Operations of a training step per token of one side, in products with weights: 2 forward and 4 backward
    for each weight that one source token and one target token use."""
    used = 0.0
    for name, spec in parameters.param_specs(cfg).items():
        side = cfg.encoder if name.startswith(ENCODER) else cfg
        assert side is not None
        share = side.experts_per_token / side.experts if ".experts." in name else 1.0
        if len(spec.shape) > 1 and (name != "embed.tokens" or cfg.tied_head):
            used += share * float(np.prod(spec.shape))
    return 6 * used
