"""Work while nothing runs: the next context is prefetched into free memory, narrow chunks are widened."""

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.kv.codecs import RAW
from serving.contexts.idle import IdleContexts
from serving.contexts.options import ContextOptions
from serving.runners.runner import prefill_prompt
from tests.serving.contexts.talking import READ, TURNS, answers_without_contexts, new, say


def idle_for(contexts, **options):
    contexts._idle = IdleContexts(contexts, hour=lambda: 9, **options)
    return contexts


def worked(contexts):
    contexts.store.wait()
    count = 0
    while contexts.idle():
        count += 1
        contexts.store.wait()
    return count


def cycled(contexts, rounds=3):
    """Three contexts that were called in turns, the first of which comes next; its chunks are on storage."""
    mine = [new(contexts) for _ in range(3)]
    for turn in range(rounds):
        for context in mine:
            say(context, TURNS[0][turn % 2] if turn else [*TURNS[0][0], *TURNS[1][0]], 2)
    contexts.store.wait()
    contexts.memory.cut(mine[0].name, 0)
    return mine


def test_the_next_context_is_there_before_it_is_called(kept):
    contexts = idle_for(kept(idle_work="always", share_beginnings=False))
    first, second, _ = cycled(contexts)
    held = len(first.record.bits)
    contexts.memory.cut(second.name, 2)
    assert worked(contexts) >= 2
    assert contexts.idle_figures.prefetched == held + len(second.record.bits) - 2
    assert set(contexts.memory.chunks(first.name)) == set(range(held))
    # It was not asked for: it leaves first.
    assert {each.used for each in contexts.memory.chunks(first.name).values()} == {0}
    # Each blob keeps its own memory alone, not that of all that were read together.
    blobs = [blob for each in contexts.memory.chunks(first.name).values() for blob in each.blobs]
    assert all(blob.base.nbytes - blob.nbytes <= 64 and blob.ctypes.data % 64 == 0 for blob in blobs)
    tokens = list(first.tokens)
    said = say(first, [3, 4, 5])
    assert said.restoration.resident == held
    assert said.tokens == answers_without_contexts(contexts.engine, [[*tokens, 3, 4, 5]])[0]


def test_only_free_memory_is_taken(kept):
    size = kept()._chunk_io[100].chunk_bytes(RAW)
    contexts = idle_for(kept(idle_work="always", share_beginnings=False))
    first, second, third = cycled(contexts)
    there = {each.name: set(contexts.memory.chunks(each.name)) for each in (second, third)}
    contexts.memory.budget_bytes = contexts.memory.resident_bytes + 2 * size + size // 2
    worked(contexts)
    assert set(contexts.memory.chunks(first.name)) == {0, 1}
    assert {each.name: set(contexts.memory.chunks(each.name)) for each in (second, third)} == there
    assert contexts.memory.evicted == 0


def test_a_service_begins_with_what_was_used_last(kept):
    contexts = kept(share_beginnings=False)
    first, second, third = cycled(contexts)
    size = contexts._chunk_io[100].chunk_bytes(RAW)
    held = len(third.record.bits)
    say(second, [4], 1)
    contexts = kept(idle_work="always", budget_bytes=held * size)
    assert worked(contexts)
    assert contexts.memory.contexts() == [second.name]
    assert contexts.memory.chunks(first.name) == {}


@pytest.mark.parametrize(
    ("when", "battery", "works"),
    [("always", True, True), ("on-mains", True, False), ("on-mains", False, True), ("never", False, False)],
)
def test_a_battery_is_not_emptied_by_default(kept, when, battery, works):
    contexts = idle_for(kept(idle_work=when, share_beginnings=False), battery=lambda: battery)
    cycled(contexts)
    assert bool(worked(contexts)) == works


def test_nothing_is_done_beside_an_answer_or_for_what_is_gone(kept):
    contexts = idle_for(kept(idle_work="always", share_beginnings=False))
    first, second, _ = cycled(contexts)
    answer = second.generate([1, 2, 3], max_tokens=3)
    next(answer)
    assert not contexts.idle()
    answer.close()
    first.delete()
    worked(contexts)
    assert contexts.memory.chunks(first.name) == {}
    # What cannot be read is left to the context's next call.
    contexts.store.wait()
    contexts.memory.cut(second.name, 0)
    for path in (contexts.store.root / "app-mail" / second.name).glob("*.kv"):
        path.write_bytes(path.read_bytes()[:-4096] + bytes(4096))
    worked(contexts)
    assert say(second, [1, 2], 1).tokens


def test_chunks_that_are_attended_to_again_are_widened(kept):
    """They are computed from their tokens: nearer to what a prefill gives than what they were stored at."""
    contexts = kept("kivi", ratio=0.4, newest_chunks=0, idle_work="always", share_beginnings=False)
    context, tokens = new(contexts), (TURNS[0][0] + TURNS[1][0] + TURNS[2][0])[:80]
    say(context, tokens, 2)
    assert context.record.bits == (2,) * 5
    name = context.name
    contexts = idle_for(kept("kivi", ratio=0.6, newest_chunks=0, idle_work="always", share_beginnings=False))
    contexts._delays[100] = READ
    context = type(context)(contexts, contexts.record("mail", name))
    for _ in range(3):
        say(context, [7], 1)
    narrow = decoded(contexts, context)
    assert set(context.record.bits) == {2}
    before = context.record
    assert worked(contexts)
    after = context.record
    wider = [n for n, bits in enumerate(after.bits) if bits > 2]
    assert wider
    assert contexts.idle_figures.widened == len(wider)
    assert (after.tokens, after.mass) == (before.tokens, before.mass)
    size = contexts._chunk_io[100].chunk_bytes
    assert sum(map(size, after.bits)) <= contexts.chunk_bytes(after)
    assert contexts.store.verify() == []
    exact = rows(contexts, prefill_prompt(
        contexts.engine.runner, contexts.engine.runner.start(128), list(after.tokens), 0
    )[1], 80)  # fmt: skip
    wide = decoded(contexts, context)
    for n in wider:
        own = np.s_[..., 16 * n : 16 * n + 16, :]
        assert np.abs(wide[own] - exact[own]).mean() < np.abs(narrow[own] - exact[own]).mean()
    # What memory has is what storage has, and the answer goes on.
    held = contexts.memory.chunks(name)
    assert tuple(held[n].bits for n in range(len(after.bits))) == after.bits
    assert len(say(context, [9], 3).tokens) == 3


def rows(contexts, cache, count):
    return np.asarray(cache.keys[0], np.float32)[..., :count, :]


def decoded(contexts, context):
    """The keys of a context's chunks, as they are stored."""
    contexts.store.wait()
    chunk_io, record = contexts._chunk_io[100], contexts.store.record(context.name)
    stored, every = contexts.store.open(context.name), range(len(record.bits))
    blobs = [stored.read(layer, [*every]) for layer in range(chunk_io.layers)]
    chunks = {n: (record.bits[n], [layer[n] for layer in blobs]) for n in every}
    return rows(contexts, chunk_io.load(chunk_io.runner.start(128), chunks), 80)


def test_options_are_checked(tmp_path):
    with pytest.raises(ConfigError, match="idle_work"):
        ContextOptions(folder=tmp_path, idle_work="sometimes")  # pyright: ignore[reportArgumentType]
