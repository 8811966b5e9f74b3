"""The optimizer that every job uses: AdamW behind clipping, on a warm-up and a cosine."""

from collections.abc import Mapping
from typing import Any

import optax

from training.settings import TrainSettings


def learning_rate(settings: TrainSettings) -> optax.Schedule:
    """Linear warm-up to the peak, then a cosine to the final share at the last step."""
    peak = settings.peak_learning_rate
    # From one step's worth, not from zero: the first step should learn too.
    warmup = optax.schedules.linear_schedule(peak / (settings.warmup_steps + 1), peak, settings.warmup_steps)
    cosine = optax.schedules.cosine_decay_schedule(
        peak, max(settings.steps - settings.warmup_steps, 1), settings.final_learning_rate_share
    )
    return optax.schedules.join_schedules([warmup, cosine], [settings.warmup_steps])


def make_optimizer(settings: TrainSettings) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101) behind clipping by the global norm."""
    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(
            learning_rate(settings),
            b1=settings.beta1,
            b2=settings.beta2,
            weight_decay=settings.weight_decay,
            mask=decays,
        ),
    )


def decays(params: Mapping[str, Any]) -> dict[str, bool]:
    """True for the parameters that weight decay pulls to zero: the matrices, not norms or biases."""
    return {name: not name.endswith((".scale", "bias")) for name in params}
