"""Chunks that are encoded after a call: the answer does not wait, who needs them does, errors are told."""

import threading

import pytest

from jaxllm.errors import CheckpointError
from jaxllm.serving.contexts.chunk_io import ChunkIO
from jaxllm.serving.contexts.store import ContextStore
from tests.kernels.switching import needs_native
from tests.serving.contexts.mutations import stored_record
from tests.serving.contexts.talking import TURNS, answers_without_contexts, new, say


class Encoder:
    """Encodes when it is told to, and counts."""

    def __init__(self, monkeypatch, *, free=False):
        self.free, self.began, self.threads = threading.Event(), threading.Event(), []
        self.error: Exception | None = None
        self.ended = 0
        if free:
            self.free.set()
        real = ChunkIO.encode

        def encode(*args, **options):
            self.threads.append(threading.current_thread().name)
            self.began.set()
            assert self.free.wait(60)
            if self.error is not None:
                raise self.error
            coded = real(*args, **options)
            self.ended += 1
            return coded

        monkeypatch.setattr(ChunkIO, "encode", encode)

    def soon(self):
        """Lets it go in a moment."""
        later = threading.Timer(0.2, self.free.set)
        later.start()
        return later


@pytest.mark.parametrize("codec", ["raw", "channel"])
def test_an_answer_ends_before_its_chunks_are_encoded(kept, monkeypatch, codec):
    # Else the second conversation would begin with chunks of the first.
    own = {"share_beginnings": False}
    told = [_conversation(kept(codec, **own), monkeypatch, held=held) for held in (False, True)]
    assert told[0] == told[1]


def _conversation(contexts, monkeypatch, *, held):
    """What is answered, and the widths and bytes of chunks after each call, which are encoded later if they
    are held back."""
    context, told = new(contexts), []
    with monkeypatch.context() as patch:
        encoder = Encoder(patch, free=not held)
        for number, turn in enumerate(TURNS[0]):
            if held:
                encoder.free.clear()
            answered = say(context, turn).tokens
            if held:
                assert encoder.ended == number
            # They count all the same.
            sizes = [each.size_bytes for each in contexts.memory.chunks(context.name).values()]
            assert contexts.memory.resident_bytes == sum(sizes)
            assert len(sizes) == len(context.record.bits) == len(context.tokens) // 16
            told.append((answered, context.record.bits, sum(sizes)))
            encoder.free.set()
            contexts.store.wait()
        assert encoder.threads == ["jaxllm-encoding"] * len(TURNS[0])
    assert contexts.store.verify() == []
    return told


def test_the_next_call_waits_for_what_it_needs(kept, monkeypatch):
    contexts = kept()
    wanted = [answers_without_contexts(contexts.engine, turns) for turns in TURNS]
    first, second = new(contexts), new(contexts)
    encoder = Encoder(monkeypatch)
    assert say(first, TURNS[0][0]).tokens == wanted[0][0]
    later = encoder.soon()
    # Another context takes the cache that is encoded.
    assert say(second, TURNS[1][0]).tokens == wanted[1][0]
    assert encoder.ended
    later.join()
    assert say(first, TURNS[0][1]).tokens == wanted[0][1]
    assert say(second, TURNS[1][1]).tokens == wanted[1][1]


@needs_native
def test_a_switch_to_chunks_where_they_lie_does_not_wait(kept, monkeypatch):
    contexts = kept(coded=True)
    wanted = [answers_without_contexts(contexts.engine, turns) for turns in TURNS]
    first, second = new(contexts), new(contexts)
    for context, turns, answers in zip((first, second), TURNS, wanted, strict=False):
        assert say(context, turns[0]).tokens == answers[0]
    contexts.store.wait()
    encoder = Encoder(monkeypatch)
    assert say(first, TURNS[0][1] * 4, 1)
    assert encoder.began.wait(60)
    one = second.generate(TURNS[1][1], max_tokens=6, ignore_eos=True)
    assert next(one)
    assert not encoder.ended
    encoder.free.set()
    assert one.result().tokens == wanted[1][1]
    contexts.store.wait()
    assert contexts.store.verify() == []


def test_a_kill_before_chunks_are_encoded_leaves_the_tokens(kept, monkeypatch):
    contexts = kept()
    context = new(contexts)
    say(context, TURNS[0][0])
    contexts.store.wait()
    held = context.record.bits
    encoder = Encoder(monkeypatch)
    say(context, TURNS[0][1] * 5)
    there = stored_record(contexts.store.root, context.name)
    assert there.tokens == context.tokens
    assert there.bits == held != context.record.bits
    encoder.free.set()


def test_closing_waits(kept, monkeypatch):
    contexts = kept()
    context = new(contexts)
    encoder = Encoder(monkeypatch)
    say(context, TURNS[0][0])
    later = encoder.soon()
    contexts.close()
    assert encoder.ended == 1
    later.join()
    with ContextStore(contexts.store.root) as store:
        assert len(store.record(context.name).bits) == (len(TURNS[0][0]) + 6) // 16
        assert store.verify() == []


@pytest.mark.parametrize("coded", [False, pytest.param(True, marks=needs_native)])
def test_the_next_call_is_told_what_was_not_encoded(kept, monkeypatch, coded):
    contexts = kept(coded=coded)
    wanted = [answers_without_contexts(contexts.engine, turns) for turns in TURNS]
    first, second = new(contexts), new(contexts)
    with monkeypatch.context() as patch:
        encoder = Encoder(patch, free=True)
        encoder.error = MemoryError("full")
        assert say(first, TURNS[0][0]).tokens == wanted[0][0]
        contexts.store.wait()
    # Others do not take it from memory, wherever they begin alike.
    assert say(second, TURNS[0][0]).tokens == wanted[0][0]
    with pytest.raises(CheckpointError, match=r"cannot be encoded .*full"):
        first.generate(TURNS[0][1])
    answer = say(first, TURNS[0][1])
    assert answer.tokens == wanted[0][1]
    assert answer.restoration.resident == 0
    contexts.store.wait()
    assert contexts.store.verify() == []
