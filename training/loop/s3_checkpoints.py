"""Stores checkpoints at an `s3://` URL by tensorstore, because orbax does not support S3.

orbax 0.12 treats every path but `gs://` as one of a file system (`build_kvstore_tspec`), and names a
checkpoint by a rename, which S3 lacks. The layout under the URL:

    {step}/{array}/...    the arrays, zarr 3 with checksums; each process writes the shards of its devices
    done/{step}.json      written last, by the first process; checkpoints without it do not count
"""

import itertools
import json
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import tensorstore as ts
from jax.experimental import multihost_utils
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

from jaxllm.errors import CheckpointError

# S3 accepts at most 5 GB per request.
_MOST_CHUNK_BYTES = 1 << 29
# tensorstore's defaults would retry for half an hour without an answer.
_RETRIES = {"max_retries": 6, "initial_delay": "500ms", "max_delay": "10s"}
# Timeout of processes that wait for each other: the slowest may still be writing.
_LIMIT_S = 1800
_FAILURES = (OSError, ValueError, RuntimeError, KeyError, NotImplementedError)


class S3Checkpoints:
    """The checkpoints under a URL: the last `latest`, and the best by held-out loss; for `resumes` see
    `Checkpoints`.

    Raises:
      CheckpointError: they cannot be listed.
    """

    def __init__(self, url: str, *, latest: int, resumes: bool = False) -> None:
        self.url, self._latest = url.rstrip("/"), latest
        self._manager = GlobalAsyncCheckpointManager(_LIMIT_S)
        try:
            self._store: ts.KvStore = ts.KvStore.open(self._place("")).result()
            self._done = self._read_done()
            if resumes and jax.process_index() == 0:
                self._remove_parts()
        except _FAILURES as error:
            raise CheckpointError(f"cannot list the checkpoints at {self.url}: {error}") from error

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return sorted(self._done)

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
            for other in self._unneeded():
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

    def _read_done(self) -> dict[int, dict[str, Any]]:
        names = sorted(key.decode() for key in self._store.list(_under("done/")).result())
        found = {int(name.removeprefix("done/").removesuffix(".json")): name for name in names}
        return {step: json.loads(self._store.read(found[step]).result().value) for step in sorted(found)}

    def _remove_parts(self) -> None:
        """Deletes objects of checkpoints without a name."""
        firsts = {key.decode().split("/")[0] for key in self._store.list().result()}
        for step in firsts - {"done", *map(str, self._done)}:
            if step.isdecimal():
                self._store.delete_range(_under(f"{step}/")).result()

    def _unneeded(self) -> list[int]:
        losses = self.losses()
        best = min(losses, key=losses.__getitem__)
        return sorted(losses.keys() - {best, *sorted(losses)[-self._latest :]})

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
