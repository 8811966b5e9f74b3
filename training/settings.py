"""Holds the settings that all kinds of training share: steps, batches, optimizer, precision, checkpoints."""

import dataclasses
from typing import Any, Literal, Self

from jaxllm.errors import ConfigError
from jaxllm.models.scanned_layers import REMATS, Remat

Precision = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of the loop, whatever it trains.

    Attributes:
      steps: optimizer steps of the whole run.
      batch: B, rows per step over all devices.
      row_tokens: T, tokens of a row; longer documents are cut.
      peak_learning_rate: reached after `warmup_steps` and left on a cosine.
      final_learning_rate_share: of the peak, reached at the last step.
      warmup_steps: of linear warm-up.
      optimizer: "adamw", or "muon" for the matrices of layers (AdamW for the rest).
      muon_learning_rate_factor: Muon's learning rate divided by AdamW's.
      weight_decay: on matrices only.
      beta1, beta2: AdamW's.
      clip_norm: largest global norm of the gradient.
      accumulate: parts of a step's batch, computed one after another, whose gradients add up.
      precision: of activations and products; parameters, optimizer and losses are float32.
      remat: what layers keep for the backward pass, which computes the rest again: everything ("none"), the
        results of products with weights ("dots"), or their input alone ("full"). Recipes of before say false
        for "none" and true for "full".
      seed: of initial parameters, order and dropout.
      checkpoint_steps: steps between two checkpoints, each with its held-out loss.
      evaluation_batches: most batches that a held-out loss is measured on, spread over all held-out
        documents; 0 for all of them.
      log_steps: steps between two lines of metrics.
    """

    steps: int
    batch: int
    row_tokens: int
    peak_learning_rate: float
    final_learning_rate_share: float = 0.1
    warmup_steps: int = 100
    optimizer: Literal["adamw", "muon"] = "adamw"
    muon_learning_rate_factor: float = 1.0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    accumulate: int = 1
    precision: Precision = "float32"
    remat: Remat = "none"
    seed: int = 0
    checkpoint_steps: int = 100
    evaluation_batches: int = 256
    log_steps: int = 10

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "row_tokens", "checkpoint_steps", "log_steps", "accumulate"):
            require_int(name, getattr(self, name), 1)
        for name in ("seed", "warmup_steps", "evaluation_batches"):
            require_int(name, getattr(self, name), 0)
        require_float("peak_learning_rate", self.peak_learning_rate, above=0, below=1)
        require_float("clip_norm", self.clip_norm, above=0)
        for name in ("beta1", "beta2"):
            require_float(name, getattr(self, name), least=0, below=1)
        require_float("weight_decay", self.weight_decay, least=0)
        require_float("final_learning_rate_share", self.final_learning_rate_share, least=0, most=1)
        if self.batch % self.accumulate:
            raise ConfigError(
                f"batch ({self.batch}) must be a multiple of accumulate ({self.accumulate}), which divides it"
            )
        if self.optimizer not in ("adamw", "muon"):
            raise ConfigError(f"optimizer must be adamw or muon, got {self.optimizer!r}")
        require_float("muon_learning_rate_factor", self.muon_learning_rate_factor, above=0, most=1000)
        if self.precision not in ("float32", "bfloat16"):
            raise ConfigError(f"precision must be float32 or bfloat16, got {self.precision!r}")
        if isinstance(self.remat, bool):
            object.__setattr__(self, "remat", "full" if self.remat else "none")
        if self.remat not in REMATS:
            raise ConfigError(f"remat must be one of {', '.join(REMATS)}, got {self.remat!r}")

    def require_window(self, window_tokens: int) -> None:
        """Raises ConfigError unless a row fits the window of the model that is to see it."""
        if self.row_tokens > window_tokens:
            raise ConfigError(
                f"row_tokens ({self.row_tokens}) must be at most the model's window ({window_tokens})"
            )

    def within(self, window_tokens: int) -> Self:
        """The settings with rows no longer than a model's window, and more of them in a step instead."""
        if self.row_tokens <= window_tokens:
            return self
        batch = self.batch * (self.row_tokens // window_tokens)
        return dataclasses.replace(self, row_tokens=window_tokens, batch=batch)


def require_int(name: str, value: Any, low: int) -> None:
    """Raises ConfigError unless `value` is a whole number of at least `low`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{name} must be a whole number of at least {low}, got {value!r}")


def require_float(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> None:
    """Raises ConfigError unless `value` is a number within the given bounds."""
    bounds = {
        "at least": (least, lambda bound: value >= bound),
        "above": (above, lambda bound: value > bound),
        "at most": (most, lambda bound: value <= bound),
        "below": (below, lambda bound: value < bound),
    }
    asked = {word: test for word, test in bounds.items() if test[0] is not None}
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not all(test(bound) for bound, test in asked.values()):
        wanted = " and ".join(f"{word} {bound}" for word, (bound, _) in asked.items())
        raise ConfigError(f"{name} must be a number {wanted}, got {value!r}")
