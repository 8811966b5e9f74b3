"""Chunks that are encoded and written after a call: the answer does not wait, who needs them does, errors are
told."""

import dataclasses
import threading

import pytest

from jaxllm.contexts.codecs import RAW
from jaxllm.errors import BudgetExceeded, CheckpointError
from jaxllm.serving.contexts import store as store_module
from jaxllm.serving.contexts.chunk_io import ChunkIO
from jaxllm.serving.contexts.saving import make_room
from jaxllm.serving.contexts.store import ContextStore, WriteQueue
from tests.kernels.switching import needs_native
from tests.serving.contexts.mutations import stored_record
from tests.serving.contexts.talking import TURNS, answers_without_contexts, begun, found, new, say
from tests.serving.contexts.test_store import ORIGIN, grown

# A segment is written, or a call's chunks are encoded.
both = pytest.mark.parametrize("what", ["write", "encode"])


class Held:
    """Writes segments, or encodes chunks, when it is told to, and counts; fails by an error that it has."""

    def __init__(self, monkeypatch, what="write", *, free=False, error=None):
        self.free, self.began, self.threads, self.ended = threading.Event(), threading.Event(), [], 0
        if free or error is not None:
            self.free.set()
        owner, name = (store_module, "write_segment") if what == "write" else (ChunkIO, "encode")
        real = getattr(owner, name)

        def held(*args, **options):
            self.threads.append(threading.current_thread().name)
            self.began.set()
            assert self.free.wait(60)
            if error is not None:
                raise error
            done = real(*args, **options)
            self.ended += 1
            return done

        monkeypatch.setattr(owner, name, held)

    def soon(self):
        """Lets it go in a moment."""
        later = threading.Timer(0.2, self.free.set)
        later.start()
        return later


@both
def test_an_answer_ends_before_its_chunks_are_kept(kept, monkeypatch, what):
    contexts = kept()
    wanted = [answers_without_contexts(contexts.engine, turns) for turns in TURNS]
    first, second = new(contexts), new(contexts)
    held = Held(monkeypatch, what)
    assert say(first, TURNS[0][0]).tokens == wanted[0][0]
    assert held.began.wait(60)
    assert not held.ended
    # What is coming is what is told.
    assert len(first.tokens) == len(TURNS[0][0]) + 6
    assert first.record.bits == (RAW,) * (len(first.tokens) // 16)
    assert first.record in contexts.store.records("mail")
    if what == "write":
        # Others go on meanwhile.
        assert say(second, TURNS[1][0]).tokens == wanted[1][0]
        assert not held.ended
    later = held.soon()
    if what == "encode":
        # Another context takes the cache that is encoded.
        assert say(second, TURNS[1][0]).tokens == wanted[1][0]
    # The next call waits for its own.
    assert say(first, TURNS[0][1]).tokens == wanted[0][1]
    assert held.ended
    later.join()
    assert say(second, TURNS[1][1]).tokens == wanted[1][1]
    contexts.close()
    with ContextStore(contexts.store.root) as store:
        assert store.verify() == []
        assert all(each.bits for each in store.records())


@needs_native
def test_a_switch_to_chunks_where_they_lie_does_not_wait(kept, monkeypatch):
    contexts = kept(coded=True)
    wanted = [answers_without_contexts(contexts.engine, turns) for turns in TURNS]
    first, second = new(contexts), new(contexts)
    for context, turns, answers in zip((first, second), TURNS, wanted, strict=False):
        assert say(context, turns[0]).tokens == answers[0]
    contexts.store.wait()
    encoder = Held(monkeypatch, "encode")
    assert say(first, TURNS[0][1] * 4, 1)
    assert encoder.began.wait(60)
    one = second.generate(TURNS[1][1], max_tokens=6, ignore_eos=True)
    assert next(one)
    assert not encoder.ended
    encoder.free.set()
    assert one.result().tokens == wanted[1][1]
    contexts.store.wait()
    assert contexts.store.verify() == []


@both
def test_tokens_are_there_before_chunks(kept, monkeypatch, what):
    """As a kill in between leaves them."""
    contexts, context, _ = begun(kept)
    before = context.record.bits
    held = Held(monkeypatch, what)
    say(context, TURNS[0][1] * 5)
    # Not by a store, of which there is one.
    there = stored_record(contexts.store.root, context.name)
    assert there.tokens == context.tokens
    assert there.bits == before != context.record.bits
    held.free.set()
    contexts.store.wait()
    assert stored_record(contexts.store.root, context.name) == context.record


@pytest.mark.parametrize(
    ("what", "coded", "error"),
    [
        ("write", False, BudgetExceeded("no room")),
        ("write", False, MemoryError("full")),
        ("encode", False, MemoryError("full")),
        pytest.param("encode", True, MemoryError("full"), marks=needs_native),
    ],
)
def test_the_next_call_is_told_what_was_not_kept(kept, monkeypatch, what, coded, error):
    contexts = kept(coded=coded)
    wanted = answers_without_contexts(contexts.engine, TURNS[0])
    context, other = new(contexts), new(contexts)
    with monkeypatch.context() as patch:
        Held(patch, what, error=error)
        assert say(context, TURNS[0][0]).tokens == wanted[0]
        contexts.store.wait()
    # Others do not take it from memory, wherever they begin alike.
    assert say(other, TURNS[0][0]).tokens == wanted[0]
    kind = CheckpointError if isinstance(error, MemoryError) else type(error)
    said = {
        "write": f"{context.name} could not be written; its tokens are kept",
        "encode": "be encoded .*full",
    }
    with pytest.raises(kind, match=said[what]):
        context.generate(TURNS[0][1])
    # Once, and nothing is lost.
    answer = say(context, TURNS[0][1])
    assert answer.tokens == wanted[1]
    assert answer.restoration.resident == 0
    contexts.store.wait()
    assert contexts.store.verify() == []
    contexts = kept(coded=coded, read=True)
    assert say(found(contexts, context), TURNS[0][2]).tokens == wanted[2]


@pytest.mark.parametrize("what", ["write", "encode", "broken"])
def test_closing_waits_and_tells_what_was_not_written(kept, monkeypatch, what):
    contexts = kept()
    context = new(contexts)
    with monkeypatch.context() as patch:
        if what == "broken":
            Held(patch, error=CheckpointError(what))
            say(context, TURNS[0][0])
            with pytest.raises(CheckpointError, match="could not be written"):
                contexts.close()
        else:
            held = Held(patch, what)
            say(context, TURNS[0][0])
            later = held.soon()
            contexts.close()
            assert held.ended == 1
            later.join()
    with ContextStore(contexts.store.root) as store:
        record = store.record(context.name)
        assert len(record.tokens) == len(TURNS[0][0]) + 6
        assert len(record.bits) == (0 if what == "broken" else len(record.tokens) // 16)
        assert store.verify() == []


def test_what_leaves_memory_is_written_first(kept, monkeypatch):
    """Else it would be in memory all the same, beyond the budget. And what is coming can be deleted."""
    size = kept()._chunk_io[100].chunk_bytes(RAW)
    contexts = kept(budget_bytes=3 * size)
    first, second = new(contexts), new(contexts)
    held = Held(monkeypatch)
    say(first, TURNS[0][0])
    later = held.soon()
    say(second, [5] * 40)
    assert contexts.memory.evicted
    assert held.ended
    later.join()
    contexts.store.wait()
    held.free.clear()
    say(first, [1] * 4)
    held.soon()
    for context in (first, second):
        context.delete()
    contexts.store.wait()
    assert contexts.store.records() == []
    assert not (contexts.store.root / "app-mail").exists()


def test_older_widths_are_credited_before_a_quota_refuses(tmp_path):
    """Segments whose chunks are stored at fewer bits by now are rewritten where there would be no room."""
    origin = dataclasses.replace(ORIGIN, chunk_tokens=16, heads=(4, 4), head_width=64)

    def some(record, widths, written):
        record, chunks = grown(record, widths)
        return record, {n: chunks[n] for n in written}

    with ContextStore(tmp_path) as store:
        record = store.create("mail", origin)
        other = store.create("calendar", origin)
        for widths, written in (((8,) * 4, range(4)), ((4, 4, 4, 8), range(3)), ((4, 4, 4, 8, 8), [4])):
            record = store.commit(*some(record, widths, written))
        other = store.commit(*grown(other, (8, 8)))
        used, before = store.used_bytes("mail"), _own_bytes(store, record)
        assert len(record.segments) == 3
    with ContextStore(tmp_path, app_quota_bytes=used) as store:
        fresh = some(record, (4, 4, 4, 8, 8, 8), [5])
        with pytest.raises(BudgetExceeded, match="delete contexts, or raise the quota"):
            store.commit(*fresh)
        make_room(store, *fresh)
        # Chunks that are needed are all there, in one segment.
        assert len(store.record(record.name).segments) == 1
        assert store.record(record.name).bits == record.bits
        assert _own_bytes(store, store.record(record.name)) < before
        assert store.record(other.name).segments == other.segments
        store.commit(*fresh)
        assert store.verify() == []
        # What is needed gives no credit.
        more = grown(record, (8,) * 40)
        with pytest.raises(BudgetExceeded, match="do not fit"):
            make_room(store, *more)


def _own_bytes(store, record):
    return sum(store.own_segments(record).values())


@pytest.fixture
def queue():
    made = WriteQueue(most=2)
    made.start()
    yield made
    made.close()


def test_too_many_wait_for_room(queue):
    free = threading.Event()
    queue.put("a", lambda: free.wait(30))
    for _ in range(2):
        queue.put("b", lambda: None)
    threading.Timer(0.2, free.set).start()
    queue.put("b", lambda: None)
    assert free.is_set()


def test_an_error_ends_one_job_alone(queue, caplog):
    done = []
    queue.put("a", lambda: 1 / 0)
    queue.put("a", lambda: done.append(queue.wait()))
    queue.wait("a")
    # A job waits for none: it would wait for itself.
    assert done == [None]
    assert "a job of the context a failed" in caplog.text
