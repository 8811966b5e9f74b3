"""Tests that damage is told apart from what storage refuses: the one is set aside and computed again, the
other stays as it is until it can be read."""

import dataclasses
import errno
import os

import pytest

from jaxllm.contexts.recompute import LOST
from jaxllm.errors import CheckpointError, ConfigError, ContextGone, JaxllmError
from jaxllm.serving.contexts.store import ContextStore
from tests.faults import FailingDevice
from tests.serving.contexts.mutations import change_record, record_document
from tests.serving.contexts.test_layout import contents
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
        ({"files": ["1.kv", "1.kv", "1.kv"], "checksums": None}, (0,)),
        ({"checksums": {"0.kv": "0" * 32, "1.kv": None}}, (0,)),
        ({"origin": {"level": 50}}, (0, 1, 2)),
        ({"origin": {"heads": [4, 4, 4]}}, (0, 1, 2)),
        ({"origin": {"codec": "kivi"}}, (0, 1, 2)),
    ],
)
def test_chunks_that_are_not_what_the_record_says_are_damaged(kept, changes, chunks):
    """Of other widths, tokens, levels or layouts, whatever the checksums say."""
    root, record, folder = kept
    document = record_document(folder)
    sums = document["checksums"]
    if "checksums" in changes:
        wanted = changes["checksums"] or {"1.kv": None}
        changes = {**changes, "checksums": {name: each or sums[name] for name, each in wanted.items()}}
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


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_catalog_that_storage_refuses_stays_and_comes_back(kept, error):
    """The store is not opened; once it is open it answers from what it has read."""
    root, record, _ = kept
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


def test_a_copied_folder_takes_no_context(kept):
    """Nobody knows what it is: it is listed, and stays; and so is the one that it was copied from."""
    root, record, folder = kept
    copied = root / "app-zebra" / record.name
    copied.mkdir(parents=True)
    for each in folder.iterdir():
        (copied / each.name).write_bytes(each.read_bytes())
    with ContextStore(root) as store:
        (damage,) = store.verify(repair=True)
        assert (damage.app, damage.lost, damage.proved) == ("zebra", True, False)
        assert holds(store, record.name) == record
        with pytest.raises(ContextGone):
            store.record(record.name, "zebra")
    assert (copied / "0.kv").exists()
