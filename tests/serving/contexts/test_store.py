"""The store: what was committed is there, in a fresh process too; kills, damage and full disks lose nothing
older."""

import dataclasses
import errno
import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxllm.contexts.recompute import LOST
from jaxllm.errors import BudgetExceeded, ConfigError, ContextGone
from jaxllm.serving.contexts import store as store_module
from jaxllm.serving.contexts.record import Origin
from jaxllm.serving.contexts.saving import compact
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


def test_many_small_files_become_one(tmp_path):
    with ContextStore(tmp_path) as store:
        record = store.create("a", ORIGIN)
        for count in range(1, 12):
            longer, chunks = grown(record, [8] * count)
            record = store.commit(longer, {count - 1: chunks[count - 1]})
        assert len(record.segments) == 11
        assert len(compact(store, record.name).segments) == 1
        assert len(holds(store, record.name).bits) == 11
        assert compact(store, record.name) == store.record(record.name)


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


def test_folders_are_for_their_owner_alone(tmp_path):
    with ContextStore(tmp_path / "store") as store:
        record = store.create("a", ORIGIN)
        for folder in (tmp_path / "store", tmp_path / "store/app-a", tmp_path / "store/app-a" / record.name):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_one_process_at_a_time(tmp_path):
    with ContextStore(tmp_path), pytest.raises(ConfigError, match="in use by another process"):
        ContextStore(tmp_path)
    ContextStore(tmp_path).close()


def test_quotas_are_kept(tmp_path):
    with ContextStore(tmp_path, quota_bytes=60_000, app_quota_bytes=40_000) as store:
        first = store.commit(*grown(store.create("a", ORIGIN), [8] * 4))
        with pytest.raises(BudgetExceeded, match=r"the contexts of a may take 40,000 bytes"):
            store.commit(*grown(first, [8] * 20))
        assert holds(store, first.name) == first
        store.commit(*grown(store.create("b", ORIGIN), [8] * 4))
        with pytest.raises(BudgetExceeded, match="all contexts may take 60,000"):
            store.commit(*grown(store.create("c", ORIGIN), [8] * 9))


def test_a_full_disk_loses_nothing_older(tmp_path, monkeypatch):
    with ContextStore(tmp_path) as store:
        first = store.commit(*grown(store.create("a", ORIGIN), [8, 8]))

        def full(*_, **__):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(store_module, "write_segment", full)
        with pytest.raises(BudgetExceeded, match="No space left"):
            store.commit(*grown(first, [8, 8, 8], salt=1))
        assert holds(store, first.name) == first


def test_what_made_a_context_is_compared(tmp_path):
    assert ORIGIN.differing(ORIGIN) == ()
    assert ORIGIN.differing(dataclasses.replace(ORIGIN, level=50, codec="kivi")) == ("level", "codec")
    # The layout follows from others, or from the kernels.
    assert ORIGIN.differing(dataclasses.replace(ORIGIN, level=50, heads=(1, 1, 1))) == ("level",)
    assert ORIGIN.differing(dataclasses.replace(ORIGIN, heads=(1, 1, 1))) == ("heads",)


WRITER = """
import sys, random
sys.path.insert(0, sys.argv[2])
from jaxllm.serving.contexts.store import ContextStore
from tests.serving.contexts.test_store import ORIGIN, grown
draw = random.Random(int(sys.argv[3]))
with ContextStore(sys.argv[1]) as store:
    print("open", flush=True)
    while True:
        records = store.records()
        if len(records) < 3 or draw.random() < 0.1:
            record = store.create(draw.choice("ab"), ORIGIN)
        else:
            record = draw.choice(records)
        if len(records) > 6:
            store.delete(draw.choice(records).name)
            continue
        widths = [draw.choice([8, 4]) for _ in range(draw.randint(1, 12))]
        longer, chunks = grown(record, widths)
        kept = store.commit(longer, chunks)
        print("kept", kept.name, *kept.bits, flush=True)
"""


def killed(root, seed, after_s):
    """Runs a writer for some time, and kills it; what it said it had kept last, by name."""
    here = os.fspath(Path(__file__).parents[3])
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, os.fspath(root), here, str(seed)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        time.sleep(after_s)
        child.send_signal(signal.SIGKILL)
        said = child.stdout.read().splitlines()
    lines = [line.split() for line in said if line.startswith("kept") and line.endswith(("8", "4"))]
    return {name: tuple(map(int, bits)) for _, name, *bits in lines}


@pytest.mark.slow
def test_a_kill_loses_at_most_what_was_running(tmp_path):
    """Whenever it comes, the store opens, and every context holds what one of its commits wrote."""
    draw = random.Random(0)
    kept: dict[str, tuple[int, ...]] = {}
    for seed in range(20):
        kept |= killed(tmp_path / "store", seed, draw.uniform(0, 0.1))
        with ContextStore(tmp_path / "store") as store:
            assert store.verify() == []
            for record in store.records():
                holds(store, record.name)
                assert LOST not in record.bits
            there = {record.name: record.bits for record in store.records()}
        # The last commit of all may have ended after its writer spoke, or another have begun.
        changed = [name for name in kept if there.get(name, ()) not in ((), kept[name])]
        assert len(changed) <= 1
        kept = there


"""""".strip() if False else None
