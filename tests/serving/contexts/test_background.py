"""Chunks that are written after a call: the answer does not wait, who needs them does, errors are told."""

import dataclasses
import os
import random
import shutil
import threading

import numpy as np
import pytest

from jaxllm.contexts.codecs import RAW
from jaxllm.errors import BudgetExceeded, CheckpointError
from jaxllm.serving.contexts import store as store_module
from jaxllm.serving.contexts.saving import make_room
from jaxllm.serving.contexts.store import ContextStore
from tests.serving.contexts.killed_writes import ORIGIN, check, write_until_killed
from tests.serving.contexts.mutations import stored_record
from tests.serving.contexts.talking import READ, TURNS, answers_without_contexts, found, new, say

# Kills of a process that writes; a thousand take twelve minutes on two busy cores.
KILLS = int(os.environ.get("JAXLLM_TEST_WRITE_KILLS", "8"))


class Device:
    """Writes segments when it is told to."""

    def __init__(self, monkeypatch):
        self.free, self.began, self.paths, self.error = threading.Event(), threading.Event(), [], None
        real = store_module.write_segment

        def write(path, *rest, **options):
            self.began.set()
            assert self.free.wait(60)
            if self.error is not None:
                raise self.error
            self.paths.append(path)
            return real(path, *rest, **options)

        monkeypatch.setattr(store_module, "write_segment", write)


def test_an_answer_ends_before_its_chunks_are_written(kept, monkeypatch):
    contexts = kept()
    wanted = [answers_without_contexts(contexts.engine, turns) for turns in TURNS]
    first, second = new(contexts), new(contexts)
    device = Device(monkeypatch)
    assert say(first, TURNS[0][0]).tokens == wanted[0][0]
    assert device.began.wait(60)
    assert not device.paths
    # What is coming is what is told.
    assert len(first.tokens) == len(TURNS[0][0]) + 6
    assert first.record.bits == (RAW,) * (len(first.tokens) // 16)
    assert first.record in contexts.store.records("mail")
    # Others go on meanwhile.
    assert say(second, TURNS[1][0]).tokens == wanted[1][0]
    assert not device.paths
    later = threading.Thread(target=lambda: (device.began.wait(), device.free.set()))
    later.start()
    # The next call waits for its own.
    assert say(first, TURNS[0][1]).tokens == wanted[0][1]
    assert device.paths
    later.join()
    contexts.close()
    with ContextStore(contexts.store.root) as store:
        assert store.verify() == []
        assert all(each.bits for each in store.records())


def test_tokens_are_there_before_chunks(kept, monkeypatch):
    """As a kill in between leaves them."""
    contexts = kept()
    context = new(contexts)
    say(context, TURNS[0][0])
    contexts.store.wait()
    held = len(context.record.bits)
    device = Device(monkeypatch)
    say(context, TURNS[0][1] * 5)
    # Not by a store, of which there is one.
    there = stored_record(contexts.store.root, context.name)
    assert there.tokens == context.tokens
    assert len(there.bits) == held < len(context.record.bits)
    device.free.set()
    contexts.store.wait()
    assert stored_record(contexts.store.root, context.name) == context.record


@pytest.mark.parametrize("error", [BudgetExceeded("no room"), CheckpointError("broken"), MemoryError("full")])
def test_the_next_call_is_told_what_was_not_written(kept, monkeypatch, error):
    contexts = kept()
    wanted = answers_without_contexts(contexts.engine, TURNS[0])
    context, other = new(contexts), new(contexts)
    with monkeypatch.context() as patch:
        device = Device(patch)
        device.error = error
        device.free.set()
        assert say(context, TURNS[0][0]).tokens == wanted[0]
        say(other, [3, 4])
        contexts.store.wait()
    kind = CheckpointError if isinstance(error, MemoryError) else type(error)
    with pytest.raises(kind, match=f"{context.name} could not be written; its tokens are kept"):
        context.generate(TURNS[0][1])
    # Once, and nothing is lost.
    answer = say(context, TURNS[0][1])
    assert answer.tokens == wanted[1]
    assert answer.restoration.resident == 0
    assert len(say(other, [3, 4]).tokens) == 6
    contexts.store.wait()
    assert contexts.store.verify() == []
    contexts = kept()
    contexts._delays[100] = READ
    assert say(found(contexts, context), TURNS[0][2]).tokens == wanted[2]


def test_closing_tells_what_was_not_written(kept, monkeypatch):
    contexts = kept()
    context = new(contexts)
    with monkeypatch.context() as patch:
        device = Device(patch)
        device.error = CheckpointError("broken")
        device.free.set()
        say(context, TURNS[0][0])
        with pytest.raises(CheckpointError, match="could not be written"):
            contexts.close()
    with ContextStore(contexts.store.root) as store:
        assert len(store.record(context.name).tokens) == len(TURNS[0][0]) + 6


def test_what_leaves_memory_is_written_first(kept, monkeypatch):
    """Else it would be in memory all the same, beyond the budget."""
    size = kept()._chunk_io[100].chunk_bytes(RAW)
    contexts = kept(budget_bytes=3 * size)
    first, second = new(contexts), new(contexts)
    device = Device(monkeypatch)
    say(first, TURNS[0][0])
    later = threading.Timer(0.2, device.free.set)
    later.start()
    say(second, [5] * 40)
    assert contexts.memory.evicted
    assert device.paths
    later.join()


def test_a_context_that_is_coming_can_be_deleted(kept, monkeypatch):
    contexts = kept()
    context = new(contexts)
    device = Device(monkeypatch)
    say(context, TURNS[0][0])
    threading.Timer(0.1, device.free.set).start()
    context.delete()
    contexts.store.wait()
    assert contexts.store.records() == []
    assert not (contexts.store.root / "app-mail").exists()


@pytest.mark.parametrize("whose", ["app", "all"])
def test_older_widths_are_credited_before_a_quota_refuses(tmp_path, whose):
    """Segments whose chunks are stored at fewer bits by now are rewritten where there would be no room."""
    origin = dataclasses.replace(ORIGIN, chunk_tokens=16, heads=(4, 4), head_width=64)

    def chunks(widths, written):
        return {
            n: (widths[n], [np.zeros(size, np.uint8) for size in origin.layer_bytes[widths[n]]])
            for n in written
        }

    def grown(record, widths):
        mass = (0.5,) * len(widths)
        tokens = tuple(range(16 * len(widths)))
        return dataclasses.replace(record, tokens=tokens, bits=widths, mass=mass, seen=mass)

    with ContextStore(tmp_path) as store:
        record = store.create("mail", origin)
        other = store.create("calendar", origin)
        for widths, written in (((8,) * 4, range(4)), ((4, 4, 4, 8), range(3)), ((4, 4, 4, 8, 8), [4])):
            record = store.commit(grown(record, widths), chunks(widths, written))
        other = store.commit(grown(other, (8, 8)), chunks((8, 8), range(2)))
        used, own, before = store.used_bytes(), store.used_bytes("mail"), store.stored_bytes(record)
        assert len(record.segments) == 3
    quota = {"app_quota_bytes": own} if whose == "app" else {"quota_bytes": used}
    with ContextStore(tmp_path, **quota) as store:
        fresh = grown(record, (4, 4, 4, 8, 8, 8)), chunks((8,) * 6, [5])
        with pytest.raises(BudgetExceeded, match="delete contexts, or raise the quota"):
            store.commit(*fresh)
        make_room(store, *fresh)
        # Chunks that are needed are all there, in one segment.
        assert len(store.record(record.name).segments) == 1
        assert store.record(record.name).bits == record.bits
        assert store.stored_bytes(store.record(record.name)) < before
        assert store.record(other.name).segments == other.segments
        store.commit(*fresh)
        assert store.verify() == []
        # What is needed gives no credit.
        more = grown(record, (8,) * 40), chunks((8,) * 40, range(40))
        with pytest.raises(BudgetExceeded, match="do not fit"):
            make_room(store, *more)


@pytest.mark.timeout(7200)
def test_a_kill_at_any_moment_loses_nothing_that_ended(tmp_path):
    whole, draw, killed = write_until_killed(tmp_path / "whole", None), random.Random(0), 0
    for number in range(KILLS):
        root = tmp_path / str(number)
        seen = write_until_killed(root, None, draw.uniform(0, whole.took_s))
        killed += not seen.operations
        check(root, seen)
        shutil.rmtree(root)
    print(f"{KILLS} kills, {killed} of them before the last call had ended")


def test_a_kill_at_any_file_operation_loses_nothing_that_ended(tmp_path):
    whole = write_until_killed(tmp_path / "whole", None)
    check(tmp_path / "whole", whole)
    step = max(1, whole.operations // 60)
    for at in range(1, whole.operations, step):
        root = tmp_path / str(at)
        check(root, write_until_killed(root, at))
