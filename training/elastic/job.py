"""Defines the training of all levels together, which recovers what smaller levels lose (ELMS, section 3.2).

Every step trains the whole model on the text, and the smallest level and one other, drawn at random, on the
whole model's distribution (the sandwich rule of universally slimmable networks, arXiv 1903.05134, with nested
weights as in MatFormer, arXiv 2310.07707). Levels are counts of used units, so that a step has code for the
whole model and for one level. The alternative, a low-rank adapter per level over frozen weights, is
`level_job`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import WHOLE, ModelConfig
from jaxllm.elastic.ladder import Ladder
from jaxllm.kernels.used_units import PARAMETER
from jaxllm.models.parameters import Params
from training.elastic.levels import (
    adapter_of_level,
    at_level,
    counts_of_levels,
    level_counts,
    used_experts,
)
from training.loop.hardware import step_flops_per_token
from training.loop.losses import Outputs, distillation_losses, divergences, next_token_losses
from training.loop.trainer import Job
from training.lora.job import lora_job
from training.lora.recipe import LoraRecipe
from training.seq2seq.outputs import AnyBatch, outputs_of_any
from training.settings import TrainSettings


def joint_job(
    cfg: ModelConfig,
    params: Mapping[str, Any],
    ladder: Ladder,
    settings: TrainSettings,
    *,
    original: Params | None = None,
) -> Job:
    """Trains the weights of all levels together.

    The loss of a step is the mean of the whole model's, the smallest level's and that of one level between
    them; the held-out loss is the mean over all levels of the next token's. The whole model's loss is the
    next token's, and with `original` also its divergence from that model's distribution.

    Args:
      cfg: the whole model.
      params: its float32 parameters, units in order, to start from.
      ladder: the levels.
      settings: of the training.
      original: the model that the whole model stays close to; None: it is free.
    """
    dtype = jnp.dtype(settings.precision)
    smaller = counts_of_levels(cfg, ladder, tuple(level for level in ladder.levels if level != WHOLE))
    levels = counts_of_levels(cfg, ladder, ladder.levels)
    count = len(ladder.levels) - 1

    def run(params: Params, batch: AnyBatch, counts: Mapping[str, Any] | None = None) -> Outputs:
        own = params if counts is None else at_level(params, counts, cfg)
        return outputs_of_any(own, batch, cfg=cfg, dtype=dtype, remat=settings.remat)

    def drawn_losses(
        params: Params, frozen: Any, batch: AnyBatch, key: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        whole = run(params, batch)
        losses = next_token_losses(whole, batch)
        if original is not None:
            losses = losses + divergences(whole, run(frozen, batch), batch)
        if not count:
            return losses, jnp.zeros(())
        wanted = jax.lax.stop_gradient(whole)
        drawn = jnp.zeros(1, jnp.int32)
        if count > 1:
            drawn = jnp.stack([drawn[0], jax.random.randint(key, (), 1, count)])

        def taught(counts: Mapping[str, Any]) -> jax.Array:
            return distillation_losses(run(params, batch, counts), wanted, batch, teacher_share=1.0)

        # One after the other: a step then holds the activations of one level, and has the code of one.
        others = jax.lax.map(taught, {name: jnp.asarray(each)[drawn] for name, each in smaller.items()})
        return (losses + others.sum(0)) * np.float32(1 / (1 + drawn.shape[0])), jnp.zeros(())

    def losses(params: Params, frozen: Any, batch: AnyBatch) -> tuple[jax.Array, jax.Array]:
        del frozen
        each = jax.lax.map(
            lambda counts: next_token_losses(run(params, batch, counts), batch),
            {name: jnp.asarray(own) for name, own in levels.items()},
        )
        return each.mean(0), jnp.zeros(())

    # The whole model, and one level or two; units that a level does not use are computed all the same. The
    # original's forward pass is a third of a step.
    runs = 1 + min(count, 2) + (0 if original is None else 1 / 3)
    flops = step_flops_per_token(cfg, settings.row_tokens) * runs
    beside = {} if original is None else {"frozen": dict(original), "frozen_cfg": cfg}
    return Job(dict(params), losses, drawn_losses=drawn_losses, cfg=cfg, flops_per_token=flops, **beside)


def level_job(
    cfg: ModelConfig, params: Params, ladder: Ladder, recipe: LoraRecipe, *, adapters: bool = True
) -> Job:
    """Trains the adapter of a level over frozen weights, or without `adapters` measures levels alone.

    Which level it is, the counts among the frozen arrays say: first those of the whole model;
    `Trainer.beside` goes over to another.

    Args:
      cfg: the whole model.
      params: its parameters, units in order.
      ladder: the levels.
      recipe: of the adapters.
    """
    frozen: dict[str, Any] = {**params, **level_counts(cfg, ladder, WHOLE)}
    job = lora_job(cfg, frozen, recipe)

    def losses(adapter: Params, frozen: Params, batch: AnyBatch) -> tuple[jax.Array, jax.Array]:
        counts = {name: each for name, each in frozen.items() if name.endswith(PARAMETER)}
        return job.losses(used_experts(adapter, counts), used_experts(frozen, counts), batch)

    init = adapter_of_level(cfg, cfg, recipe.lora, recipe.seed) if adapters else {}
    return dataclasses.replace(job, init=init, losses=losses)


def divergence_job(cfg: ModelConfig, original: Params, settings: TrainSettings) -> Job:
    """Measures how far a model's distribution over the next token is from the original's, in nats per token;
    it trains nothing."""
    dtype = jnp.dtype(settings.precision)

    def losses(params: Params, frozen: Any, batch: AnyBatch) -> tuple[jax.Array, jax.Array]:
        ours, theirs = (outputs_of_any(each, batch, cfg=cfg, dtype=dtype) for each in (params, frozen))
        return divergences(ours, theirs, batch), jnp.zeros(())

    return Job({}, losses, frozen=dict(original), cfg=cfg, frozen_cfg=cfg)
