"""Keeps checkpoints of a run by orbax: the last two, to resume, and the best by held-out loss."""

import math
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers

from jaxllm.errors import CheckpointError
from training.data.remote_files import is_remote, require_bucket, require_local

Params = dict[str, jax.Array]


@flax.struct.dataclass
class TrainState:
    """The state that a checkpoint stores.

    Attributes:
      step: int32 scalar, steps done.
      params: the trained parameters, float32 leaves.
      optimizer: optax's state.
    """

    step: jax.Array
    params: Params
    optimizer: Any


class Checkpoints:
    """The checkpoints in a folder, or at a `gs://` URL.

    They are written in the background; one gets its name when it is whole. Opening a run that another
    process is writing changes nothing in it.

    Raises:
      ConfigError: the URL is of another kind, or what writes it is not installed.
    """

    def __init__(self, folder: Path | str) -> None:
        keep = [
            checkpoint_managers.LatestN(2),
            checkpoint_managers.BestN(get_metric_fn=_held_out_loss, reverse=True, n=1),
        ]
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(keep),
            # orbax stores metrics only where `best_fn` ranks them.
            best_fn=_held_out_loss,
            best_mode="min",
            enable_async_checkpointing=True,
        )
        self._folder = _location(folder)
        self._manager = ocp.CheckpointManager(
            self._folder, options=options, item_handlers=ocp.StandardCheckpointHandler()
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.wait_until_finished()
        self._manager.close()

    def latest(self) -> int | None:
        """Steps done in the newest checkpoint."""
        return self._manager.latest_step()

    def best(self) -> tuple[int, float]:
        """The checkpoint with the lowest held-out loss: its step and that loss.

        Raises:
          CheckpointError: there is none yet.
        """
        losses = {step: _held_out_loss(self._manager.metrics(step)) for step in self._manager.all_steps()}
        losses = {step: loss for step, loss in losses.items() if math.isfinite(loss)}
        if not losses:
            raise CheckpointError(f"there is no checkpoint in {self._folder} yet; train first")
        step = min(losses, key=losses.__getitem__)
        return step, losses[step]

    def save(self, state: TrainState, held_out_loss: float | None) -> None:
        """Begins to write `state` under its step, and deletes checkpoints that are no longer needed; without
        a held-out loss it is there to resume from, and never the best."""
        loss = math.inf if held_out_loss is None else held_out_loss
        # A copy: the next step reuses the donated buffers, and on a CPU orbax would write from those.
        kept = jax.tree.map(jnp.copy, state)
        self._manager.save(int(state.step), args=ocp.args.StandardSave(kept), metrics={"held_out_loss": loss})

    def restore(self, step: int, abstract: Any) -> Any:
        """The state after `step` steps.

        Args:
          step: of a checkpoint.
          abstract: a tree of `jax.ShapeDtypeStruct`, with the shardings that its leaves shall have.

        Raises:
          CheckpointError: the checkpoint is damaged, or of another tree.
        """
        try:
            return self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"cannot read the checkpoint {self._folder / str(step)}: {error}; remove it to go on "
                "from an earlier one"
            ) from error


def read_best(folder: Path | str, abstract: TrainState) -> tuple[TrainState, int, float]:
    """The best checkpoint in `folder`: its state, its step and its held-out loss in nats per token.

    Args:
      folder: of the checkpoints, a path or a URL; it is not made.
      abstract: see `Checkpoints.restore`.

    Raises:
      CheckpointError: there is none yet, or it is damaged.
      ConfigError: see `Checkpoints`.
    """
    if not _location(folder).is_dir():
        raise CheckpointError(f"there is no checkpoint in {folder} yet; train first")
    with Checkpoints(folder) as checkpoints:
        step, loss = checkpoints.best()
        return checkpoints.restore(step, abstract), step, loss


def _location(folder: Path | str) -> epath.Path:
    if is_remote(folder):
        require_bucket(str(folder))
        return epath.Path(folder)
    # orbax wants paths from the root.
    return epath.Path(require_local(folder, "a folder of checkpoints").resolve())


def _held_out_loss(metrics: Any) -> float:
    return float(metrics["held_out_loss"])
