"""Keeps checkpoints of a run: the last two, to resume, and the best by held-out loss."""

import dataclasses
import itertools
import json
import logging
import math
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from jax.experimental import multihost_utils
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from orbax.checkpoint import checkpoint_managers

from jaxllm.errors import CheckpointError, one_line
from jaxllm.training.data.sources import is_remote, is_s3, require_bucket, require_local

# S3 accepts at most 5 GB per request.
_MOST_CHUNK_BYTES = 1 << 29
# tensorstore's defaults would retry for half an hour without an answer.
_RETRIES = {"max_retries": 6, "initial_delay": "500ms", "max_delay": "10s"}
# Timeout of processes that wait for each other: the slowest may still be writing.
_LIMIT_S = 1800
_FAILURES = (OSError, ValueError, RuntimeError, KeyError, NotImplementedError)


class S3Checkpoints:
    """The checkpoints under an `s3://` URL, by tensorstore: the last `latest`, and the best by held-out loss;
    for `resumes` see `Checkpoints`.

    orbax 0.12 treats every path but `gs://` as one of a file system (`build_kvstore_tspec`), and names a
    checkpoint by a rename, which S3 lacks. The layout under the URL:

        {step}/{array}/...    the arrays, zarr 3 with checksums; each process writes the shards of its devices
        done/{step}.json      written last, by the first process; checkpoints without it do not count

    Raises:
      CheckpointError: they cannot be listed.
    """

    def __init__(self, url: str, *, latest: int, resumes: bool = False) -> None:
        self.url, self._latest = url.rstrip("/"), latest
        self._manager = GlobalAsyncCheckpointManager(_LIMIT_S)
        try:
            self._store: ts.KvStore = ts.KvStore.open(self._place("")).result()
            names = {int(Path(key.decode()).stem): key for key in self._store.list(_under("done/")).result()}
            self._done: dict[int, dict[str, Any]] = {
                step: json.loads(self._store.read(names[step]).result().value) for step in sorted(names)
            }
            if resumes and jax.process_index() == 0:
                self._remove_parts()
        except _FAILURES as error:
            raise CheckpointError(f"cannot list the checkpoints at {self.url}: {error}") from error

    def losses(self) -> dict[int, float]:
        """Held-out loss of each complete checkpoint by its step, infinite if none was measured."""
        losses = {step: each["held_out_loss"] for step, each in self._done.items()}
        return {step: math.inf if loss is None else loss for step, loss in losses.items()}

    def save(self, step: int, state: Any, held_out_loss: float) -> None:
        """Begins to write a state, when an earlier one is written; all processes together.

        Raises:
          CheckpointError: this one or an earlier one cannot be written.
        """
        arrays = _named(state)
        whole = {"held_out_loss": held_out_loss if math.isfinite(held_out_loss) else None}
        whole |= {"arrays": {name: _described(array) for name, array in arrays.items()}}

        def end() -> None:
            whole["objects"] = len(self._store.list(_under(f"{step}/")).result())
            self._store.write(f"done/{step}.json", json.dumps(whole).encode()).result()
            self._done[step] = whole
            losses = self.losses()
            best = min(losses, key=losses.__getitem__)
            for other in sorted(losses.keys() - {best, *sorted(losses)[-self._latest :]}):
                self.remove(other)

        try:
            self._manager.wait_until_finished()
            if jax.process_index() == 0:
                # What a killed process left, perhaps of other shards.
                self._store.delete_range(_under(f"{step}/")).result()
            if jax.process_count() > 1:
                multihost_utils.sync_global_devices(f"checkpoint {step}")
            specs = [self._spec(step, name, array) for name, array in arrays.items()]
            self._manager.serialize(list(arrays.values()), specs, on_commit_callback=end)
        except _FAILURES as error:
            raise CheckpointError(f"cannot write a checkpoint to {self.url}: {error}") from error

    def restore(self, step: int, abstract: Any) -> Any:
        """The state of a checkpoint; for the arguments see `Checkpoints.restore`.

        Raises:
          ValueError: the checkpoint is damaged, or of another tree.
        """
        wanted, whole = _named(abstract), self._done[step]
        differing = {name for name, array in wanted.items() if whole["arrays"].get(name) != _described(array)}
        differing |= whole["arrays"].keys() - wanted.keys()
        if differing:
            raise ValueError(f"it has no {min(differing)} of the shape and type that this run trains")
        # A missing chunk would be read as zeros.
        there = len(self._store.list(_under(f"{step}/")).result())
        if there != whole["objects"]:
            raise ValueError(f"{there} of its {whole['objects']} objects are there")
        arrays = self._manager.deserialize(
            [array.sharding for array in wanted.values()],
            [self._spec(step, name) for name in wanted],
        )
        return jax.tree.unflatten(jax.tree.structure(abstract), arrays)

    def close(self) -> None:
        """Waits until all writes are complete.

        Raises:
          CheckpointError: a write failed.
        """
        try:
            self._manager.wait_until_finished()
        except _FAILURES as error:
            raise CheckpointError(f"cannot write a checkpoint to {self.url}: {error}") from error

    def _remove_parts(self) -> None:
        """Deletes objects of checkpoints without a name."""
        firsts = {key.decode().split("/")[0] for key in self._store.list().result()}
        for step in firsts - {"done", *map(str, self._done)}:
            if step.isdecimal():
                self._store.delete_range(_under(f"{step}/")).result()

    def remove(self, step: int) -> None:
        """Deletes a checkpoint."""
        # Its name first: half a checkpoint is then none.
        self._store.delete_range(_under(f"done/{step}.json")).result()
        self._store.delete_range(_under(f"{step}/")).result()
        del self._done[step]

    def _spec(self, step: int, name: str, array: jax.Array | None = None) -> dict[str, Any]:
        """tensorstore's spec of a stored array, or of one that is written from `array`."""
        spec = {"driver": "zarr3", "kvstore": self._place(f"{step}/{name}/")}
        if array is None:
            return spec
        chunk = _chunk_shape(array.sharding.shard_shape(array.shape), array.dtype.itemsize)
        codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        metadata = {
            "shape": array.shape,
            "data_type": array.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "codecs": codecs,
        }
        # By default zeros are not written, and would be indistinguishable from lost chunks.
        return {**spec, "metadata": metadata, "store_data_equal_to_fill_value": True}

    def _place(self, path: str) -> dict[str, Any]:
        """Returns tensorstore's name for a path under the URL. As in other programs, credentials, region
        and the address of a service other than Amazon's come from the environment."""
        bucket, _, prefix = self.url.removeprefix("s3://").partition("/")
        place = {"driver": "s3", "bucket": bucket, "path": f"{prefix}/{path}", "s3_request_retries": _RETRIES}
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if endpoint:
            place |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
        elif region:
            place |= {"aws_region": region}
        if os.environ.get("AWS_ACCESS_KEY_ID"):
            # No other lookup: tensorstore would complain of each missing file.
            place |= {"aws_credentials": {"type": "environment"}}
        return place


def _named(tree: Any) -> dict[str, Any]:
    """The leaves by their places in the tree."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _described(array: Any) -> list[Any]:
    return [list(array.shape), jnp.dtype(array.dtype).name]


def _under(prefix: str) -> ts.KvStore.KeyRange:
    """Returns the range of keys that begin with a prefix."""
    return ts.KvStore.KeyRange(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1))


def _chunk_shape(shape: tuple[int, ...], item_bytes: int) -> list[int]:
    """Returns a shape that divides a shard's and fits one request."""
    chunk = list(shape)
    for axis in range(len(chunk)):
        while math.prod(chunk) * item_bytes > _MOST_CHUNK_BYTES and chunk[axis] > 1:
            chunk[axis] //= next(n for n in itertools.count(2) if chunk[axis] % n == 0)
    return chunk


Params = dict[str, jax.Array]
_LATEST = 2
# Checkpoints are renamed before they are deleted, so that none is partly deleted under its own name.
_DELETED = "deleted"
# Items that orbax writes atomically under a step's name.
_OF_STEP = re.compile(r"\d+(\.orbax-checkpoint-tmp.*)?")
_log = logging.getLogger("jaxllm")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TrainState:
    """The state that a checkpoint stores.

    Attributes:
      step: number of steps done, int32 scalar.
      params: trained parameters, float32 leaves.
    """

    step: jax.Array
    params: Params
    optimizer: Any


class Checkpoints:
    """The checkpoints in a folder, or at a `gs://` or `s3://` URL.

    They are written in the background; one gets its name when it is whole. What is not whole is no
    checkpoint.
    """

    def __init__(self, folder: Path | str, *, resumes: bool = False) -> None:
        """Opens the checkpoints in a folder.

        Args:
          folder: path or URL.
          resumes: whether this process is the only writer from now on: partly written or deleted
            checkpoints of a killed process are removed. Otherwise nothing is changed, because another
            process may be writing.

        Raises:
          ConfigError: the URL scheme is not supported, or the package that writes it is not installed.
          CheckpointError: the checkpoints cannot be listed.
        """
        self._folder = _location(folder)
        if isinstance(self._folder, str):
            self._store = S3Checkpoints(self._folder, latest=_LATEST, resumes=resumes)
        else:
            self._store = _OrbaxCheckpoints(self._folder, resumes=resumes)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def latest(self) -> int | None:
        """Steps done in the newest checkpoint."""
        return max(self._store.losses(), default=None)

    def best(self) -> tuple[int, float]:
        """Returns the step of the checkpoint with the lowest held-out loss, and that loss.

        Raises:
          CheckpointError: there is none yet.
        """
        losses = {step: loss for step, loss in self._store.losses().items() if math.isfinite(loss)}
        if not losses:
            raise CheckpointError(f"there is no checkpoint in {self._folder} yet; train first")
        step = min(losses, key=losses.__getitem__)
        return step, losses[step]

    def save(self, state: TrainState, held_out_loss: float | None) -> None:
        """Begins to write `state` under its step, and deletes checkpoints that are no longer needed.
        Without a held-out loss the checkpoint serves to resume, and is never the best."""
        loss = math.inf if held_out_loss is None else held_out_loss
        # A copy: the next step reuses the donated buffers, and on a CPU the checkpoint would be written
        # from them.
        kept = jax.tree.map(jnp.copy, state)
        self._store.save(int(state.step), kept, loss)

    def newest(self, abstract: Any) -> tuple[int, Any] | None:
        """Returns step and state of the newest readable checkpoint; None if there is none.

        If only an older checkpoint can be read, those after it are removed and logged. Several processes
        cannot agree on that and need the newest.

        Args:
          abstract: see `restore`.

        Raises:
          CheckpointError: none can be read, the failure may be transient (too little memory, a device
            error), or there are several processes.
        """
        damaged: list[tuple[int, CheckpointError]] = []
        for step in sorted(self._store.losses(), reverse=True):
            try:
                state = self.restore(step, abstract)
            except CheckpointError as error:
                # Whether the reason is permanent; JAX's errors are device errors.
                why = error.__cause__
                temporary = isinstance(why, OSError | MemoryError | RuntimeError)
                if jax.process_count() > 1 or (temporary and not isinstance(why, FileNotFoundError)):
                    raise
                damaged.append((step, error))
                continue
            for other, error in damaged:
                self._store.remove(other)
                _log.warning(
                    "the checkpoint %s/%d is damaged (%s) and is removed; the run goes on from step %d",
                    self._folder,
                    other,
                    one_line(error.__cause__ or error),
                    step,
                )
            return step, state
        if damaged:
            raise damaged[0][1]
        return None

    def restore(self, step: int, abstract: Any) -> Any:
        """Reads the state after `step` steps.

        Args:
          abstract: tree of `jax.ShapeDtypeStruct` with the shardings that the leaves get.

        Raises:
          CheckpointError: the checkpoint is damaged, or holds another tree.
        """
        try:
            return self._store.restore(step, abstract)
        except Exception as error:  # orbax raises errors of its parts, and bare exceptions.
            raise CheckpointError(
                f"cannot read the checkpoint {self._folder}/{step}: {one_line(error)}; remove it to go on "
                "from an earlier one"
            ) from error


class _OrbaxCheckpoints:
    """Checkpoints in a folder or at a `gs://` URL."""

    def __init__(self, folder: epath.Path, *, resumes: bool) -> None:
        self._folder, self._deleted, self._saved = folder, folder / _DELETED, False
        keep = [
            checkpoint_managers.LatestN(_LATEST),
            checkpoint_managers.BestN(get_metric_fn=_held_out_loss, reverse=True, n=1),
        ]
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(keep),
            # orbax stores metrics only if `best_fn` is given.
            best_fn=_held_out_loss,
            best_mode="min",
            enable_async_checkpointing=True,
            # Of paths; a bucket has no rename.
            todelete_subdir=_DELETED,
        )
        handlers = ocp.StandardCheckpointHandler()
        try:
            if resumes and jax.process_index() == 0:
                _remove_parts(folder)
            if resumes and jax.process_count() > 1:
                multihost_utils.sync_global_devices("parts of checkpoints")
            self._manager = ocp.CheckpointManager(folder, options=options, item_handlers=handlers)
        except (OSError, ValueError) as error:
            raise _unlisted(folder, error) from error

    def losses(self) -> dict[int, float]:
        try:
            steps = [step for step in self._manager.all_steps() if _has_arrays(self._folder / str(step))]
            found = {step: self._manager.metrics(step) for step in steps}
        except (OSError, ValueError) as error:
            raise _unlisted(self._folder, error) from error
        return {step: _held_out_loss(metrics) for step, metrics in found.items() if metrics is not None}

    def save(self, step: int, state: Any, held_out_loss: float) -> None:
        metrics = {"held_out_loss": held_out_loss}
        self._manager.save(step, args=ocp.args.StandardSave(state), metrics=metrics)
        self._saved = True
        self._empty_deleted()

    def remove(self, step: int) -> None:
        self._manager.delete(step)
        self._empty_deleted()

    def restore(self, step: int, abstract: Any) -> Any:
        return self._manager.restore(step, args=ocp.args.StandardRestore(abstract))

    def close(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()
        if self._saved and jax.process_index() == 0 and self._deleted.exists():
            self._deleted.rmtree()

    def _empty_deleted(self) -> None:
        """Deletes renamed checkpoints; the folder stays, because the manager may be renaming into it."""
        if jax.process_index() == 0 and self._deleted.exists():
            for each in self._deleted.iterdir():
                each.rmtree()


def read_best(folder: Path | str, abstract: TrainState) -> tuple[TrainState, int, float]:
    """Reads the best checkpoint in `folder`: state, step and held-out loss in nats per token.

    Args:
      folder: folder of the checkpoints, a path or a URL; never created.
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
    """A folder or `gs://` URL for orbax, or an `s3://` URL unchanged."""
    if is_remote(folder):
        require_bucket(str(folder))
        return str(folder) if is_s3(str(folder)) else epath.Path(folder)
    # orbax wants paths from the root.
    return epath.Path(require_local(folder, "a folder of checkpoints").resolve())


def _held_out_loss(metrics: Any) -> float:
    return float(metrics["held_out_loss"])


def _remove_parts(folder: epath.Path) -> None:
    """Removes parts of checkpoints that a killed process was writing or deleting."""
    if not folder.exists():
        return
    if (folder / _DELETED).exists():
        (folder / _DELETED).rmtree()
    for each in folder.iterdir():
        if _OF_STEP.fullmatch(each.name) and not _is_whole(each):
            _log.warning("%s is not a whole checkpoint and is removed", each)
            each.rmtree()


def _has_arrays(checkpoint: epath.Path) -> bool:
    """Whether the names of its arrays are there. Reads them, because `exists` is also false on errors."""
    try:
        (checkpoint / "default" / "_METADATA").read_bytes()
    except FileNotFoundError:
        return False
    return True


def _unlisted(folder: epath.Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"cannot list the checkpoints in {folder}: {one_line(error)}")


def _is_whole(checkpoint: epath.Path) -> bool:
    """Whether a checkpoint has its name, its arrays' names and its held-out loss. Raises OSError on a
    failed read."""
    if not checkpoint.name.isdecimal() or not _has_arrays(checkpoint):
        return False
    try:
        metrics = json.loads((checkpoint / "metrics" / "metrics").read_text())
        return isinstance(metrics["held_out_loss"], float)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return False
