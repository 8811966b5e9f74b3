"""Contexts that begin with the same tokens: their chunks are in memory and on storage once, as long as both
have them."""

import os

import pytest

from jaxllm.contexts.codecs import RAW
from jaxllm.errors import ConfigError
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.engine.request import Session
from tests.serving.contexts.talking import TURNS, answers_without_contexts, damaged, found, new, say

INSTRUCTION = [*range(10, 50)]
PROMPTS = [INSTRUCTION + turns[0][:13] for turns in TURNS]
# Whole chunks of the instruction.
COMMON = len(INSTRUCTION) // 16


def inodes(contexts, context):
    folder = contexts.store.root / f"app-{context.app}" / context.name
    return {path.stat().st_ino for path in folder.glob("*.kv")}


@pytest.fixture
def spoken(kept):
    """Three contexts that have answered a prompt with the same beginning, and what each should say."""
    contexts = kept()
    wanted = [answers_without_contexts(contexts.engine, [each, [7, 8, 9]]) for each in PROMPTS]
    mine, answers = [new(contexts) for _ in PROMPTS], []
    for context, prompt in zip(mine, PROMPTS, strict=True):
        answers.append(say(context, prompt))
        contexts.store.wait()
    assert [each.tokens for each in answers] == [first for first, _ in wanted]
    return contexts, mine, answers, [second for _, second in wanted]


def test_chunks_are_computed_kept_and_stored_once(spoken, kept):
    contexts, mine, answers, wanted = spoken
    assert [each.restoration.shared for each in answers] == [0, COMMON, COMMON]
    assert [each.reused_tokens for each in answers] == [0, 16 * COMMON, 16 * COMMON]
    size, count = contexts._chunk_io[100].chunk_bytes(RAW), len(mine[0].record.bits)
    assert contexts.memory.resident_bytes == (3 * count - 2 * COMMON) * size
    first, *others = (inodes(contexts, each) for each in mine)
    assert all(first & each for each in others)
    # One segment has them, and each has one of its own.
    alone = sum(path.stat().st_size for path in contexts.store.root.rglob("*.kv"))
    assert contexts.store.used_bytes() < alone
    # Each goes on as if it were alone; also from storage, in another process.
    contexts = kept(read=True)
    for context, answer in zip(mine, wanted, strict=True):
        assert say(found(contexts, context), [7, 8, 9]).tokens == answer
    assert contexts.store.verify() == []
    count = len(found(contexts, mine[0]).record.bits)
    assert contexts.memory.resident_bytes == (3 * count - 2 * COMMON) * size


def test_who_stays_keeps_what_another_deletes(spoken, kept):
    contexts, (first, second, third), _, wanted = spoken
    first.delete()
    contexts.memory.forget(second.name)
    assert say(second, [7, 8, 9]).tokens == wanted[1]
    contexts = kept(read=True)
    second = found(contexts, second)
    second.delete()
    assert say(found(contexts, third), [7, 8, 9]).tokens == wanted[2]
    assert contexts.store.verify() == []
    folder = contexts.store.root / "app-mail" / third.name
    assert all(path.stat().st_nlink == 1 for path in folder.glob("*.kv"))


def test_a_chunk_at_fewer_bits_is_ones_own(kept):
    contexts = kept("kivi", ratio=1.0)
    first = new(contexts)
    say(first, PROMPTS[0])
    contexts = kept("kivi", ratio=0.4)
    first, second = found(contexts, first), new(contexts)
    before = first.record
    answer = say(second, PROMPTS[1])
    contexts.store.wait()
    # The other one is as it was, and both are whole.
    assert first.record == before
    assert answer.tokens == answers_without_contexts(contexts.engine, [PROMPTS[1]])[0]
    assert set(before.bits) == {8}
    assert set(second.record.bits) == {2}
    assert not inodes(contexts, first) & inodes(contexts, second)
    assert contexts.store.verify() == []
    contexts = kept("kivi", ratio=1.0)
    for each in (first, second):
        assert len(say(found(contexts, each), [1]).tokens) == 6


def test_chunks_of_fewer_bits_change_no_answer(kept):
    """They are computed, and kept and stored once where they come to the same width."""
    contexts = kept("kivi", ratio=1.0)
    mine = [new(contexts) for _ in range(2)]
    for context, prompt in zip(mine, PROMPTS, strict=False):
        answer = say(context, prompt)
        assert answer.tokens == answers_without_contexts(contexts.engine, [prompt])[0]
        assert answer.restoration.shared == answer.reused_tokens == 0
        contexts.store.wait()
    first, second = mine
    assert inodes(contexts, first) & inodes(contexts, second)
    own = [sum(each.size_bytes for each in contexts.memory.chunks(context.name).values()) for context in mine]
    assert contexts.memory.resident_bytes == sum(own) - COMMON * own[0] // len(first.record.bits)
    # And from storage.
    contexts = kept("kivi", ratio=1.0, read=True)
    for each in mine:
        say(found(contexts, each), [1])
    own = [sum(each.size_bytes for each in contexts.memory.chunks(context.name).values()) for context in mine]
    assert contexts.memory.resident_bytes < sum(own)
    assert contexts.store.verify() == []


def test_other_apps_share_nothing_unless_it_is_allowed(kept):
    contexts = kept()
    mail, calendar = new(contexts), new(contexts, "calendar")
    say(mail, PROMPTS[0])
    contexts.store.wait()
    assert say(calendar, PROMPTS[1]).restoration.shared == 0
    contexts = kept(share_across_apps=True)
    notes = new(contexts, "notes")
    answer = say(notes, PROMPTS[2])
    assert answer.restoration.shared == COMMON
    assert answer.tokens == answers_without_contexts(contexts.engine, [PROMPTS[2]])[0]
    contexts.store.wait()
    assert inodes(contexts, notes) & (inodes(contexts, mail) | inodes(contexts, calendar))
    with pytest.raises(ConfigError, match="share_across_apps requires share_beginnings"):
        ContextOptions(folder="", share_beginnings=False, share_across_apps=True)
    contexts = kept(share_beginnings=False)
    assert say(new(contexts), PROMPTS[0]).restoration.shared == 0


@pytest.mark.parametrize("why", ["encrypted", "no links"])
def test_where_files_cannot_be_shared_memory_is(kept, tmp_path, monkeypatch, why):
    contexts = kept(encryption=tmp_path / "keys" if why == "encrypted" else None)
    if why == "no links":
        monkeypatch.setattr(os, "link", lambda *_, **__: (_ for _ in ()).throw(PermissionError(1, "no")))
    wanted = answers_without_contexts(contexts.engine, [PROMPTS[1], [3]])
    first, second = new(contexts), new(contexts)
    say(first, PROMPTS[0])
    contexts.store.wait()
    answer = say(second, PROMPTS[1])
    assert (answer.restoration.shared, answer.tokens) == (COMMON, wanted[0])
    contexts.store.wait()
    assert not inodes(contexts, first) & inodes(contexts, second)
    assert contexts.store.verify() == []
    contexts = kept(encryption=tmp_path / "keys" if why == "encrypted" else None, read=True)
    assert say(found(contexts, second), [3]).tokens == wanted[1]


@pytest.mark.parametrize("damage", [False, True])
def test_a_beginning_that_memory_lacks_is_read_or_computed(kept, damage):
    """Computed where it is damaged."""
    contexts = kept()
    first = new(contexts)
    say(first, PROMPTS[0])
    contexts.store.wait()
    if damage:
        damaged(contexts, first, 0)
    contexts = kept(read=True)
    answer = say(new(contexts), PROMPTS[1])
    assert answer.tokens == answers_without_contexts(contexts.engine, [PROMPTS[1]])[0]
    assert answer.restoration.shared == (0 if damage else COMMON)
    contexts.store.wait()
    assert contexts.store.verify() == []
    assert all(each.bits for each in contexts.store.records())


def test_who_begins_while_the_other_goes_on_or_away(kept):
    contexts = kept()
    wanted = answers_without_contexts(contexts.engine, [PROMPTS[1], [3]])
    first, second, third = (new(contexts) for _ in range(3))
    say(first, PROMPTS[0])
    answer, other = (each.generate(PROMPTS[1], max_tokens=6, ignore_eos=True) for each in (second, third))
    next(answer)
    next(other)
    say(first, [5] * 20)
    assert answer.result().tokens == wanted[0]
    first.delete()
    assert other.result().tokens == wanted[0]
    contexts.store.wait()
    assert contexts.store.verify() == []
    contexts = kept(read=True)
    for each in (second, third):
        assert say(found(contexts, each), [3]).tokens == wanted[1]


def test_a_call_that_leaves_nothing_leaves_no_chunks(kept):
    contexts = kept()
    first, second = new(contexts), new(contexts)
    say(first, PROMPTS[0])
    turn = contexts.begin(second.record, Session(), prompt_tokens=60, most_tokens=60, prompt=PROMPTS[1])
    assert turn.restoration.shared == COMMON
    assert len(contexts.memory.chunks(second.name)) == COMMON
    contexts.abandon(turn)
    assert contexts._claims.running() == []
    assert contexts.memory.chunks(second.name) == {}
    assert second.tokens == ()
    assert say(second, TURNS[1][0]).tokens == answers_without_contexts(contexts.engine, TURNS[1])[0]
