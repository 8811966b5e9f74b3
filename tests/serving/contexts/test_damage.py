"""Tests that damage is told apart from what storage refuses: the one is set aside and computed again, the
other stays as it is until it can be read."""

import errno
import os

import pytest

from jaxllm.errors import CheckpointError, ContextGone, Unreadable
from jaxllm.kv.recompute import LOST
from serving.contexts.store import ContextStore
from tests.serving.contexts.mutations import change_record, record_document
from tests.serving.contexts.test_root import contents
from tests.serving.contexts.test_store import ORIGIN, grown, holds


def two_segments(store, app):
    """A context whose first chunk lies in another file than the two behind it."""
    record, chunks = grown(store.create(app, ORIGIN), [8])
    record = store.commit(record, chunks)
    longer, chunks = grown(record, [8, 4, 8])
    return store.commit(longer, {chunk: chunks[chunk] for chunk in (1, 2)})


@pytest.fixture
def kept(tmp_path):
    root = tmp_path / "store"
    with ContextStore(root) as store:
        record = two_segments(store, "mail")
        two_segments(store, "calendar")
    return root, record, root / "app-mail" / record.name


def test_damaged_chunks_are_found_and_computed_again(kept):
    """Others of the same file stay."""
    root, record, folder = kept
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


@pytest.mark.parametrize(
    ("changes", "chunks"),
    [
        # Native code would read past the blob.
        ({"bits": [8, 8, 8]}, (1,)),
        ({"bits": [2, 2, 2]}, (0, 1, 2)),
        ({"tokens": [0, 9, 2, 3, 4, 5]}, (0, 1, 2)),
        ({"tokens": [0, 1, 2, 3, 9, 5]}, (2,)),
        ({"files": ["1.kv", "1.kv", "1.kv"], "tables": None}, (0,)),
        ({"tables": {"0.kv": "0" * 32, "1.kv": None}}, (0,)),
        ({"origin": {"level": 50}}, (0, 1, 2)),
        ({"origin": {"heads": [4, 4, 4]}}, (0, 1, 2)),
        ({"origin": {"codec": "kivi"}}, (0, 1, 2)),
    ],
)
def test_chunks_that_are_not_what_the_record_says_are_damaged(kept, changes, chunks):
    """Of other widths, tokens, levels or layouts, whatever the checksums say."""
    root, record, folder = kept
    document = record_document((folder / "record").read_bytes())
    tables = document["tables"]
    if "tables" in changes:
        wanted = changes["tables"] or {"1.kv": None}
        changes = {**changes, "tables": {name: each or tables[name] for name, each in wanted.items()}}
    if "origin" in changes:
        changes = {**changes, "origin": {**document["origin"], **changes["origin"]}}
    change_record(folder, **changes)
    with ContextStore(root) as store:
        (damage,) = store.verify()
        assert (damage.name, damage.chunks) == (record.name, chunks)
        with pytest.raises(CheckpointError, match="is not the one that the context's record means"):
            store.open(record.name)
        store.verify(repair=True)
        assert store.verify() == []
        lost = [chunk for chunk, bits in enumerate(store.record(record.name).bits) if bits == LOST]
        assert tuple(lost) == chunks


def test_a_segment_of_another_commit_is_damaged(kept):
    """Although it is whole, and of this context's tokens."""
    root, record, folder = kept
    with ContextStore(root) as store:
        longer, chunks = grown(store.record(record.name), [8, 4, 8], salt=1)
        store.commit(longer, {0: chunks[0]})
        strange = (folder / "2.kv").read_bytes()
        again, chunks = grown(store.record(record.name), [8, 4, 8])
        record = store.commit(again, {0: chunks[0]})
    (folder / record.files[0]).write_bytes(strange)
    with ContextStore(root) as store:
        (damage,) = store.verify()
        assert damage.chunks == (0,)


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.EMFILE, errno.ENOSPC, errno.ESTALE])
def test_a_record_that_storage_refuses_stays_and_comes_back(kept, monkeypatch, error):
    root, record, folder = kept
    before, real = contents(root), os.open

    def refused(path, *rest, **options):
        if os.fspath(path) == os.fspath(folder / "record"):
            raise OSError(error, os.strerror(error))
        return real(path, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        store = ContextStore(root)
        (damage,) = store.damage()
        assert (damage.app, damage.name, damage.proved, damage.lost) == ("mail", record.name, False, True)
        assert os.strerror(error) in damage.reason
        assert [each.app for each in store.records()] == ["calendar"]
        assert store.verify(repair=True) == [damage]
        with pytest.raises(Unreadable, match="cannot be used"):
            store.record(record.name)
        # Another app is not told that there is one.
        with pytest.raises(ContextGone, match="never made"):
            store.record(record.name, "calendar")
    assert contents(root) == before
    # Once it can be read it is there again, without opening the store anew.
    assert holds(store, record.name) == record
    assert store.damage() == store.verify() == []
    store.close()


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_segment_that_storage_refuses_stays(kept, monkeypatch, call):
    """What is repaired beside it too."""
    root, record, folder = kept
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


def test_contexts_of_the_same_name_do_not_take_each_other(kept):
    """A folder that was copied to another app is damaged, and the one that it was copied from is not."""
    root, record, folder = kept
    copied = root / "app-zebra" / record.name
    copied.mkdir(parents=True)
    for each in folder.iterdir():
        (copied / each.name).write_bytes(each.read_bytes())
    with ContextStore(root) as store:
        (damage,) = store.verify(repair=True)
        assert (damage.app, damage.lost) == ("zebra", True)
        assert holds(store, record.name) == record
    assert (root / damage.aside / "record").exists()
