"""Defines the training of a decoder, on texts alone or with a teacher."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.checkpoints import huggingface
from jaxllm.config import ModelConfig
from jaxllm.models import parameters
from training.data.packing import Batch
from training.loop.checkpoints import Params
from training.loop.losses import distillation_losses, next_token_logits, next_token_losses, router_penalty
from training.loop.trainer import Job
from training.pretrain.recipe import PretrainRecipe


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A trained model to distil; its vocabulary is the student's."""

    cfg: ModelConfig
    params: Params

    @classmethod
    def read(cls, folder: Path) -> "Teacher":
        """Reads a Hugging Face folder."""
        cfg = huggingface.read_config(folder)
        return cls(cfg, {name: jnp.asarray(value) for name, value in huggingface.read_params(folder, cfg)})


def pretrain_job(recipe: PretrainRecipe, teacher: Teacher | None = None) -> Job:
    """The job that trains a recipe's model."""
    cfg, dtype = recipe.model, jnp.dtype(recipe.precision)

    def init(key: jax.Array) -> Params:
        return parameters.init_params(cfg, key)

    def losses(params: Params, frozen: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        logits, routing = next_token_logits(params, batch, cfg=cfg, dtype=dtype, remat=recipe.remat)
        penalty = jnp.zeros(())
        if routing is not None:
            penalty = router_penalty(
                routing, balance_weight=recipe.balance_weight, z_weight=recipe.router_z_weight
            )
        if teacher is None:
            return next_token_losses(logits, batch), penalty
        wanted, _ = next_token_logits(frozen, batch, cfg=teacher.cfg, dtype=dtype)
        return distillation_losses(logits, wanted, batch, teacher_share=recipe.teacher_share), penalty

    return Job(init, losses, None if teacher is None else teacher.params)
