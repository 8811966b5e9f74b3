"""Records and segments that were changed, checksums and all: nothing crashes, hangs, escapes or is lost, and
what `verify` calls good is what was written. `JAXLLM_TEST_MUTATIONS` says how many."""

import contextlib
import dataclasses
import os
import random
import shutil

import numpy as np
import pytest

from jaxllm.contexts.recompute import LOST
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.serving.contexts.layout import CATALOG, SUFFIX
from jaxllm.serving.contexts.store import ContextStore
from tests.serving.contexts.test_store import ORIGIN, blobs, grown
from tests.torture.codecs import CatalogFile, SegmentFile
from tests.torture.edits import BECOME, Edit, apply_edits, draw_edits

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


def test_another_kind_of_file_is_no_catalog_and_nothing_is_removed(pristine, tmp_path):
    source, _ = pristine
    cuts = [Edit(CATALOG, "cut", value=at) for at in (1, 50, 3000, 5000)]
    for edit in (*cuts, *(Edit(CATALOG, "become", value=each) for each in BECOME)):
        root = apply_edits(source, [edit], {CATALOG: CatalogFile()}, tmp_path / "store")
        before = sorted(root.rglob("*.kv"))
        with contextlib.suppress(ConfigError), ContextStore(root) as store:
            # A part of it may be read as a whole.
            assert edit.kind == "cut"
            assert store.verify()
        assert sorted(root.rglob("*.kv")) == before
