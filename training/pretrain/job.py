"""Describes a pretraining run, and defines its job: a decoder on texts, or with a teacher."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxllm.checkpoints import huggingface
from jaxllm.config import ModelConfig
from jaxllm.models import parameters
from jaxllm.options import option
from jaxllm.training.data.packing import Batch
from jaxllm.training.data.sources import Source
from jaxllm.training.data.tokenizer import ROLE_TEMPLATE
from jaxllm.training.loop.checkpoints import Params
from jaxllm.training.loop.hardware import step_flops_per_token
from jaxllm.training.loop.losses import distillation_losses, next_token_losses, outputs_of, router_penalty
from jaxllm.training.loop.trainer import Job
from jaxllm.training.settings import TrainSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainRecipe(TrainSettings):
    """One pretraining run; the options' help describes it. A recipe without sources trains on any texts."""

    folder = "pretrain"

    model: ModelConfig
    sources: tuple[Source, ...] = option((), "Training documents, by paths under the folder of all data.")
    held_out_share: float = option(
        0.02, "Share of the documents that is not trained on and picks the best checkpoint.", above=0, below=1
    )
    loader: Literal["packed", "grain"] = option("packed", "Rows of packed documents, or windows by grain.")
    teacher_share: float = option(0.0, "Share of the loss from a teacher's distribution.", low=0, high=1)
    balance_weight: float = option(0.01, "Weight of the load-balancing loss of experts.", low=0)
    router_z_weight: float = option(0.001, "Weight of the routers' z-loss.", low=0)
    chat_template: str = option(
        ROLE_TEMPLATE, "Jinja template that renders messages, written into the tokenizer's config."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_window(self.model.window_tokens)


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
    """Returns the job that trains a recipe's model."""
    cfg, dtype = recipe.model, jnp.dtype(recipe.computed_in)

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
    # A teacher only runs forward.
    flops += step_flops_per_token(teacher.cfg, recipe.row_tokens) / 3
    return Job(init, losses, teacher.params, cfg=cfg, frozen_cfg=teacher.cfg, flops_per_token=flops)
