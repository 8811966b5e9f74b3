"""The catalog: any flipped bit is seen, no field is believed, and failures leave a state before or after."""

import dataclasses
import errno
import os
import random
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxllm.contexts.recompute import LOST
from jaxllm.errors import BudgetExceeded, CheckpointError, ConfigError, ContextGone, JaxllmError, Unreadable
from jaxllm.serving.contexts.layout import CATALOG, LOG_SUFFIX, Database
from jaxllm.serving.contexts.record import decoded, encoded
from jaxllm.serving.contexts.store import ContextStore
from tests.faults import FailingDevice
from tests.serving.contexts.mutations import (
    catalog_document,
    change_record,
    record_document,
    rows,
    with_catalog_document,
    with_row,
)
from tests.serving.contexts.test_store import ORIGIN, contents, grown, holds


@pytest.fixture
def kept(tmp_path):
    """A store with a context of two chunks that was committed twice, another one, and the first one's
    folder."""
    with ContextStore(tmp_path / "store") as store:
        record = store.commit(*grown(store.create("mail", ORIGIN), [8]))
        longer, chunks = grown(record, [8, 4])
        record = store.commit(longer, {1: chunks[1]})
        store.commit(*grown(store.create("calendar", ORIGIN), [8, 8, 8]))
    return tmp_path / "store", record, tmp_path / "store" / "app-mail" / record.name


def segments(root):
    """All segments of a store, those in the quarantine too."""
    return sorted((path.name, path.read_bytes()) for path in root.rglob("*.kv"))


def test_what_is_written_is_read_by_its_owner_alone(kept):
    root, record, own = kept
    for folder in (root, own.parent, own):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert decoded(encoded(record), "mail", record.name) == record
    assert catalog_document((root / CATALOG).read_bytes()).keys() == {
        path.name for path in root.glob("app-*/*")
    }
    assert sorted(each.name for each in root.iterdir()) == ["app-calendar", "app-mail", CATALOG, "lock"]
    # And a deleted context by nobody.
    tokens = b",".join(b"%d" % each for each in (70001, 70002, 70003, 70004))
    with ContextStore(root) as store:
        for path in (root / CATALOG, root / f"{CATALOG}{LOG_SUFFIX}"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        store.commit(dataclasses.replace(record, tokens=(70001, 70002, 70003, 70004)))
        size = (root / CATALOG).stat().st_size
        assert tokens in (root / CATALOG).read_bytes()
        store.delete(record.name)
    assert tokens not in (root / CATALOG).read_bytes()
    assert (root / CATALOG).stat().st_size <= size


def test_any_flipped_bit_of_the_catalog_is_seen_and_no_chunk_is_removed(kept):
    """Or changes nothing of what is read; what can be read of a damaged catalog is kept by a repair."""
    root, _, _ = kept
    raw, draw = (root / CATALOG).read_bytes(), random.Random(0)
    with ContextStore(root) as store:
        known = {each.name: each for each in store.records()}
    before, refused, damaged, mended = segments(root), 0, 0, 0
    body = raw.index(b'{"app"')
    places = [draw.randrange(len(raw)) for _ in range(60)] + [draw.randrange(120) for _ in range(20)]
    for at in [*places, *(body + draw.randrange(600) for _ in range(15))]:
        copy = root.with_name("copy")
        shutil.copytree(root, copy)
        bit = 1 << draw.randrange(8)
        (copy / CATALOG).write_bytes(raw[:at] + bytes([raw[at] ^ bit]) + raw[at + 1 :])
        try:
            with ContextStore(copy) as store:
                found = {each.name: each for each in store.records()}
                seen = store.verify()
                assert all(known[name] == each for name, each in found.items()), f"bit {bit} of byte {at}"
                assert seen or found == known, f"bit {bit} of byte {at}"
                damaged += bool(seen)
                store.sweep()
                store.verify(repair=True)
                left = [each for each in store.verify() if each.proved]
                assert left == [], f"bit {bit} of byte {at}"
                mended += len(store.records()) == 2
        except ConfigError:
            refused += 1
        assert segments(copy) == before, f"bit {bit} of byte {at}"
        shutil.rmtree(copy)
    assert refused
    assert damaged > 20
    assert mended


def test_a_damaged_structure_is_made_anew_of_what_can_be_read(kept):
    root, record, _ = kept
    raw = bytearray((root / CATALOG).read_bytes())
    page_bytes = int.from_bytes(raw[16:18], "big")
    # The index of names: SQLite could write anywhere by it.
    (number,) = [
        at for at in range(1, len(raw) // page_bytes)
        if raw[at * page_bytes] == 10 and record.name.encode() in raw[at * page_bytes : (at + 1) * page_bytes]
    ]  # fmt: skip
    raw[number * page_bytes + 4] ^= 1
    (root / CATALOG).write_bytes(raw)
    with ContextStore(root) as store:
        (damage,) = store.damage()
        assert (damage.name, damage.proved) == ("", True)
        with pytest.raises(CheckpointError, match="nothing is written to it: `jaxllm contexts repair"):
            store.commit(record)
        (damage,) = store.verify(repair=True)
        assert (root / damage.aside).read_bytes() == bytes(raw)
        assert holds(store, record.name) == record
        store.commit(record)
    with ContextStore(root) as store:
        assert store.verify() == []
        assert len(store.records()) == 2


def test_a_log_whose_end_is_lost_is_told_of(kept):
    """Transactions behind a damaged page are not there: SQLite takes them for a power cut's."""
    root, record, _ = kept
    store = ContextStore(root)
    for number in range(3):
        store.note(dataclasses.replace(record, tokens=(*record.tokens, number)))
    copy = root.with_name("copy")
    shutil.copytree(root, copy)
    store.close()
    log = copy / f"{CATALOG}{LOG_SUFFIX}"
    raw = bytearray(log.read_bytes())
    with ContextStore(copy) as killed:
        assert killed.verify() == []
        assert killed.record(record.name).tokens[-1] == 2
    for at in (100, len(raw) - 200):
        raw[at] ^= 1
        (copy / CATALOG).write_bytes((root / CATALOG).read_bytes())
        log.write_bytes(raw)
        with ContextStore(copy) as damaged:
            assert "the end of its log cannot be read" in damaged.damage()[0].reason
            assert damaged.record(record.name).tokens[: len(record.tokens)] == record.tokens
        raw[at] ^= 1


def test_no_room_in_the_catalog_loses_nothing(kept):
    """SQLite's own error of a full device."""
    root, record, _ = kept
    with ContextStore(root) as store:
        ((pages,),) = store._catalog._database.run("PRAGMA page_count")
        store._catalog._database.run(f"PRAGMA max_page_count = {pages}")
        longer = dataclasses.replace(record, tokens=(*record.tokens, *range(4000)))
        for change in (store.note, store.commit):
            with pytest.raises(BudgetExceeded, match="no room on the device"):
                change(longer)
            assert store.record(record.name).tokens == record.tokens
        store.delete(record.name)
        assert store.verify() == []


CHANGES = [
    {"name": "../../victim"}, {"name": [1]}, {"name": "0" * 16}, {"app": "calendar"}, {"app": "\ud800"},
    {"app": 1}, {"tokens": [-1, 0, 1, 2]}, {"tokens": [True] * 4}, {"tokens": [1 << 31] * 4},
    {"tokens": "abcd"}, {"tokens": [1.0] * 4}, {"tokens": [0]}, {"bits": [8]}, {"bits": [8, 3]},
    {"bits": [8, True]}, {"bits": [8, 4.0]}, {"bits": [8, -1]}, {"mass": [0.5]}, {"mass": [0.5, -1.0]},
    {"mass": [0.5, 1]}, {"mass": [0.5, 1e300]}, {"seen": [1.0, float("nan")]}, {"seen": None},
    {"files": ["0.kv"]}, {"files": ["0.kv", "../../x"]}, {"files": ["0.kv", "01.kv"]},
    {"files": ["0.kv", 1]}, {"files": ["0.kv", "record"]}, {"checksums": {}}, {"checksums": {"0.kv": "x"}},
    {"checksums": []}, {"checksums": {"0.kv": 1, "1.kv": 2}}, {"pinned": 1}, {"used": -1}, {"used": 1 << 60},
    {"used": True}, {"origin": None}, {"more": 1}, {"created_s": 1.5}, {"model": "a\nb"},
    {"model": "x" * 5000}, {"level": 0}, {"level": 101}, {"level": True}, {"adapter": []}, {"codec": "zip"},
    {"codec": []}, {"chunk_tokens": 0}, {"chunk_tokens": 3}, {"chunk_tokens": 1 << 40}, {"tokenizer": None},
    {"tokenizer": "é"}, {"dtype": "int16"}, {"dtype": {}}, {"heads": []}, {"heads": [1, -1]}, {"heads": 5},
    {"heads": [10**9] * 3}, {"head_width": 6}, {"head_width": 0},
]  # fmt: skip


def test_no_field_is_believed_and_none_may_be_missing(kept):
    """Checksums are right, and so is all else."""
    root, record, _ = kept
    raw, victim = (root / CATALOG).read_bytes(), root.parent / "victim"
    victim.mkdir()
    for change in [*CHANGES, *ORIGIN.facts(), "tokens", "used"]:
        document = catalog_document(raw)[record.name]
        for name in change if isinstance(change, dict) else (change,):
            within = document if name in document or name == "more" else document["origin"]
            if isinstance(change, dict):
                within[name] = change[name]
            else:
                del within[name]
        shutil.copytree(root, copy := root.with_name("copy"))
        (copy / CATALOG).write_bytes(with_catalog_document(raw, {record.name: document}))
        with ContextStore(copy) as store:
            (damage,) = store.verify(repair=True)
            assert (damage.name, "malformed" in damage.reason) == (record.name, True), change
            assert store.verify() == []
            assert record.name not in {each.name for each in store.records()}
        assert (copy / damage.aside / "0.kv").exists()
        assert (copy / damage.aside / "record").read_bytes().startswith(b'{"jaxllm record":')
        shutil.rmtree(copy)
    assert list(victim.iterdir()) == []


def test_rows_of_another_app_or_no_app_lead_nowhere(kept):
    """Although their checksums are right."""
    root, record, folder = kept
    raw = (root / CATALOG).read_bytes()
    _, sealed, body = rows(raw)[record.name]
    for app in ("app-calendar", "../victim", "", "app-..", "quarantine"):
        (root / CATALOG).write_bytes(with_row(raw, record.name, app, sealed, body))
        with ContextStore(root) as store:
            assert record.name not in {each.name for each in store.records()}, app
            assert store.verify(repair=True)
            store.sweep()
        assert (folder / "0.kv").exists()
        shutil.rmtree(root / "quarantine")


def test_a_record_that_its_reader_refuses_does_not_replace_the_last(kept):
    root, record, _ = kept
    with ContextStore(root) as store:
        for wrong in (
            {"created_s": -1}, {"tokens": (-1,)}, {"tokenizer": "x" * 2000}, {"mass": (float("nan"), 0.5)},
        ):  # fmt: skip
            for change in (store.commit, store.note):
                with pytest.raises(CheckpointError, match="could not be read again"):
                    change(dataclasses.replace(record, **wrong))
        assert store.record(record.name).tokens == record.tokens
        assert store.verify() == []


def test_a_context_that_is_made_before_1970_is_there_again(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: -2e9)
    with ContextStore(tmp_path / "old") as store:
        record = store.create("mail", ORIGIN)
    with ContextStore(tmp_path / "old") as store:
        assert store.record(record.name) == record
        assert record.created_s == 0


def test_an_app_needs_a_name_that_can_be_a_folder(tmp_path):
    with ContextStore(tmp_path) as store:
        for app in ("", "a" * 300, "\ud800"):
            with pytest.raises(ConfigError, match="an app"):
                store.create(app, ORIGIN)


def test_a_forked_child_that_ends_leaves_the_log_to_its_parent(kept):
    """A child has a copy of the connection; if it closed that, it would write to the parent's files."""
    root, record, _ = kept
    code = f"""
import dataclasses, os, sys, warnings
sys.path.insert(0, {os.fspath(Path(__file__).parents[3])!r})
from jaxllm.serving.contexts.store import ContextStore
store = ContextStore({os.fspath(root)!r})
record = store.record({record.name!r})
store.note(dataclasses.replace(record, tokens=(*record.tokens, 1)))
if os.fork() == 0:
    del store
    sys.exit(0)
os.wait()
store.note(dataclasses.replace(record, tokens=(*record.tokens, 1, 2)))
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    with ContextStore(root) as store:
        assert store.verify() == []
        assert store.record(record.name).tokens == (*record.tokens, 1, 2)


SCHEMA = "CREATE TABLE things (name TEXT NOT NULL UNIQUE, value INTEGER NOT NULL);"
THREADS, STATEMENTS = 6, 300


def test_threads_share_no_statement(tmp_path):
    database = Database(tmp_path / "things.sqlite", SCHEMA, kind=7, version=1)
    errors = []

    def write(number):
        try:
            for each in range(STATEMENTS):
                name, value = f"{number} {each}", number * STATEMENTS + each
                database.run("INSERT INTO things VALUES (?, ?)", name, value)
                assert database.run("SELECT value FROM things WHERE name = ?", name) == [(value,)]
                with pytest.raises((CheckpointError, Unreadable), match="UNIQUE"):
                    database.run("INSERT INTO things VALUES (?, ?)", name, -1)
                if each % 50 == 0:
                    database.flush()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    values = [value for (value,) in database.run("SELECT value FROM things ORDER BY value")]
    assert values == list(range(THREADS * STATEMENTS))
    database.close()


# Damage is told apart from what storage refuses: the one is set aside and computed again, the other stays


def two_segments(store, app):
    """A context whose first chunk lies in another file than the two behind it."""
    record, chunks = grown(store.create(app, ORIGIN), [8])
    record = store.commit(record, chunks)
    longer, chunks = grown(record, [8, 4, 8])
    return store.commit(longer, {chunk: chunks[chunk] for chunk in (1, 2)})


@pytest.fixture
def two(tmp_path):
    root = tmp_path / "store"
    with ContextStore(root) as store:
        record = two_segments(store, "mail")
        two_segments(store, "calendar")
    return root, record, root / "app-mail" / record.name


def test_damaged_chunks_are_found_and_computed_again(two):
    """Others of the same file stay."""
    root, record, folder = two
    with ContextStore(root) as store:
        assert store.verify() == []
        segment = store.open(record.name)._segments["1.kv"]
        at = segment._offsets[1] + segment._starts[1][1]
    content = bytearray((folder / "1.kv").read_bytes())
    content[at] ^= 1
    (folder / "1.kv").write_bytes(content)
    (folder / "0.kv").unlink()
    with ContextStore(root) as store:
        (damage,) = store.verify()
        assert (damage.app, damage.name, damage.chunks) == ("mail", record.name, (0, 2))
        with pytest.raises(CheckpointError, match="chunk 2 of layer 1 is corrupt"):
            store.open(record.name, [1, 2]).read(1, [1, 2])
        store.verify(repair=True)
        assert store.verify() == []
        assert holds(store, record.name).bits == (LOST, 4, LOST)


def test_chunks_that_are_not_what_the_record_says_are_damaged(two):
    """Of other widths, tokens, levels or layouts, whatever the checksums say."""
    root, record, folder = two
    document = record_document(folder)
    sums = document["checksums"]
    for changes, chunks in (
        # Native code would read past the blob.
        ({"bits": [8, 8, 8]}, (1,)),
        ({"tokens": [0, 9, 2, 3, 4, 5]}, (0, 1, 2)),
        ({"tokens": [0, 1, 2, 3, 9, 5]}, (2,)),
        ({"files": ["1.kv", "1.kv", "1.kv"], "checksums": {"1.kv": sums["1.kv"]}}, (0,)),
        ({"checksums": {**sums, "0.kv": "0" * 32}}, (0,)),
        ({"origin": {**document["origin"], "level": 50}}, (0, 1, 2)),
        ({"origin": {**document["origin"], "heads": [4, 4, 4]}}, (0, 1, 2)),
    ):
        shutil.copytree(root, copy := root.with_name("copy"))
        change_record(copy / "app-mail" / record.name, **changes)
        with ContextStore(copy) as store:
            (damage,) = store.verify()
            assert (damage.name, damage.chunks) == (record.name, chunks)
            with pytest.raises(CheckpointError, match="is not the one that the context's record means"):
                store.open(record.name)
            store.verify(repair=True)
            assert store.verify() == []
            lost = [chunk for chunk, bits in enumerate(store.record(record.name).bits) if bits == LOST]
            assert tuple(lost) == chunks
        shutil.rmtree(copy)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_catalog_that_storage_refuses_stays_and_comes_back(two, error):
    """The store is not opened; once it is open it answers from what it has read."""
    root, record, _ = two
    before = contents(root)
    with FailingDevice(root, at=None) as device:
        device.fail(errno.EIO)
        with pytest.raises(ConfigError, match="cannot be a store of contexts"):
            ContextStore(root)
    assert contents(root) == before
    with ContextStore(root) as store:
        with FailingDevice(root, at=None) as device:
            device.fail(error)
            with pytest.raises(JaxllmError):
                store.commit(dataclasses.replace(record, pinned=True))
        with pytest.raises(ContextGone, match="never made"):
            store.record(record.name, "calendar")
        assert holds(store, record.name).tokens == record.tokens
        assert store.damage() == store.verify() == []


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_segment_that_storage_refuses_stays(two, monkeypatch, call):
    """What is repaired beside it too."""
    root, record, folder = two
    (folder / "0.kv").write_bytes(b"")
    before, facts, real = (folder / "1.kv").read_bytes(), os.stat(folder / "1.kv"), getattr(os, call)

    def refused(file, *rest, **options):
        if os.path.samestat(facts, os.stat(file)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, *rest, **options)

    with ContextStore(root) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refused)
            damage = {each.proved: each for each in store.verify(repair=True)}
            assert damage[True].chunks == (0,)
            assert os.strerror(errno.EIO) in damage[False].reason
            # A call that comes now computes all of it.
            assert store.repair(record.name).bits == (LOST, LOST, LOST)
        assert (folder / "1.kv").read_bytes() == before
        assert store.verify() == []
        assert holds(store, record.name).bits == (LOST, 4, 8)


# Mutations
