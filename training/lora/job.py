"""Defines the training of a low-rank adapter over a frozen model."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.config import ModelConfig
from jaxllm.models.lora import adapt, adapted_parameters, init_adapter
from jaxllm.models.parameters import Params
from training.data.packing import Splits
from training.loop.fitting import fit
from training.loop.hardware import step_flops_per_token
from training.loop.losses import next_token_losses
from training.loop.monitoring import Monitoring
from training.loop.trainer import Job, Trainer
from training.lora.recipe import LoraRecipe
from training.seq2seq.outputs import AnyBatch, outputs_of_any
from training.seq2seq.splits import PairSplits


def lora_job(cfg: ModelConfig, params: Params, recipe: LoraRecipe) -> Job:
    """The job that trains an adapter, with the model frozen."""
    dtype, scaling = jnp.dtype(recipe.precision), recipe.lora.scaling
    adapted_parameters(cfg, recipe.lora.targets)

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return init_adapter(cfg, recipe.lora, key)

    def losses(adapter: dict[str, jax.Array], frozen: Params, batch: AnyBatch) -> tuple[jax.Array, jax.Array]:
        params = adapt(frozen, adapter, scaling)
        outputs = outputs_of_any(params, batch, cfg=cfg, dtype=dtype, remat=recipe.remat)
        return next_token_losses(outputs, batch), jnp.zeros(())

    flops = step_flops_per_token(cfg, recipe.row_tokens, adapter=True)
    return Job(init, losses, dict(params), cfg=cfg, frozen_cfg=cfg, flops_per_token=flops)


@dataclasses.dataclass(frozen=True)
class FittedAdapter:
    """Result of training: the best adapter, its step, and held-out losses with and without it."""

    adapter: dict[str, Any]
    best_step: int
    loss: float
    without: float


def fit_adapter(
    trainer: Trainer, splits: Splits | PairSplits, folder: Path, monitoring: Monitoring
) -> FittedAdapter:
    """Trains an adapter, or resumes from the checkpoints in `folder`.

    Args:
      trainer: of a `lora_job`.
      splits: the run's tokens.
      folder: of `checkpoints/` and `metrics.jsonl`, made if missing.
      monitoring: where progress goes.
    """
    # An untrained adapter changes nothing: this is the loss of the model alone.
    without, _ = trainer.evaluate(trainer.initial().params, splits.held_out_batches())
    best = fit(
        trainer, splits.train.batch_at, splits.held_out_batches, folder, splits.source_names, monitoring
    )
    return FittedAdapter(trainer.whole(best.params), best.step, best.loss, without)
