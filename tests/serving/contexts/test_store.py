"""The store: what was committed is there, in a fresh process too; kills, damage and full disks lose nothing
older."""

import dataclasses
import random

import numpy as np
import pytest

from jaxllm.contexts.recompute import LOST
from jaxllm.errors import BudgetExceeded, ContextGone
from jaxllm.serving.contexts.catalog import Catalog
from jaxllm.serving.contexts.record import Origin
from jaxllm.serving.contexts.store import ContextStore

ORIGIN = Origin(
    model="m", level=100, adapter="", codec="channel", chunk_tokens=2, dtype="float16", heads=(5, 4, 5),
    head_width=16,
)  # fmt: skip
LAYERS = len(ORIGIN.heads)


def blobs(chunk, bits, salt=0):
    """What a chunk's layers hold: told by its number and width alone."""
    draw = np.random.default_rng([chunk, bits, salt])
    return [draw.integers(0, 256, size, dtype=np.uint8) for size in ORIGIN.layer_bytes[bits]]


def grown(record, bits, salt=0):
    """A context with chunks of these widths, and all of them to be written."""
    record = dataclasses.replace(
        record,
        tokens=tuple(range(2 * len(bits))),
        bits=tuple(bits),
        mass=(0.5,) * len(bits),
        seen=(1.0,) * len(bits),
    )
    return record, {chunk: (width, blobs(chunk, width, salt)) for chunk, width in enumerate(bits)}


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
