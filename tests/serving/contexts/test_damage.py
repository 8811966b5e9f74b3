"""Damage is told apart from what storage refuses: the one is set aside and computed again, the other stays
until it can be read. Records and segments that were changed, checksums and all: what `verify` calls good is
what was written; `JAXLLM_TEST_MUTATIONS` says how many."""

import dataclasses
import errno
import os
import random
import shutil

import numpy as np
import pytest

from jaxllm.contexts.recompute import LOST
from jaxllm.errors import CheckpointError, ConfigError, ContextGone, JaxllmError
from jaxllm.serving.contexts.layout import CATALOG, SUFFIX
from jaxllm.serving.contexts.store import ContextStore
from tests.faults import FailingDevice
from tests.serving.contexts.mutations import change_record, record_document
from tests.serving.contexts.test_layout import contents
from tests.serving.contexts.test_store import ORIGIN, blobs, grown, holds
from tests.torture.codecs import CatalogFile, SegmentFile
from tests.torture.edits import apply_edits, draw_edits


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


# Mutations


COUNT = int(os.environ.get("JAXLLM_TEST_MUTATIONS", "40"))


def written(root):
    """A store of three contexts in two apps, each of two segments and with tokens behind its last chunk."""
    with ContextStore(root) as store:
        for app in ("mail", "mail", "calendar"):
            record, chunks = grown(store.create(app, ORIGIN), [8, 4])
            record = store.commit(record, chunks)
            longer, chunks = grown(record, [8, 4, 8, 4])
            longer = dataclasses.replace(longer, tokens=(*longer.tokens, 7))
            store.commit(longer, {n: chunks[n] for n in (2, 3)})
        return {record.name: record for record in store.records()}


def read_all(store, record):
    """A context's blobs, by chunk."""
    opened = store.open(record.name)
    there = [n for n, bits in enumerate(record.bits) if bits != LOST]
    layers = [opened.read(layer, there) for layer in range(len(record.origin.heads))] if there else []
    return {chunk: [layer[place] for layer in layers] for place, chunk in enumerate(there)}


def require_true(store, record, pristine):
    """What a store calls good is computed from what the record says: each chunk is one that was written for
    the same origin and tokens, byte for byte."""
    sources = {each for known in pristine.values() for each in known.sources}
    for chunk, found in read_all(store, record).items():
        assert record.sources[chunk] in sources
        for blob, wanted in zip(found, blobs(chunk, record.bits[chunk]), strict=True):
            np.testing.assert_array_equal(blob, wanted)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    root = tmp_path_factory.mktemp("pristine") / "store"
    return root, written(root)


def look(root, pristine):
    """Opens a store, verifies, reads and repairs it.

    Returns:
      The names of contexts with anything wrong.
    """
    with ContextStore(root) as store:
        wrong = {each.name for each in store.verify()}
        for record in store.records():
            try:
                require_true(store, record, pristine)
            except CheckpointError:
                assert record.name in wrong
        for name in set(pristine) - {record.name for record in store.records()}:
            assert name in wrong
            with pytest.raises(CheckpointError, match="cannot be used"):
                store.record(name)
        store.verify(repair=True)
        left = store.verify()
        assert not [each for each in left if each.proved]
        for record in store.records():
            if record.name not in {each.name for each in left}:
                require_true(store, record, pristine)
                store.commit(record)
    return wrong


def test_no_mutation_is_called_good_or_loses_another_context(pristine, tmp_path):
    source, known = pristine
    outside = tmp_path / "victim"
    outside.mkdir()
    (outside / "0.kv").write_bytes(b"mine")
    for seed in range(COUNT):
        draw, root = random.Random(seed), tmp_path / "store"
        path = draw.choice([source / CATALOG, *sorted(source.glob("app-*/*/*.kv"))])
        victim = path.parent.name if path.suffix == SUFFIX else draw.choice(sorted(known))
        codecs = {str(path.relative_to(source)): SegmentFile() if path.suffix == SUFFIX else CatalogFile()}
        edits = draw_edits(draw, source, codecs, {})
        if path.suffix != SUFFIX:
            # One record of it.
            edits = [dataclasses.replace(each, at=(victim, *each.at[1:])) for each in edits if each.at]
        apply_edits(source, edits, codecs, root)
        did = f"seed {seed}: {path.name}: {edits!r:.200}"
        before = {each.name for each in root.rglob("*.kv")}
        try:
            wrong = look(root, known)
            assert wrong <= {victim}
            assert {each.name for each in root.rglob("*.kv")} >= before or path.suffix == SUFFIX
            with ContextStore(root) as store:
                for name, record in known.items():
                    if name != victim:
                        assert store.record(name).tokens == record.tokens
        except BaseException as error:
            error.add_note(did)
            raise
        shutil.rmtree(root)
    assert (outside / "0.kv").read_bytes() == b"mine"
