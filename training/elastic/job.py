"""Defines the training of all levels together, which recovers what smaller levels lose (ELMS, section 3.2).

Every step trains the whole model on the text, and the smallest level and one other, drawn at random, on the
whole model's distribution (the sandwich rule of universally slimmable networks, arXiv 1903.05134, with nested
weights as in MatFormer, arXiv 2310.07707). The alternative, a low-rank adapter per level over frozen weights,
is `training.lora.job`.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import WHOLE, ModelConfig
from jaxllm.elastic.ladder import Ladder, sub_config
from jaxllm.elastic.submodel import sub_model
from jaxllm.models.parameters import Params
from jaxllm.models.scanned_layers import is_stacked, stacked, unstacked
from training.data.packing import Batch
from training.loop.losses import Outputs, distillation_losses, next_token_losses, outputs_of
from training.loop.trainer import Job
from training.settings import TrainSettings


def joint_job(cfg: ModelConfig, params: Mapping[str, Any], ladder: Ladder, settings: TrainSettings) -> Job:
    """Trains the weights of all levels together.

    The loss of a step is the mean of the whole model's, the smallest level's and that of one level between
    them; the held-out loss is the mean over all levels of the next token's.

    Args:
      cfg: the whole model.
      params: its float32 parameters, units in order, to start from.
      ladder: the levels.
      settings: of the training.
    """
    dtype = jnp.dtype(settings.precision)
    smaller = [sub_config(cfg, ladder, level) for level in ladder.levels if level != WHOLE]

    def run(params: Params, batch: Batch, part: ModelConfig) -> Outputs:
        own = params
        if part is not cfg and is_stacked(params):
            own = stacked(sub_model(unstacked(params, cfg), part), part)
        elif part is not cfg:
            own = sub_model(params, part)
        return outputs_of(own, batch, cfg=part, dtype=dtype, remat=settings.remat)

    def taught(part: ModelConfig, params: Params, batch: Batch, whole: Outputs) -> jax.Array:
        return distillation_losses(run(params, batch, part), whole, batch, teacher_share=1.0)

    def drawn_losses(
        params: Params, frozen: Any, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        del frozen
        whole = run(params, batch, cfg)
        losses = [next_token_losses(whole, batch)]
        wanted = jax.lax.stop_gradient(whole)
        if smaller:
            losses.append(taught(smaller[0], params, batch, wanted))
        if between := [functools.partial(taught, part) for part in smaller[1:]]:
            choice = jax.random.randint(key, (), 0, len(between))
            losses.append(jax.lax.switch(choice, between, params, batch, wanted))
        return sum(losses[1:], losses[0]) * np.float32(1 / len(losses)), jnp.zeros(())

    def losses(params: Params, frozen: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        del frozen
        each = [next_token_losses(run(params, batch, part), batch) for part in (*smaller, cfg)]
        return sum(each[1:], each[0]) * np.float32(1 / len(each)), jnp.zeros(())

    return Job(dict(params), losses, drawn_losses=drawn_losses, cfg=cfg)
