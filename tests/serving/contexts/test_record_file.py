"""Records as files: a damaged bit loses nothing, every field is what it may be, and matches where it lies."""

import contextlib
import dataclasses
import errno
import json
import os
import random
import time
from pathlib import Path

import pytest

from jaxllm.errors import CheckpointError, ConfigError, JaxllmError, Unreadable
from jaxllm.files.atomic import remove_abandoned
from serving.contexts import record_file
from serving.contexts.record_file import encoded, find_record, signed, write_record
from serving.contexts.root import folder_name
from serving.contexts.store import ContextStore
from tests.faults import FailingDevice
from tests.serving.contexts.mutations import record_document, with_record_document
from tests.serving.contexts.test_store import ORIGIN, grown


@pytest.fixture
def kept(tmp_path):
    """A store with a context of two chunks that was committed twice, and the context's folder."""
    with ContextStore(tmp_path / "store") as store:
        record = store.commit(*grown(store.create("mail", ORIGIN), [8]))
        longer, chunks = grown(record, [8, 4])
        record = store.commit(longer, {1: chunks[1]})
    return tmp_path / "store", record, tmp_path / "store" / "app-mail" / record.name


def test_what_is_written_is_read(kept):
    _, record, folder = kept
    found = find_record(folder)
    assert (found.record, found.damage) == (record, "")
    assert (folder / "record").read_bytes() == encoded(record)


def test_a_flipped_bit_loses_nothing(kept):
    """Wherever it is: there are two copies."""
    _, record, folder = kept
    raw, draw = (folder / "record").read_bytes(), random.Random(0)
    for _ in range(300):
        at = draw.randrange(len(raw))
        (folder / "record").write_bytes(raw[:at] + bytes([raw[at] ^ 1 << draw.randrange(8)]) + raw[at + 1 :])
        found = find_record(folder)
        assert found.record == record
        assert "one copy of its record is damaged" in found.damage


def test_a_lost_copy_is_written_again(kept):
    root, record, folder = kept
    (folder / "record").write_bytes(encoded(record)[:-9])
    with ContextStore(root) as store:
        (damage,) = store.verify()
        assert (damage.name, damage.lost, damage.proved) == (record.name, False, True)
        (damage,) = store.verify(repair=True)
        assert (root / damage.aside).read_bytes() == encoded(record)[:-9]
        assert store.verify() == []
    assert (folder / "record").read_bytes() == encoded(record)


def test_a_lost_copy_loses_nothing_where_the_device_fails(kept):
    """What the other copy says counts until the next record is written."""
    root, record, folder = kept
    before = (folder / "record").read_bytes(), (folder / "record.previous").read_bytes()
    place, hit = 0, "none yet"
    while hit:
        place += 1
        (folder / "record").write_bytes(before[0][:-9])
        (folder / "record.previous").write_bytes(before[1])
        with ContextStore(root) as store:
            with FailingDevice(root, place, error=errno.ENOSPC) as device, contextlib.suppress(JaxllmError):
                store.commit(record)
            hit = device.hit
            assert store.record(record.name).tokens == record.tokens, hit
        with ContextStore(root) as store:
            assert store.record(record.name).tokens == record.tokens, hit


@pytest.mark.parametrize("content", [b"", b"x" * 5000, b'{"version": 2}\n' * 2, b"\n\n", b"\xff\xfe\n"])
def test_the_record_before_stands_for_one_that_is_lost(kept, content):
    root, record, folder = kept
    before = json.loads(json.dumps(record_document((folder / "record.previous").read_bytes())))
    (folder / "record").write_bytes(content)
    with ContextStore(root) as store:
        (damage,) = store.damage()
        assert "it is as it was before its last call" in damage.reason
        assert list(store.record(record.name).tokens) == before["tokens"]
        # Going on keeps what was damaged.
        store.commit(*grown(store.record(record.name), [8, 8]))
        assert store.damage() == store.verify() == []
    (aside,) = (root / "quarantine" / "app-mail").glob(f"{record.name}-*/record")
    assert aside.read_bytes() == content


def test_a_kill_between_two_names_is_no_damage(kept):
    """The new record has its content, and not yet its name."""
    root, record, folder = kept
    (folder / "record").rename(folder / "record.previous")
    (folder / ".record.jaxllm-0123456789ab.tmp").write_bytes(encoded(record))
    with ContextStore(root) as store:
        assert store.verify() == []
        assert store.record(record.name) == record
    # Nobody was killed here.
    (folder / ".record.jaxllm-0123456789ab.tmp").unlink()
    assert "its record is missing" in find_record(folder).damage


def test_a_kill_as_the_record_is_written_again_is_no_damage(kept, monkeypatch):
    """A kill left no record but the one before; the next writer is killed once that is all there is."""
    root, record, folder = kept
    (folder / "record").rename(folder / "record.previous")
    (folder / ".record.jaxllm-0123456789ab.tmp").write_bytes(encoded(record))
    seen = []

    @contextlib.contextmanager
    def killed(path, **_):
        remove_abandoned(path.parent, path.name)
        seen.append(find_record(folder))
        raise OSError
        yield

    with ContextStore(root) as store:
        monkeypatch.setattr(record_file, "atomic_file", killed)
        with pytest.raises(CheckpointError):
            store.commit(store.record(record.name))
    assert [(each.record, each.damage) for each in seen] == [(record, "")]


@pytest.mark.parametrize("version", [1, 12])
def test_another_version_is_unreadable_and_stays(kept, version):
    root, record, folder = kept
    for name in ("record", "record.previous"):
        raw = (folder / name).read_bytes().replace(b'{"version":8', b'{"version":%d' % version)
        (folder / name).write_bytes(raw)
    with ContextStore(root) as store:
        (damage,) = store.verify(repair=True)
        assert (damage.proved, damage.lost, damage.aside) == (False, True, "")
        with pytest.raises(Unreadable, match=f"of version {version}, this jaxllm reads 2 to 11"):
            store.record(record.name)
    assert (folder / "record").read_bytes().startswith(b'{"version":%d' % version)


def test_records_from_before_contexts_had_a_time_are_read(kept):
    root, record, folder = kept
    assert abs(record.created_s - time.time()) < 600
    document = record_document((folder / "record").read_bytes())
    del document["created_s"]
    (folder / "record").write_bytes(signed(json.dumps(document), 2))
    assert find_record(folder).record == dataclasses.replace(record, created_s=0)
    with ContextStore(root) as store:
        assert store.verify() == []
        # What is written from here on keeps that it is not known.
        store.commit(store.record(record.name))
    assert (folder / "record").read_bytes().startswith(b'{"version":8')
    assert find_record(folder).record.created_s == 0


CHANGES = [
    {"name": "../../victim"}, {"name": [1]}, {"name": ""}, {"name": "0" * 16}, {"name": None},
    {"app": "calendar"}, {"app": "\ud800"}, {"app": 1}, {"app": ""}, {"tokens": [-1, 0, 1, 2]},
    {"tokens": [True] * 4}, {"tokens": [1 << 31] * 4}, {"tokens": "abcd"}, {"tokens": [1.0] * 4},
    {"tokens": [0]}, {"tokens": {}}, {"bits": [8]}, {"bits": [8, 3]}, {"bits": [8, True]}, {"bits": [8, 0]},
    {"bits": [8, 4.0]}, {"bits": [8, -1]}, {"bits": [8, "4"]}, {"mass": [0.5]}, {"mass": [0.5, -1.0]},
    {"mass": [0.5, 1]}, {"mass": [0.5, 1e300]}, {"seen": [1.0, float("nan")]},
    {"seen": [1.0, float("inf")]}, {"seen": None}, {"files": ["0.kv"]}, {"files": ["0.kv", "../../x"]},
    {"files": ["0.kv", ""]}, {"files": ["0.kv", "x.kv"]}, {"files": ["0.kv", "01.kv"]},
    {"files": ["0.kv", 1]}, {"files": ["0.kv", "record"]}, {"tables": {}}, {"tables": {"0.kv": "x"}},
    {"tables": []}, {"tables": {"0.kv": 1, "1.kv": 2}}, {"pinned": 1}, {"pinned": None}, {"used": -1},
    {"used": 1 << 60}, {"used": 1.5}, {"used": True}, {"origin": None}, {"origin": {}}, {"more": 1},
    {"created_s": -1}, {"created_s": 1.5}, {"created_s": None},
    {"model": 1}, {"model": "a\nb"}, {"model": "x" * 5000}, {"level": 0}, {"level": 101}, {"level": True},
    {"adapter": []}, {"codec": "zip"}, {"codec": []}, {"chunk_tokens": 0}, {"chunk_tokens": 3},
    {"chunk_tokens": 1 << 40}, {"dtype": "int8"}, {"dtype": {}}, {"heads": []}, {"heads": [1, -1]},
    {"heads": [10**9] * 3}, {"heads": 5}, {"head_width": 6}, {"head_width": 0}, {"head_width": 1 << 30},
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_no_field_is_believed(kept, change):
    """Checksums and copies are right, and so is all else."""
    root, record, folder = kept
    document = record_document((folder / "record").read_bytes())
    for name, value in change.items():
        within = document if name in document or name == "more" else document["origin"]
        within[name] = value
    for name in ("record", "record.previous"):
        (folder / name).write_bytes(with_record_document(document))
    with pytest.raises(CheckpointError, match="malformed") as error:
        find_record(folder)
    assert not isinstance(error.value, Unreadable)
    victim = root.parent / "victim"
    victim.mkdir()
    with ContextStore(root) as store:
        (damage,) = store.verify(repair=True)
        assert damage.name == record.name
        assert store.verify() == store.records() == []
    assert (root / damage.aside / "0.kv").exists()
    assert list(victim.iterdir()) == []


@pytest.mark.parametrize("field", [*ORIGIN.facts(), "tokens", "used"])
def test_no_field_may_be_missing(kept, field):
    _, _, folder = kept
    document = record_document((folder / "record").read_bytes())
    (document if field in document else document["origin"]).pop(field)
    (folder / "record").write_bytes(with_record_document(document))
    assert "malformed" in find_record(folder).damage


def test_a_record_that_cannot_get_its_name_leaves_the_one_before(kept, monkeypatch):
    root, record, folder = kept
    before, real = (folder / "record").read_bytes(), Path.replace

    def refused(path, target):
        if Path(target).name == "record":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, target)

    with ContextStore(root) as store:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", refused)
            with pytest.raises(CheckpointError, match="cannot be written"):
                store.commit(*grown(record, [8, 8]))
        assert (folder / "record").read_bytes() == before
        assert store.record(record.name).tokens == record.tokens
        assert store.damage() == store.verify() == []


@pytest.mark.parametrize("name", ["record", "record.previous"])
def test_what_is_no_record_is_not_deleted_with_the_context(kept, name):
    root, record, folder = kept
    (folder / name).unlink()
    (folder / name).mkdir()
    (folder / name / "notes.txt").write_text("mine")
    with ContextStore(root) as store:
        store.delete(record.name)
        assert store.records() == store.verify() == []
    (kept_file,) = (root / "quarantine").rglob("notes.txt")
    assert kept_file.read_text() == "mine"


def test_copies_that_differ_are_no_record(kept):
    _, record, folder = kept
    other = dataclasses.replace(record, tokens=(5, 5, 5, 5))
    (folder / "record").write_bytes(encoded(record)[: len(encoded(record)) // 2] + encoded(other))
    assert "its copies differ" in find_record(folder).damage


def test_attention_that_is_not_finite_is_not_written(kept):
    """It could not be read again."""
    _, record, folder = kept
    with pytest.raises(CheckpointError, match="attention is not finite"):
        write_record(folder, dataclasses.replace(record, mass=(float("nan"), 0.5)))
    assert find_record(folder).record == record


@pytest.mark.parametrize("app", ["", "a" * 300, "\ud800"])
def test_an_app_needs_a_name_that_can_be_a_folder(tmp_path, app):
    with pytest.raises(ConfigError, match="an app"):
        folder_name(app)
    with ContextStore(tmp_path) as store, pytest.raises(ConfigError, match="an app"):
        store.create(app, ORIGIN)
