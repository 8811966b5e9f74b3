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
from training.loop.hardware import step_flops_per_token
from training.loop.losses import distillation_losses, next_token_losses, outputs_of, router_penalty
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
        outputs = outputs_of(params, batch, cfg=cfg, dtype=dtype, remat=recipe.remat)
        penalty = jnp.zeros(())
        if outputs.routing is not None:
            penalty = router_penalty(
                outputs.routing, balance_weight=recipe.balance_weight, z_weight=recipe.router_z_weight
            )
        if teacher is None:
            return next_token_losses(outputs, batch), penalty
        wanted = outputs_of(frozen, batch, cfg=teacher.cfg, dtype=dtype)
        return distillation_losses(outputs, wanted, batch, teacher_share=recipe.teacher_share), penalty

    flops = step_flops_per_token(cfg, recipe.row_tokens)
    if teacher is None:
        return Job(init, losses, cfg=cfg, flops_per_token=flops)
    # A teacher runs forward alone.
    flops += step_flops_per_token(teacher.cfg, recipe.row_tokens) / 3
    return Job(init, losses, teacher.params, cfg=cfg, frozen_cfg=teacher.cfg, flops_per_token=flops)
