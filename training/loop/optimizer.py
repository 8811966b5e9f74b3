"""Makes the optimizers of all jobs: AdamW or Muon behind clipping, on a warm-up and a cosine."""

from collections.abc import Mapping
from typing import Any

import jax
import optax
import optax.contrib

from jaxllm.models.parameters import ENCODER
from jaxllm.models.scanned_layers import STACKS
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
        inner = optax.contrib.muon(
            lambda step: schedule(step) * factor,
            weight_decay=settings.weight_decay / factor,
            consistent_rms=0.2,
            adam_b1=settings.beta1,
            adam_b2=settings.beta2,
            adam_weight_decay=settings.weight_decay,
            adam_learning_rate=schedule,
            weight_decay_mask=decays,
            muon_weight_dimension_numbers=matrices,
        )
        if settings.precision == "bfloat16":
            inner = _in_bfloat16(inner)
    else:
        inner = optax.adamw(
            schedule,
            b1=settings.beta1,
            b2=settings.beta2,
            weight_decay=settings.weight_decay,
            mask=decays,
        )
    return optax.chain(optax.clip_by_global_norm(settings.clip_norm), inner)


def _in_bfloat16(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimizer whose products, those of Muon's Newton-Schulz iterations, round their sides to
    bfloat16; not on CPUs, where XLA computes them in float32."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        with jax.default_matmul_precision("BF16_BF16_F32"):
            return inner.update(updates, state, params)

    return optax.GradientTransformation(inner.init, update)


def matrices(params: Any) -> dict[str, Any]:
    """How Muon sees each parameter as a matrix; None for those that it leaves to AdamW."""
    # optax also asks with placeholders where it has masked a parameter.
    return {name: _as_matrix(name, getattr(value, "ndim", 0)) for name, value in params.items()}


def _as_matrix(name: str, rank: int) -> Any:
    # Embeddings are read by rows, and a router's rows compete: neither is a map whose spectrum matters.
    stack = int(name.startswith(STACKS))
    in_layer = stack or name.removeprefix(ENCODER).startswith("layers.")
    if rank - stack < 2 or not in_layer or name.endswith((".router", "bias")):
        return None
    # Leading axes of layers and experts are neither side: each has a matrix of its own.
    units = tuple(range(stack + int(".experts." in name), rank - 1))
    width = (rank - 1,)
    reads_units = name.endswith((".o", ".down"))
    sides = (units, width) if reads_units else (width, units)
    return optax.contrib.MuonDimensionNumbers(*sides)


def decays(params: Mapping[str, Any]) -> dict[str, bool]:
    """True for the parameters that weight decay pulls to zero: the matrices, not norms or biases."""
    return {name: not name.endswith((".scale", "bias")) for name in params}
