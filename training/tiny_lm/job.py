"""Defines the trainings of a tiny LM: first the score head, then the decision head."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxllm.models import tiny_lm as tlm
from training.loop.checkpoints import Params
from training.loop.trainer import Job
from training.settings import TrainSettings
from training.tiny_lm.batches import (
    DecisionBatch,
    ScoreBatch,
)
from training.tiny_lm.scores import (
    decided,
)
from training.tiny_lm.start import Start


def score_job(start: Start, settings: TrainSettings) -> Job:
    """The job that trains the score head and the layers that both heads share."""
    cfg, dtype = start.cfg, jnp.dtype(settings.precision)

    def losses(params: Params, frozen: Any, batch: ScoreBatch) -> tuple[jax.Array, jax.Array]:
        logits = tlm.score(params, jnp.asarray(batch.tokens), jnp.asarray(batch.mask), cfg=cfg, dtype=dtype)
        return optax.sigmoid_binary_cross_entropy(logits, batch.labels), jnp.zeros(())

    return Job(_without(start.params, "decide."), losses)


def decide_job(start: Start, trained: Mapping[str, Any], settings: TrainSettings) -> Job:
    """The job that trains the decision head over `trained`, the parameters of a `score_job`."""
    cfg, dtype = start.cfg, jnp.dtype(settings.precision)
    own = {name: value for name, value in start.params.items() if name.startswith("decide.")}

    def losses(params: Params, frozen: Params, batch: DecisionBatch) -> tuple[jax.Array, jax.Array]:
        logits = decided(
            {**frozen, **params}, jnp.asarray(batch.tokens), jnp.asarray(batch.mask), cfg=cfg, dtype=dtype
        )
        entropy = optax.softmax_cross_entropy_with_integer_labels
        both = sum(entropy(each, batch.choices[:, place]) for place, each in enumerate(logits))
        return jnp.asarray(both)[:, None], jnp.zeros(())

    return Job(own, losses, _without(trained, "score."))


def _without(params: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name: value for name, value in params.items() if not name.startswith(prefix)}
