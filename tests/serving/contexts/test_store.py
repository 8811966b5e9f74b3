"""The store: what was committed is there, in a fresh process too; kills and full disks lose nothing older.
Its lock: what was opened dies with it, and neither children nor those who lost it write."""

import dataclasses
import errno
import os
import random
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

from jaxllm.contexts.recompute import LOST
from jaxllm.errors import BudgetExceeded, CheckpointError, ConfigError, ContextGone, JaxllmError
from jaxllm.serving.contexts.catalog import Catalog
from jaxllm.serving.contexts.layout import Database
from jaxllm.serving.contexts.record import Origin
from jaxllm.serving.contexts.store import ContextStore
from tests.faults import FailingDevice

ORIGIN = Origin(
    model="m", level=100, adapter="", codec="channel", chunk_tokens=2, dtype="float16", heads=(5, 4, 5),
    head_width=16,
)  # fmt: skip
LAYERS = len(ORIGIN.heads)


def blobs(chunk, bits, salt=0, origin=ORIGIN):
    """What a chunk's layers hold: told by its number and width alone."""
    draw = np.random.default_rng([chunk, bits, salt])
    return [draw.integers(0, 256, size, dtype=np.uint8) for size in origin.layer_bytes[bits]]


def grown(record, bits, salt=0):
    """A context with chunks of these widths, and all of them to be written."""
    origin = record.origin
    record = dataclasses.replace(
        record,
        tokens=tuple(range(origin.chunk_tokens * len(bits))),
        bits=tuple(bits),
        mass=(0.5,) * len(bits),
        seen=(1.0,) * len(bits),
    )
    return record, {n: (width, blobs(n, width, salt, origin)) for n, width in enumerate(bits)}


def holds(store, name, salt=0):
    record = store.record(name)
    opened = store.open(name)
    for layer in range(LAYERS):
        stored = [chunk for chunk, bits in enumerate(record.bits) if bits != LOST]
        for chunk, blob in zip(stored, opened.read(layer, stored), strict=True):
            np.testing.assert_array_equal(blob, blobs(chunk, record.bits[chunk], salt)[layer])
    return record


def test_a_context_is_there_again(tmp_path):
    with ContextStore(tmp_path / "store") as store:
        made = store.create("mail", ORIGIN, pinned=True)
        kept = store.commit(*grown(made, [8, 4, 8]))
        other = store.create("mail", ORIGIN)
        store.create("calendar/../x", ORIGIN)
        assert [each.app for each in store.records()] == ["calendar/../x", "mail", "mail"]
        assert {each.name for each in store.records("mail")} == {kept.name, other.name}
    with ContextStore(tmp_path / "store") as store:
        assert store.record(made.name) == kept
        assert holds(store, made.name).pinned
        assert store.record(other.name).used > kept.used
        assert store.used_bytes("mail") < store.used_bytes()
        assert store.open(other.name).layers == 0


def test_newer_chunks_take_the_place_of_older_ones(tmp_path):
    """And files that hold none any more go."""
    with ContextStore(tmp_path) as store:
        record, chunks = grown(store.create("a", ORIGIN), [8, 8])
        record = store.commit(record, chunks)
        longer, chunks = grown(record, [4, 8, 8])
        record = store.commit(longer, {chunk: chunks[chunk] for chunk in (0, 2)})
        assert len(record.segments) == 2
        assert holds(store, record.name).bits == (4, 8, 8)
        narrow, chunks = grown(record, [4, 4, 8])
        record = store.commit(narrow, {1: chunks[1]})
        # The first file held chunks 0 and 1 at 8 bits.
        assert len(record.segments) == 2
        holds(store, record.name)
        (folder,) = (tmp_path / "app-a").iterdir()
        assert {each.name for each in folder.iterdir()} == set(record.segments)


def test_nothing_is_linked_of_a_context_without_chunks(tmp_path):
    with ContextStore(tmp_path) as store:
        empty, record = (store.create("mail", ORIGIN) for _ in range(2))
        for number in range(3):
            assert store.link(record, empty.name, {number: 8}) == {}


def test_what_is_deleted_is_gone(tmp_path):
    with ContextStore(tmp_path) as store:
        record = store.commit(*grown(store.create("a", ORIGIN), [8]))
        store.delete(record.name)
        assert store.records() == []
        assert not (tmp_path / "app-a").exists()
        for use in (store.record, store.open, store.delete):
            with pytest.raises(ContextGone, match="deleted, or never made"):
                use(record.name)
        with pytest.raises(ContextGone):
            store.commit(record)


def test_quotas_are_kept(tmp_path):
    with ContextStore(tmp_path, quota_bytes=60_000, app_quota_bytes=40_000) as store:
        first = store.commit(*grown(store.create("a", ORIGIN), [8] * 4))
        with pytest.raises(BudgetExceeded, match=r"the contexts of a may take 40,000 bytes"):
            store.commit(*grown(first, [8] * 20))
        assert holds(store, first.name) == first
        store.commit(*grown(store.create("b", ORIGIN), [8] * 4))
        with pytest.raises(BudgetExceeded, match="all contexts may take 60,000"):
            store.commit(*grown(store.create("c", ORIGIN), [8] * 9))


def test_what_made_a_context_is_compared(tmp_path):
    assert ORIGIN.differing(ORIGIN) == ()
    assert ORIGIN.differing(dataclasses.replace(ORIGIN, level=50, codec="kivi")) == ("level", "codec")
    # The layout follows from others, or from the kernels.
    assert ORIGIN.differing(dataclasses.replace(ORIGIN, level=50, heads=(1, 1, 1))) == ("level",)
    assert ORIGIN.differing(dataclasses.replace(ORIGIN, heads=(1, 1, 1))) == ("heads",)


def test_a_foreign_context_is_looked_up_as_a_missing_one(tmp_path, monkeypatch):
    """The same message, and the same work, which therefore takes the same time."""
    work = []
    for name in ("_find", "find_again", "settle"):
        real = getattr(Catalog, name)
        monkeypatch.setattr(
            Catalog, name, lambda self, *a, _real=real, _name=name: work.append(_name) or _real(self, *a)
        )
    with ContextStore(tmp_path / "store") as store:
        names = [store.commit(*grown(store.create("mail", ORIGIN), [8, 4])).name for _ in range(3)]
        store.create("calendar", ORIGIN)
        draw, told = random.Random(1), set()
        for attempt in range(200):
            foreign = names[attempt % 3] if attempt % 2 else f"{draw.getrandbits(64):016x}"
            work.clear()
            with pytest.raises(ContextGone) as caught:
                store.record(foreign, "calendar")
            told.add((str(caught.value).replace(foreign, "NAME"), tuple(work)))
        assert len(told) == 1
        assert {each.app for each in store.records("calendar")} == {"calendar"}
        assert {store.record(name, "mail").name for name in names} == set(names)


# The lock


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
