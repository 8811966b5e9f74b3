"""Trains in a run's folder, from the first step or the last checkpoint, to the best parameters."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import jax
from rich.console import Console

from jaxllm.config import ModelConfig
from training.loop.checkpoints import Params, read_best
from training.loop.log import Log
from training.loop.monitoring import Monitoring
from training.loop.run_files import checkpoints_of
from training.loop.trainer import Batch, Trainer, train
from training.settings import TrainSettings

Settings = TypeVar("Settings", bound=TrainSettings)


@dataclasses.dataclass(frozen=True, eq=False)
class Fitted:
    """The best checkpoint of a training.

    Attributes:
      params: on the trainer's mesh.
      step: steps done at this checkpoint.
      loss: held-out loss in nats per token.
    """

    params: Params
    step: int
    loss: float


def fit(
    trainer: Trainer,
    batch_at: Callable[[int], Batch],
    held_out: Callable[[], Iterable[Batch]],
    folder: Path,
    sources: Sequence[str],
    monitoring: Monitoring,
) -> Fitted:
    """Trains to the last step, or resumes from the checkpoints in `folder`.

    Args:
      trainer: what is trained, how and on which devices.
      batch_at, held_out: see `training.loop.trainer.train`.
      folder: of `metrics.jsonl`, which the first process alone writes, and of `checkpoints/`, unless the
        run keeps them elsewhere (see `keep_checkpoints_at`); made if missing.
      sources: names of the batches' sources, by number.
      monitoring: where progress goes.

    Raises:
      ConfigError: no step is left to trace.
      JaxllmError: the loss is no longer finite.
      CheckpointError: a checkpoint cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metrics, console = folder if jax.process_index() == 0 else None, monitoring.own_console()
    with Log(metrics, trainer.settings.steps, console, sources, tensorboard=monitoring.tensorboard) as log:
        train(trainer, batch_at, held_out, checkpoints_of(folder), log, profile=monitoring.profile)
    best, step, loss = read_best(checkpoints_of(folder), trainer.abstract())
    return Fitted(best.params, step, loss)


def fitted_to_window(recipe: Settings, cfg: ModelConfig, console: Console) -> Settings:
    """Fits a recipe's rows to a model's window (see `TrainSettings.within`), and prints what that changes."""
    fitted = recipe.within(cfg.window_tokens)
    if fitted is not recipe:
        console.print(
            f"the model's window is {fitted.row_tokens:,} tokens: a step has {fitted.batch} rows of as many, "
            f"instead of {recipe.batch} of {recipe.row_tokens:,}",
            soft_wrap=True,
        )
    return fitted
