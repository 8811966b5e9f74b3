"""A training in a folder of its own, from the first step or the last checkpoint to the best parameters."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax
from rich.console import Console

from training.checkpoints import Params, read_best
from training.log import Log
from training.loop import Batch, Trainer, train
from training.run_files import CHECKPOINTS


@dataclasses.dataclass(frozen=True, eq=False)
class Fitted:
    """The best checkpoint of a training.

    Attributes:
      params: where they lie on the trainer's mesh.
      step: after which they were these.
      loss: held out, in nats per token.
    """

    params: Params
    step: int
    loss: float


def fit(
    trainer: Trainer,
    batch_at: Callable[[int], Batch],
    held_out: Callable[[], Iterable[Batch]],
    folder: Path,
    console: Console,
    sources: Sequence[str],
    *,
    tensorboard: bool = False,
) -> Fitted:
    """Trains to the last step, or goes on with the checkpoints in `folder`.

    Args:
      trainer: what is trained, how and on which devices.
      batch_at, held_out: see `training.loop.train`.
      folder: of `checkpoints/` and `metrics.jsonl`, made if missing; the first process alone writes metrics.
      console: where progress goes.
      sources: the names of what the batches come from, by number.
      tensorboard: also write TensorBoard's events.

    Raises:
      JaxllmError: the loss is no longer finite.
      CheckpointError: a checkpoint cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metrics = folder if jax.process_index() == 0 else None
    with Log(metrics, trainer.settings.steps, console, sources, tensorboard=tensorboard) as log:
        train(trainer, batch_at, held_out, folder / CHECKPOINTS, log)
    best, step, loss = read_best(folder / CHECKPOINTS, trainer.abstract())
    return Fitted(best.params, step, loss)
