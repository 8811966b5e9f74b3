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
from jaxllm.serving.contexts.layout import CATALOG, Database, delete_quarantined
from jaxllm.serving.contexts.record import Origin, Record
from jaxllm.serving.contexts.store import ContextStore
from tests.faults import FailingDevice
from tests.serving.contexts.mutations import change_record

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


def test_what_is_deleted_is_gone(tmp_path):
    with ContextStore(tmp_path) as store:
        record = store.commit(*grown(store.create("a", ORIGIN), [8]))
        store.delete(record.name)
        assert store.records() == []
        assert not (tmp_path / "app-a").exists()
        for use in (store.record, store.open, store.delete, lambda _: store.commit(record)):
            with pytest.raises(ContextGone, match="deleted, or never made"):
                use(record.name)


def test_what_made_a_context_is_compared():
    # The layout follows from others, or from the kernels.
    for changes, found in (
        ({}, ()),
        ({"level": 50, "codec": "kivi"}, ("level", "codec")),
        ({"level": 50, "heads": (1, 1, 1)}, ("level",)),
        ({"heads": (1, 1, 1)}, ("heads",)),
    ):
        assert ORIGIN.differing(dataclasses.replace(ORIGIN, **changes)) == found
    # Chunks are of their tokens, and of an encoder-decoder's source.
    record = Record(name="a", app="b", origin=ORIGIN, tokens=(1, 2, 3, 4), source=(5,))
    other = dataclasses.replace(record, tokens=(1, 2, 3, 5))
    assert (record.sources[0] == other.sources[0], record.sources[1] == other.sources[1]) == (True, False)
    assert not {*record.sources} & {*dataclasses.replace(record, source=(6,)).sources}


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


def test_a_child_neither_uses_the_lock_nor_keeps_it(tmp_path):
    """Nor does who closed the store."""
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
            kept = again.commit(*grown(again.record(record.name), [8, 8]))
            for use in (lambda: store.commit(*grown(record, [8])), store.records, store.verify):
                with pytest.raises(ConfigError, match="was closed, and what was opened from it with it"):
                    use()
            assert holds(again, record.name) == kept
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
    """Those of an app, and of all."""
    with ContextStore(tmp_path, app_quota_bytes=40_000) as store:
        first = store.commit(*grown(store.create("a", ORIGIN), [8] * 4))
        used = store.used_bytes()
        with pytest.raises(BudgetExceeded, match=r"the contexts of a may take 40,000 bytes"):
            store.commit(*grown(store.create("a", ORIGIN), [8] * 9))
        assert holds(store, first.name) == first
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


# The folder: what is not the store's own is not read, followed or removed, whatever is done


def contents(folder):
    """All files and links in a folder, by name."""
    found = sorted(folder.rglob("*"))
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in found
        if path.is_symlink() or path.is_file()
    } | {str(path.relative_to(folder)): None for path in found if path.is_dir() and not path.is_symlink()}


def written(path, content=b"mine"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_a_folder_of_other_things_is_no_store_and_stays_as_it_is(tmp_path):
    home = tmp_path / "home"
    written(home / "Documents" / "thesis" / "ch1.tex")
    written(home / "Pictures" / "2024" / "may" / "a.jpg")
    before = contents(home)
    with pytest.raises(ConfigError, match=r"not a store of contexts, and not empty.*use an empty folder"):
        ContextStore(home)
    assert contents(home) == before


def test_what_others_keep_in_a_store_stays_as_it_is(tmp_path):
    """Beside its contexts, and in their folders."""
    with ContextStore(tmp_path) as store:
        record = store.commit(*grown(store.create("mail", ORIGIN), [8]))
        own = tmp_path / "app-mail" / record.name
        gone = store.create("gone", ORIGIN)
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    written(outside / "0.kv")
    (tmp_path / "app-mail" / ("a" * 16)).symlink_to(outside)
    (tmp_path / "app-linked").symlink_to(outside)
    others = [
        "notes/today/list.txt", "app-mail/notes/list.txt", "app-mail/0123456789ABCDEF/record.txt",
        f"app-mail/{record.name}/notes.txt", f"app-mail/{record.name}/7.kv",
        f"app-gone/{gone.name}/notes.txt",
        "app-%61/0123456789abcdef/x", "quarantine/app-x/y/mine.txt",
    ]  # fmt: skip
    for name in others:
        written(tmp_path / name)
    with ContextStore(tmp_path) as store:
        store.commit(*grown(holds(store, record.name), [8, 4]))
        store.verify(repair=True)
        holds(store, record.name)
        store.delete(gone.name)
        store.delete(record.name)
        store.verify(repair=True)
        assert store.records() == []
        delete_quarantined(tmp_path)
    assert (outside / "0.kv").read_bytes() == b"mine"
    for name in others:
        assert (tmp_path / name).read_bytes() == b"mine"
    # Of a context whose folder somebody uses, the store's own files are gone.
    assert {each.name for each in own.iterdir()} == {"notes.txt", "7.kv"}


def test_links_are_listed_and_never_followed(tmp_path):
    """Where a folder of an app or of a context should be, and where files should."""
    store_folder, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    with ContextStore(store_folder) as store:
        moved = store.commit(*grown(store.create("moved", ORIGIN), [8]))
        linked = store.commit(*grown(store.create("linked", ORIGIN), [8]))
    elsewhere.mkdir()
    (store_folder / "app-moved").rename(elsewhere / "app")
    (store_folder / "app-moved").symlink_to(elsewhere / "app")
    segment = store_folder / "app-linked" / linked.name / "0.kv"
    segment.rename(elsewhere / "0.kv")
    segment.symlink_to(elsewhere / "0.kv")
    before = contents(elsewhere)
    with ContextStore(store_folder) as store:
        (damage,) = store.damage()
        assert (damage.app, damage.proved) == ("moved", False)
        assert "is a link" in damage.reason
        assert [each.name for each in store.records()] == [linked.name]
        found = store.verify(repair=True)
        assert [(each.app, each.chunks) for each in found] == [("linked", (0,)), ("moved", ())]
        assert segment.is_symlink()
        # The next segment takes another name.
        assert holds(store, store.commit(*grown(store.record(linked.name), [8])).name).files == ("1.kv",)
        store.delete(linked.name)
    assert contents(elsewhere) == before
    assert f"app/{moved.name}/0.kv" in before


def test_a_catalog_that_is_lost_or_damaged_as_a_whole_is_refused_by_name(tmp_path):
    """Or of another version; and no chunk is removed."""
    with ContextStore(tmp_path) as store:
        store.commit(*grown(store.create("a", ORIGIN), [8]))
    whole = (tmp_path / CATALOG).read_bytes()
    other, damaged = whole[:60] + (7).to_bytes(4, "big") + whole[64:], "is damaged, or another program's file"
    for content, match in (
        (None, "is missing: restore it from a copy"), (b"", damaged), (b"\xff" * 200, damaged),
        (b"SQLite format 3\0" + b"\0" * 84, damaged), (other, "is of version 7, this jaxllm uses 1; use the"),
    ):  # fmt: skip
        (tmp_path / CATALOG).unlink()
        if content is not None:
            (tmp_path / CATALOG).write_bytes(content)
        before = contents(tmp_path)
        with pytest.raises(ConfigError, match=f"catalog.sqlite,? {match}"):
            ContextStore(tmp_path)
        assert contents(tmp_path) == before
        (tmp_path / CATALOG).write_bytes(whole)
    with ContextStore(tmp_path) as store:
        assert store.verify() == []


def test_catalogs_are_no_pipes_and_not_followed(tmp_path):
    ContextStore(tmp_path / "real").close()
    folder = tmp_path / "store"
    for name in (CATALOG, f"{CATALOG}-wal"):
        for make in (os.mkfifo, lambda path: Path(path).symlink_to(tmp_path / "real" / CATALOG), Path.mkdir):
            if name == CATALOG:
                folder.mkdir(exist_ok=True)
            else:
                ContextStore(folder).close()
            make(folder / name)
            with pytest.raises(ConfigError, match="is not a regular file"):
                ContextStore(folder)
            (folder / name).rmdir() if (folder / name).is_dir() else (folder / name).unlink()


def test_what_a_killed_first_opening_leaves_is_no_content(tmp_path):
    written(tmp_path / "lock", b"")
    written(tmp_path / ".catalog.sqlite.jaxllm-0123456789ab.tmp", b"SQL")
    with ContextStore(tmp_path) as store:
        assert store.records() == []
        assert not list(tmp_path.glob("*.tmp"))


def test_opening_removes_nothing(tmp_path):
    """A store that is there: whatever a kill left in it, and whatever is damaged."""
    with ContextStore(tmp_path) as store:
        record = store.commit(*grown(store.create("a", ORIGIN), [8]))
        other = store.commit(*grown(store.create("a", ORIGIN), [8]))
    folder = tmp_path / "app-a" / record.name
    written(folder / "9.kv", (folder / "0.kv").read_bytes())
    written(folder / ".9.kv.0123456789ab.tmp", b"JXLK")
    change_record(folder.with_name(other.name), tokens=None)
    (tmp_path / "app-a" / "0123456789abcdef").mkdir()
    written(tmp_path / "app-a" / "fedcba9876543210" / "0.kv", (folder / "0.kv").read_bytes())
    before = contents(tmp_path)
    with ContextStore(tmp_path) as store:
        assert [each.name for each in store.records()] == [record.name]
        assert {each.name for each in store.damage()} == {other.name, "fedcba9876543210"}
    assert contents(tmp_path) == before
    with ContextStore(tmp_path) as store:
        store.create("a", ORIGIN)
        # A context that was being made when a process ended has an empty folder.
        assert not (tmp_path / "app-a" / "0123456789abcdef").exists()
        store.sweep()
        store.verify(repair=True)
        assert {each.name for each in folder.iterdir()} == {"0.kv"}
        # Whose files those are nobody knows: they are listed, and stay.
        (left,) = store.verify()
        assert (left.name, left.proved, left.lost) == ("fedcba9876543210", False, True)
        assert "the catalog does not know" in left.reason
    assert (tmp_path / "app-a" / "fedcba9876543210" / "0.kv").exists()
