"""kill -9 at every change of a run's checkpoints, deletions and renames included: the run goes on."""

import dataclasses
import errno
import multiprocessing
import shutil
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import CheckpointError
from jaxllm.training.loop.checkpoints import Checkpoints, TrainState
from tests.faults import FailingDevice, KillingDevice

# The first is the best and stays, the second is deleted.
LOSSES = (1.0, 4.0, 3.0, 2.0)
LAST = len(LOSSES)

CHANGES = {"mkdir", "rmdir", "rename", "replace", "unlink", "remove", "write", "link", "truncate"}


def state_of(step):
    return TrainState(jnp.int32(step), {"w": jnp.full((3, 2), step, jnp.float32)}, {"m": jnp.float32(step)})


def abstract():
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state_of(0)
    )


def save_the_rest(folder, last=LAST):
    """What a run does: from the newest checkpoint to the last step."""
    with Checkpoints(folder, resumes=True) as checkpoints:
        done, state = checkpoints.newest(abstract()) or (0, state_of(0))
        assert int(state.step) == done
        np.testing.assert_array_equal(state.params["w"], np.full((3, 2), done))
        for step in range(done + 1, last + 1):
            checkpoints.save(state_of(step), LOSSES[step - 1])
    return done


class _AtChanges(KillingDevice):
    """Counts what changes files: a kill before an operation that reads is one before the next change."""

    def __init__(self, folder, at):
        super().__init__(folder, at)
        self.names, self._lock = [], threading.Lock()

    def _count(self, name, where):
        # Several threads write.
        with self._lock:
            if name in CHANGES:
                self.names.append(name)
                super()._count(name, where)


def _die(folder, at, ours):
    with _AtChanges(folder, at) as device:
        save_the_rest(folder)
    ours.send(device.names)


def killed(folder, at=None):
    """Saves in a process that is killed at a change; the names of all changes where it was not."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__])
    theirs, ours = server.Pipe(duplex=False)
    child = server.Process(target=_die, args=(folder, at, ours))
    child.start()
    ours.close()
    child.join()
    # Threads write in any order: a run may have a change less than the one that was counted, and end.
    assert child.exitcode in ((0,) if at is None else (0, -signal.SIGKILL))
    return [] if child.exitcode else theirs.recv()


def check_goes_on(folder):
    save_the_rest(folder)
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.best() == (1, 1.0)
        # Nothing is left of those that were half written or half deleted; the second may be there whole.
        names = {path.name for path in folder.iterdir()}
        assert {"1", "3", "4"} <= names <= {"1", "2", "3", "4"}
        for step in map(int, names):
            assert int(checkpoints.restore(step, abstract()).step) == step


@pytest.fixture
def begun(tmp_path):
    """A run before its last save, at which a checkpoint is written and another one deleted."""
    save_the_rest(tmp_path / "begun", last=LAST - 1)

    def copy(name):
        return shutil.copytree(tmp_path / "begun", tmp_path / name)

    return copy


@pytest.mark.slow
@pytest.mark.parametrize("lane", range(4))
def test_a_kill_at_any_change(begun, lane):
    changes = killed(begun("whole"))
    assert {"rename", "replace", "unlink", "rmdir", "mkdir"} <= set(changes)
    ended = []
    for at in range(1 + lane, len(changes), 4):
        folder = begun(str(at))
        ended += killed(folder, at)[:1]
        check_goes_on(folder)
    assert len(ended) <= 1


def test_a_kill_at_a_change_of_each_kind(begun):
    changes = killed(begun("whole"))
    for name in ("rename", "replace", "unlink"):
        # A checkpoint is being finished, renamed, or deleted.
        at = [number for number, each in enumerate(changes, start=1) if each == name][-1]
        folder = begun(name)
        killed(folder, at)
        check_goes_on(folder)


def test_half_of_a_checkpoint_is_ignored_and_removed(tmp_path, caplog):
    """What other programs, and buckets without renames, leave of one that they delete."""
    save_the_rest(tmp_path)
    for step, gone in ((2, "metrics"), (5, "default/_METADATA"), (6, "metrics/metrics")):
        shutil.copytree(tmp_path / "4", tmp_path / str(step))
        path = tmp_path / str(step) / gone
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    # One that looks on changes nothing.
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.best() == (1, 1.0)
        assert checkpoints.latest() == 4
    assert (tmp_path / "2").exists()
    check_goes_on(tmp_path)
    assert caplog.text.count("is not a whole checkpoint") == 3


@pytest.mark.parametrize("damage", ["data", "metrics"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(tmp_path, caplog, damage):
    save_the_rest(tmp_path)
    for file in (tmp_path / "4").rglob("*"):
        if file.is_file() and ("metrics" in file.parts) == (damage == "metrics"):
            file.write_bytes(file.read_bytes()[:-1])
    assert save_the_rest(tmp_path) == 3
    assert f"{tmp_path}/4" in caplog.text
    check_goes_on(tmp_path)


def test_nothing_is_removed_because_of_an_error_that_may_pass(tmp_path):
    save_the_rest(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    with FailingDevice(tmp_path, at=None) as device:
        device.fail(errno.EMFILE)
        with pytest.raises(CheckpointError, match="cannot list"):
            Checkpoints(tmp_path, resumes=True)
    with Checkpoints(tmp_path, resumes=True) as checkpoints, FailingDevice(tmp_path, at=None) as device:
        device.fail(errno.EMFILE)
        with pytest.raises(CheckpointError, match=r"Too many open files|cannot list"):
            checkpoints.newest(abstract())
    assert {path.name for path in tmp_path.iterdir()} == names


def test_nothing_is_removed_where_none_can_be_read(tmp_path):
    save_the_rest(tmp_path)
    other = dataclasses.replace(abstract(), params={"v": abstract().params["w"]})
    with Checkpoints(tmp_path, resumes=True) as checkpoints:
        with pytest.raises(CheckpointError, match="remove it to go on"):
            checkpoints.newest(other)
        assert checkpoints.latest() == 4
    for file in tmp_path.rglob("*"):
        if file.is_file() and "metrics" not in file.parts:
            file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="remove it to go on"):
        save_the_rest(tmp_path)
