"""Keeps checkpoints of a run: the last two, to resume, and the best by held-out loss."""

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
from training.data.remote_files import is_remote, is_s3, require_bucket, require_local
from training.loop.s3_checkpoints import S3Checkpoints

Params = dict[str, jax.Array]
_LATEST = 2


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
    """The checkpoints in a folder, or at a `gs://` or `s3://` URL.

    They are written in the background; one gets its name when it is whole. Opening a run that another
    process is writing changes nothing in it.

    Raises:
      ConfigError: the URL is of another kind, or what writes it is not installed.
      CheckpointError: what is at the URL cannot be listed.
    """

    def __init__(self, folder: Path | str) -> None:
        self._folder = _location(folder)
        if isinstance(self._folder, str):
            self._store = S3Checkpoints(self._folder, latest=_LATEST)
        else:
            self._store = _OrbaxCheckpoints(self._folder)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def latest(self) -> int | None:
        """Steps done in the newest checkpoint."""
        return max(self._store.steps(), default=None)

    def best(self) -> tuple[int, float]:
        """The checkpoint with the lowest held-out loss: its step and that loss.

        Raises:
          CheckpointError: there is none yet.
        """
        losses = {step: loss for step, loss in self._store.losses().items() if math.isfinite(loss)}
        if not losses:
            raise CheckpointError(f"there is no checkpoint in {self._folder} yet; train first")
        step = min(losses, key=losses.__getitem__)
        return step, losses[step]

    def save(self, state: TrainState, held_out_loss: float | None) -> None:
        """Begins to write `state` under its step, and deletes checkpoints that are no longer needed; without
        a held-out loss it is there to resume from, and never the best."""
        loss = math.inf if held_out_loss is None else held_out_loss
        # A copy: the next step reuses the donated buffers, and on a CPU it would be written from those.
        kept = jax.tree.map(jnp.copy, state)
        self._store.save(int(state.step), kept, loss)

    def restore(self, step: int, abstract: Any) -> Any:
        """The state after `step` steps.

        Args:
          step: of a checkpoint.
          abstract: a tree of `jax.ShapeDtypeStruct`, with the shardings that its leaves shall have.

        Raises:
          CheckpointError: the checkpoint is damaged, or of another tree.
        """
        try:
            return self._store.restore(step, abstract)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"cannot read the checkpoint {self._folder}/{step}: {error}; remove it to go on from an "
                "earlier one"
            ) from error


class _OrbaxCheckpoints:
    """Those in a folder or at a `gs://` URL."""

    def __init__(self, folder: epath.Path) -> None:
        keep = [
            checkpoint_managers.LatestN(_LATEST),
            checkpoint_managers.BestN(get_metric_fn=_held_out_loss, reverse=True, n=1),
        ]
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(keep),
            # orbax stores metrics only where `best_fn` ranks them.
            best_fn=_held_out_loss,
            best_mode="min",
            enable_async_checkpointing=True,
        )
        handlers = ocp.StandardCheckpointHandler()
        self._manager = ocp.CheckpointManager(folder, options=options, item_handlers=handlers)

    def steps(self) -> list[int]:
        return list(self._manager.all_steps())

    def losses(self) -> dict[int, float]:
        return {step: _held_out_loss(self._manager.metrics(step)) for step in self.steps()}

    def save(self, step: int, state: Any, held_out_loss: float) -> None:
        metrics = {"held_out_loss": held_out_loss}
        self._manager.save(step, args=ocp.args.StandardSave(state), metrics=metrics)

    def restore(self, step: int, abstract: Any) -> Any:
        return self._manager.restore(step, args=ocp.args.StandardRestore(abstract))

    def close(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()


def read_best(folder: Path | str, abstract: TrainState) -> tuple[TrainState, int, float]:
    """The best checkpoint in `folder`: its state, its step and its held-out loss in nats per token.

    Args:
      folder: of the checkpoints, a path or a URL; it is not made.
      abstract: see `Checkpoints.restore`.

    Raises:
      CheckpointError: there is none yet, or it is damaged.
      ConfigError: see `Checkpoints`.
    """
    place = _location(folder)
    if not isinstance(place, str) and not place.is_dir():
        raise CheckpointError(f"there is no checkpoint in {folder} yet; train first")
    with Checkpoints(folder) as checkpoints:
        step, loss = checkpoints.best()
        return checkpoints.restore(step, abstract), step, loss


def _location(folder: Path | str) -> epath.Path | str:
    """A folder or `gs://` URL for orbax, or an `s3://` URL as it is."""
    if is_remote(folder):
        require_bucket(str(folder))
        return str(folder) if is_s3(str(folder)) else epath.Path(folder)
    # orbax wants paths from the root.
    return epath.Path(require_local(folder, "a folder of checkpoints").resolve())


def _held_out_loss(metrics: Any) -> float:
    return float(metrics["held_out_loss"])
