"""The lock of a store: what was opened dies with it, and neither children nor those who lost it write."""

import errno
import os
import shutil
import warnings
from pathlib import Path

import pytest

from jaxllm.errors import BudgetExceeded, CheckpointError, ConfigError, JaxllmError
from jaxllm.serving.contexts.layout import Database
from jaxllm.serving.contexts.saving import compact
from jaxllm.serving.contexts.store import ContextStore
from tests.faults import FailingDevice
from tests.serving.contexts.test_store import ORIGIN, grown, holds


def forked(act):
    """What a forked child says of `act`: its error, or "done"."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        # That threads of JAX are not there in a child, which asks for none of it.
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        try:
            said = str(act() or "done")
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as file:
        return file.read()


def test_a_store_that_was_closed_is_of_no_use(tmp_path):
    store = ContextStore(tmp_path / "store")
    record = store.create("a", ORIGIN)
    store.close()
    store.close()
    with ContextStore(tmp_path / "store") as owner:
        kept = owner.commit(*grown(owner.record(record.name), [8, 8]))
        for use in (
            lambda: store.commit(*grown(record, [8])),
            lambda: store.create("a", ORIGIN),
            lambda: store.delete(record.name),
            lambda: store.record(record.name),
            store.records,
            store.verify,
        ):
            with pytest.raises(ConfigError, match="was closed, and what was opened from it with it"):
                use()
        assert holds(owner, record.name) == kept


def test_a_child_neither_uses_the_lock_nor_keeps_it(tmp_path):
    store = ContextStore(tmp_path)
    record = store.create("a", ORIGIN)
    assert "ConfigError" in forked(lambda: store.create("a", ORIGIN))
    assert "forked this one" in forked(lambda: store.commit(*grown(record, [8])))
    # Nor does it let others have its parent's.
    assert forked(store.close) == "done"
    assert "in use by another process" in forked(lambda: ContextStore(tmp_path))
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        os.read(read, 1)
        os._exit(0)
    try:
        store.close()
        # While the child lives.
        with ContextStore(tmp_path) as again:
            assert again.record(record.name) == record
    finally:
        os.write(write, b"x")
        os.waitpid(child, 0)


def test_who_lost_the_folder_does_not_write_into_the_new_one(tmp_path):
    root = tmp_path / "store"
    stale = ContextStore(root)
    record = stale.create("a", ORIGIN)
    shutil.move(root, tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", root)
    with ContextStore(root) as owner:
        kept = owner.commit(*grown(owner.record(record.name), [8, 8]))
        with pytest.raises(CheckpointError, match="was removed or replaced while it was open"):
            stale.commit(*grown(record, [8]))
        stale.close()
        assert holds(owner, record.name) == kept


def test_the_device_knows_what_is_named_before_its_name_and_what_is_deleted_before_it_goes(
    tmp_path, monkeypatch
):
    """As a power cut may leave it."""
    with ContextStore(tmp_path) as store:
        events, sync, flush = [], os.fsync, Database.flush

        def synced(number):
            events.append(Path(os.readlink(f"/proc/self/fd/{number}")))
            sync(number)

        def flushed(database):
            events.append(sorted(each.name for each in tmp_path.glob("app-a/*/*")))
            flush(database)

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(Database, "flush", flushed)
        record = store.create("a", ORIGIN)
        folder = tmp_path / "app-a" / record.name
        assert events == [folder.parent, tmp_path, []]
        record = store.commit(*grown(record, [8]))
        assert events[-2:] == [folder, ["0.kv"]]
        # The file itself, by the name that it is written under.
        assert ".0.kv." in events[-3].name
        store.commit(*grown(record, [4]))
        # The older segment goes when the device has the newer record.
        assert events[-1] == ["0.kv", "1.kv"]
        assert {each.name for each in folder.iterdir()} == {"1.kv"}
        events.clear()
        store.delete(record.name)
        assert events[0] == ["1.kv"]


def test_quotas_count_what_a_commit_frees(tmp_path):
    with ContextStore(tmp_path) as store:
        first = store.commit(*grown(store.create("a", ORIGIN), [8] * 4))
        used = store.used_bytes()
    with ContextStore(tmp_path, quota_bytes=used + 5000) as store:
        # As large as the one before, which it takes the place of.
        again = store.commit(*grown(first, [8] * 4, salt=1))
        assert holds(store, again.name, salt=1) == again
        with pytest.raises(BudgetExceeded, match="all contexts may take"):
            store.commit(*grown(again, [8] * 12))
    with ContextStore(tmp_path, quota_bytes=1) as store:
        # What does not grow may be kept, however much there is.
        store.commit(store.record(first.name))
        store.delete(first.name)


def test_a_quota_leaves_room_to_put_segments_together(tmp_path):
    with ContextStore(tmp_path) as store:
        record = store.create("a", ORIGIN)
        for count in range(1, 11):
            longer, chunks = grown(record, [8] * count)
            record = store.commit(longer, {count - 1: chunks[count - 1]})
        used = store.used_bytes()
    with ContextStore(tmp_path, quota_bytes=used, app_quota_bytes=used) as store:
        assert len(record.segments) == 10
        assert len(compact(store, record.name).segments) == 1
        assert len(holds(store, record.name).bits) == 10
        assert compact(store, record.name) == store.record(record.name)
        assert store.used_bytes() < used


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_whatever_fails_leaves_the_state_before_or_after(tmp_path, error):
    """And no segment that no record names."""
    with ContextStore(tmp_path) as store:
        name = store.commit(*grown(store.create("a", ORIGIN), [8, 8])).name
    folder, place, hit = tmp_path / "app-a" / name, 0, "none yet"
    while hit:
        place += 1
        with ContextStore(tmp_path) as store:
            longer = grown(store.record(name), [8, 8, 8], salt=place)
            with FailingDevice(tmp_path, place, error=error) as device:
                try:
                    store.commit(*longer)
                except BudgetExceeded:
                    assert error == errno.ENOSPC
                except JaxllmError:
                    # Of a full device, what was to be written is told to have no room.
                    assert error == errno.EIO or "write " not in device.hit
                else:
                    # An older one that could not be removed goes with the next commit.
                    device.mend()
                    store.commit(store.record(name))
            hit, there = device.hit, store.record(name)
            assert {each.name for each in folder.glob("*.kv")} == set(there.segments), hit
        with ContextStore(tmp_path) as store:
            assert holds(store, name, salt=place if len(there.bits) == 3 else place - 1) == there, hit
            store.commit(*grown(there, [8, 8], salt=place))
            store.sweep()
            assert store.verify() == [], hit
    assert place > 5
    assert len(there.bits) == 3
