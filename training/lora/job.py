"""Describes a run of low-rank adaptation, and defines the job that trains an adapter over a frozen model."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxllm.config import ModelConfig
from jaxllm.models.lora import LoraConfig, adapt, adapted_parameters, init_adapter
from jaxllm.models.parameters import Params
from jaxllm.options import option
from jaxllm.training.data.packing import Splits
from jaxllm.training.data.sources import Source
from jaxllm.training.loop.fitting import fit
from jaxllm.training.loop.hardware import step_flops_per_token
from jaxllm.training.loop.losses import next_token_losses
from jaxllm.training.loop.monitoring import Monitoring
from jaxllm.training.loop.trainer import Job, Trainer
from jaxllm.training.seq2seq.forward import AnyBatch, outputs_of_any
from jaxllm.training.seq2seq.pairs import PairSplits
from jaxllm.training.settings import TrainSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraRecipe(TrainSettings):
    """One run of low-rank adaptation; the options' help describes it."""

    folder = "lora"

    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    sources: tuple[Source, ...] = option(help="Training documents.", entries=1)
    held_out_share: float = option(
        0.02, "Share of the documents that is not trained on and picks the best checkpoint.", above=0, below=1
    )
    loader: Literal["packed", "grain"] = option("packed", "Rows of packed documents, or windows by grain.")
    # An adapter is small and starts at zero.
    weight_decay: float = option(0.0, "Decay of matrices.", low=0)
    warmup_steps: int = option(20, "Steps of linear warm-up.", low=0)


def lora_job(cfg: ModelConfig, params: Params, recipe: LoraRecipe) -> Job:
    """Returns the job that trains an adapter over the frozen model."""
    dtype, scaling = jnp.dtype(recipe.computed_in), recipe.lora.scaling
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
      trainer: trainer of a `lora_job`.
      splits: tokens of the run.
      folder: folder of `checkpoints/` and `metrics.jsonl`, created if missing.
      monitoring: destinations of the progress.
    """
    # An untrained adapter changes nothing: this is the loss of the model without one.
    without, _ = trainer.evaluate(trainer.initial().params, splits.held_out_batches())
    best = fit(
        trainer, splits.train.batch_at, splits.held_out_batches, folder, splits.source_names, monitoring
    )
    return FittedAdapter(trainer.whole(best.params), best.step, best.loss, without)
