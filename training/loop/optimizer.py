"""Makes the optimizers of all jobs: AdamW or Muon behind clipping, on a warm-up and a cosine."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import optax

from jaxllm.models.parameters import ENCODER
from jaxllm.models.scanned_layers import STACKS
from training.loop.muon import Matrix, scale_by_muon
from training.settings import TrainSettings


def learning_rate(settings: TrainSettings) -> optax.Schedule:
    """Linear warm-up to the peak, then a cosine to the final share at the last step."""
    peak = settings.peak_learning_rate
    # From one step's worth, not from zero, so that the first step learns too.
    warmup = optax.schedules.linear_schedule(peak / (settings.warmup_steps + 1), peak, settings.warmup_steps)
    cosine = optax.schedules.cosine_decay_schedule(
        peak, max(settings.steps - settings.warmup_steps, 1), settings.final_learning_rate_share
    )
    return optax.schedules.join_schedules([warmup, cosine], [settings.warmup_steps])


def make_optimizer(settings: TrainSettings) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101), or Muon (arXiv 2502.16982) for the matrices of layers and AdamW for the rest;
    behind clipping by the global norm."""
    schedule = learning_rate(settings)
    if settings.optimizer == "muon":
        factor = settings.muon_learning_rate_factor
        inner = optax.partition(
            {
                True: _muon(settings, lambda step: schedule(step) * factor),
                False: _adamw(settings, schedule, nesterov=True),
            },
            lambda params: {name: matrix is not None for name, matrix in matrices(params).items()},
        )
    else:
        inner = _adamw(settings, schedule)
    return optax.chain(optax.clip_by_global_norm(settings.clip_norm), inner)


def _muon(settings: TrainSettings, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(
        scale_by_muon(_as_matrix, dtype=jnp.dtype(settings.precision)),
        # Decay is as fast as AdamW's, whatever the factor.
        optax.add_decayed_weights(settings.weight_decay / settings.muon_learning_rate_factor, decays),
        optax.scale_by_learning_rate(schedule),
    )


def _adamw(
    settings: TrainSettings, schedule: optax.Schedule, *, nesterov: bool = False
) -> optax.GradientTransformation:
    return optax.adamw(
        schedule,
        b1=settings.beta1,
        b2=settings.beta2,
        weight_decay=settings.weight_decay,
        mask=decays,
        nesterov=nesterov,
    )


def matrices(params: Any) -> dict[str, Matrix | None]:
    """How Muon sees each parameter as a matrix; None for those that it leaves to AdamW."""
    # optax also asks with placeholders where it has masked a parameter.
    return {name: _as_matrix(name, getattr(value, "ndim", 0)) for name, value in params.items()}


def _as_matrix(name: str, rank: int) -> Matrix | None:
    # Embeddings are read by rows, and a router's rows compete: neither is a map whose spectrum matters.
    stack = int(name.startswith(STACKS))
    in_layer = stack or name.removeprefix(ENCODER).startswith("layers.")
    if rank - stack < 2 or not in_layer or name.endswith((".router", "bias")):
        return None
    # Leading axes of layers and experts are neither side: each has a matrix of its own.
    first = stack + int(".experts." in name)
    units, width = tuple(range(first, rank - 1)), (rank - 1,)
    stacked = tuple(range(first))
    # Rows are what a product sums over.
    reads_units = name.endswith((".o", ".down"))
    return Matrix(stacked, units, width) if reads_units else Matrix(stacked, width, units)


def decays(params: Mapping[str, Any]) -> dict[str, bool]:
    """True for the parameters that weight decay pulls to zero: the matrices, not norms or biases."""
    return {name: not name.endswith((".scale", "bias")) for name in params}
