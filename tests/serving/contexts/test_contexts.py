"""Contexts of apps: their calls go on as one conversation, whatever ran in between and whatever was lost; and
how long they hold what they hold: answers after their service, pins, slides."""

import dataclasses
import gc
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxllm.contexts.codecs import RAW
from jaxllm.contexts.recompute import LOST
from jaxllm.contexts.tolerance import sightings
from jaxllm.errors import BudgetExceeded, ConfigError, ContextOverflow
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.memory import UNMEASURED_READ, measure_read
from jaxllm.serving.contexts.store import ContextStore
from jaxllm.serving.engine.request import GenerationConfig, Sliding
from jaxllm.serving.engine.step import step
from jaxllm.serving.host.storage import Storage
from tests.faults import FailingDevice
from tests.serving.contexts.talking import TURNS, C, answers_without_contexts, begun, damaged, found, new, say

ROOT = Path(__file__).parents[3]


# Going on


def test_calls_are_one_conversation_whatever_ran_between(kept, compiles):
    """Token for token, with chunks as they are: three contexts by turns, and after each a fresh memory."""
    contexts = kept()
    wanted = [answers_without_contexts(contexts.engine, turns) for turns in TURNS]
    mine = [new(contexts) for _ in TURNS]
    with compiles() as count:
        for turn in range(3):
            for context, turns, answers in zip(mine, TURNS, wanted, strict=True):
                answer = say(context, turns[turn])
                assert answer.tokens == answers[turn]
                # What is cached is what was saved.
                saved = (37 + 6 - 1) // C if turn == 1 else (37 + 6 + 5 + 6 - 1) // C
                if turn:
                    assert answer.reused_tokens == saved * C
                    assert answer.restoration.resident == saved
        assert count() == 0
    # The one that ran last is still there: all but the last token, whole chunks or not.
    last = say(mine[-1], [1])
    assert last.reused_tokens == len(mine[-1].tokens) - 6 - 1 - 1
    contexts = kept()
    for context, turns, answers in zip(mine, TURNS, wanted, strict=True):
        said = zip(turns, answers, strict=True)
        told = tuple(t for pair in said for part in pair for t in part)
        more = (1, *last.tokens) if context is mine[-1] else ()
        assert found(contexts, context).tokens == (*told, *more)


@pytest.mark.slow
def test_a_fresh_process_goes_on_token_for_token(kept, tmp_path):
    """And ends without a word, although an answer is left that nobody ended: its tokens are kept."""
    contexts, context, wanted = begun(kept)
    contexts.close()
    code = f"""
import json
from jaxllm import Engine
from jaxllm.serving.contexts.context import Context
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.host.storage import Storage
from jaxllm.serving.ground.expert_options import ExpertOptions
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.int8_prefill_options import PrefillOptions
engine = Engine.open({str(contexts.engine.model.bundle.path)!r}, options={contexts.engine.options!r})
contexts = Contexts(engine, ContextOptions(folder={str(tmp_path / "store")!r}))
context = Context(contexts, contexts.record("mail", {context.name!r}))
answer = context.generate({TURNS[0][1]!r}, max_tokens=6, ignore_eos=True).result()
how = answer.restoration
print(json.dumps([answer.tokens, answer.reused_tokens, len(how.read + how.computed)]))
left = Context(contexts, contexts.create("calendar")).generate([5] * 40, max_tokens=20, ignore_eos=True)
next(left)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [wanted[1], 2 * C, 2]
    with ContextStore(tmp_path / "store") as store:
        assert len(store.records("calendar")[0].tokens) > 40
        assert store.verify() == []


def test_a_context_slides_past_the_window(kept):
    """Its first chunk stays where it is, its newest tokens are computed where they come to stand."""
    contexts = kept()
    context = new(contexts)
    said = say(context, TURNS[0][0] * 2, 20).tokens
    before = context.tokens
    assert before == (*TURNS[0][0], *TURNS[0][0], *said)
    with pytest.raises(ContextOverflow):
        say(context, TURNS[1][0])
    assert context.tokens == before
    # Nothing slides before an answer has ended.
    context.generate(TURNS[1][0], max_tokens=4, slide=True).close()
    dropped = context.generate(TURNS[1][0], max_tokens=4, slide=True)
    assert context.tokens == before
    del dropped
    # Of 128 there is room for 91 before; half of 128 are kept.
    answer = context.generate(TURNS[1][0], max_tokens=4, ignore_eos=True, slide=True).result()
    wanted = [*before[:C], *before[-48:], *TURNS[1][0]]
    config = GenerationConfig(max_tokens=4, ignore_eos=True)
    assert answer.tokens == contexts.engine.generate(wanted, config).tokens
    assert answer.reused_tokens == C
    assert context.tokens == (*wanted, *answer.tokens)
    assert len(context.record.bits) == len(context.tokens[:-1]) // C
    assert contexts.store.verify() == []
    # Where there is room nothing slides.
    context.generate([1], max_tokens=1, slide=True).result()
    assert context.tokens[: len(wanted)] == tuple(wanted)


# Compression


def share_of(contexts, bits):
    """Bytes of chunks in memory as they are, scales and all, relative to those that ratios are counted by."""
    chunk_io = contexts._chunk_io[100]
    return sum(map(chunk_io.chunk_bytes, bits)) / (len(bits) * chunk_io.reference_bytes)


def test_widths_follow_the_ratio_and_never_rise(kept):
    contexts = kept("kivi", ratio=0.5)
    context, before = new(contexts), ()
    for turn in ([*range(70)], [5] * 9, [7] * 9, [9] * 9):
        say(context, turn, 3)
        record = context.record
        assert share_of(contexts, record.bits) <= 0.5
        assert all(new <= old for new, old in zip(record.bits, before, strict=False))
        # How many chunks the newest one's width would leave no room for is not asked of so few.
        assert record.bits[-1] == max(record.bits[len(before) :], default=record.bits[-1])
        density = np.array(record.mass) / record.seen
        assert np.all((density > 0) & (density < 1))
        # What is in memory is what is stored.
        resident = contexts.memory.chunks(context.name)
        assert [resident[n].bits for n in sorted(resident)] == list(record.bits)
        wanted = share_of(contexts, record.bits) * contexts._chunk_io[100].reference_bytes
        assert sum(each.size_bytes for each in resident.values()) == pytest.approx(wanted * len(record.bits))
        before = record.bits
    assert len(set(before)) > 1


def test_a_ratio_that_scales_leave_no_room_for_is_refused(kept):
    with pytest.raises(ConfigError, match=r"a ratio of 0\.39 is less than 0\.4, which chunks take at 2 bits"):
        kept("kivi", ratio=0.39)


def test_compressed_contexts_come_back_alike(kept):
    """From memory, and from storage over many files that were put together."""
    contexts = kept("channel", ratio=0.75)
    one, same, other = (new(contexts) for _ in range(3))
    for turn in range(10):
        for context in (one, same):
            say(context, [turn + 1] * 5, 3)
        assert len(one.record.segments) <= 8
    assert one.record.bits == same.record.bits
    assert len(set(one.record.bits)) > 1
    say(other, [1], 1)
    first = say(one, [3], 8)
    assert first.restoration.resident == (10 * 8 - 1) // C
    contexts = kept("channel", ratio=0.75, read=True)
    again = say(found(contexts, same), [3], 8)
    assert len(again.restoration.read) == (10 * 8 - 1) // C
    assert again.tokens == first.tokens


# How long


def test_answers_and_contexts_end_with_their_service(kept):
    contexts = kept()
    context = new(contexts)
    answer = context.generate(TURNS[0][0], max_tokens=40, ignore_eos=True)
    late = context.generate([1])
    next(answer)
    contexts.close()
    with pytest.raises(ConfigError, match="was ended by its service; its tokens so far are kept"):
        next(answer)
    for use in (lambda: next(late), lambda: context.generate([1]), context.pin, context.delete):
        with pytest.raises(ConfigError, match="was closed"):
            use()
    with ContextStore(contexts.store.root) as store:
        assert store.record(context.name).tokens == (*TURNS[0][0], *answer.tokens)


def test_a_dropped_answer_that_cannot_be_kept_is_told_of(kept, monkeypatch, caplog):
    contexts = kept()
    context = new(contexts)

    def full(*_, **__):
        raise BudgetExceeded("there is no room")

    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING, "jaxllm"):
        broken.setattr(contexts.store, "note", full)
        next(context.generate(TURNS[0][0], max_tokens=40, ignore_eos=True))
        gc.collect()
    assert "could not be kept when it was dropped: there is no room" in caplog.text
    with pytest.raises(BudgetExceeded, match="could not be kept when it was dropped"):
        context.generate([1])
    assert len(say(context, [1]).tokens) == 6


def test_pins_leave_room_for_others(kept):
    size = kept()._chunk_io[100].chunk_bytes(RAW)
    contexts = kept(budget_bytes=12 * size)
    say(new(contexts, "greedy", pinned=True), [1] * 70, 1)
    second = new(contexts, "greedy", pinned=True)
    with pytest.raises(BudgetExceeded, match=r"pinned contexts of greedy may take .*app_pinned_share"):
        say(second, [1] * 70, 1)
    assert len(say(new(contexts, "victim"), [1] * 110, 1).tokens) == 1
    second.pin(False)
    assert len(say(second, [1] * 70, 1).tokens) == 1
    with pytest.raises(BudgetExceeded, match="may take"):
        second.pin()


def test_reads_are_timed_and_a_full_device_does_not_keep_a_store_from_being_opened(tmp_path, caplog):
    """What others have in the folder stays."""
    with FailingDevice(tmp_path, 1, persistent=True):
        assert measure_read(tmp_path, Storage()) == UNMEASURED_READ
    assert "250 MB/s and 0.1 ms each are assumed" in caplog.text
    (tmp_path / "meant").write_text("mine")
    (tmp_path / ".timed").symlink_to("meant")
    (tmp_path / "timed").write_text("mine")
    assert measure_read(tmp_path, Storage()) != UNMEASURED_READ
    assert sorted(os.listdir(tmp_path)) == [".timed", "meant", "timed"]
    assert (tmp_path / ".timed").read_text() == (tmp_path / "timed").read_text() == "mine"


def test_a_budget_below_what_runs_or_is_pinned_is_refused(kept):
    contexts = kept()
    size = contexts._chunk_io[100].chunk_bytes(RAW)
    context, pinned = new(contexts), new(contexts, pinned=True)
    say(pinned, TURNS[1][0])
    held = len(pinned.record.bits) * size
    answer = context.generate(TURNS[0][0], max_tokens=30, ignore_eos=True)
    next(answer)
    before = contexts.memory.budget_bytes
    # It grows to 37 + 30 tokens: 4 chunks.
    with pytest.raises(
        BudgetExceeded, match=r"run or are pinned may take .*; close their answers, unpin some"
    ):
        contexts.resize(4 * size + held - 1)
    assert contexts.memory.budget_bytes == contexts.options.budget_bytes == before
    contexts.resize(4 * size + held + 1)
    assert len(answer.result().tokens) == 30
    assert len(contexts.memory.chunks(context.name)) == 4
    with pytest.raises(BudgetExceeded):
        contexts.resize(1)
    pinned.pin(False)
    contexts.resize(size)
    # Now it is the call that does not fit.
    with pytest.raises(BudgetExceeded, match="raise the budget"):
        say(context, [1])


# What fails: nothing older is lost, and all of it is told


@pytest.mark.parametrize("layer", [0, 2, "gone"])
def test_a_corrupt_chunk_is_computed_from_the_text(kept, layer):
    """In whichever layer; and where the segment is gone."""
    contexts, context, wanted = begun(kept)
    if layer == "gone":
        contexts.store.wait()
        (contexts.store.root / "app-mail" / context.name / "0.kv").unlink()
    else:
        damaged(contexts, context, 1, layer)
    contexts = kept(read=True)
    context = found(contexts, context)
    answer = say(context, TURNS[0][1])
    how = ((), (0, 1)) if layer == "gone" else ((0,), (1,))
    assert (answer.restoration.read, answer.restoration.computed) == how
    assert answer.tokens == wanted[1]
    # And is whole on storage from now on.
    assert LOST not in context.record.bits
    assert contexts.store.verify() == []
    contexts = kept()
    assert say(found(contexts, context), TURNS[0][2]).tokens == wanted[2]


def test_one_call_at_a_time_runs_in_a_context(kept):
    contexts = kept()
    first = new(contexts)
    running = first.generate(TURNS[0][0], max_tokens=9, ignore_eos=True)
    next(running)
    with pytest.raises(ConfigError, match="one call at a time runs in it"):
        say(first, [1])
    with pytest.raises(ConfigError, match="is answering; close its answer"):
        first.delete()
    late = first.generate([1])
    running.result()
    with pytest.raises(ConfigError, match="went on since"):
        next(late)
    assert len(say(first, [1]).tokens) == 6


def test_calls_of_different_contexts_take_turns(kept):
    contexts = kept()
    wanted = [answers_without_contexts(contexts.engine, turns) for turns in TURNS]
    there = [new(contexts) for _ in TURNS]
    for number in range(3):
        running = [
            each.generate(turns[number], max_tokens=6, ignore_eos=True)
            for each, turns in zip(there, TURNS, strict=True)
        ]
        while any(each.stage != "ended" for each in running):
            step(*(each for each in running if each.stage != "ended"))
        assert [each.tokens for each in running] == [each[number] for each in wanted]
    # Those that are dropped or stopped in the middle keep their tokens, and unlock their contexts.
    running = [each.generate([1, 2], max_tokens=40, ignore_eos=True) for each in there]
    for each in running:
        next(each)
    del running[0], each
    contexts.stop()
    with pytest.raises(ConfigError, match="ended by its service"):
        running[0].result()
    for each, turns in zip(there, TURNS, strict=True):
        assert len(each.tokens) > sum(map(len, turns)) + 3 * 6 + 2
        assert len(say(each, [1]).tokens) == 6
    assert contexts.memory.kept_bytes == 0


def test_bad_input_is_refused(kept, engine_of):
    contexts = kept(contexts_per_app=1)
    context = new(contexts)
    with pytest.raises(BudgetExceeded, match="owns 1 contexts of at most 1"):
        new(contexts)
    with pytest.raises(ConfigError, match="level 70 is not served"):
        new(contexts, "calendar", level=70)
    for prompt in ([], "", "  "):
        with pytest.raises(ConfigError, match="the prompt is empty"):
            context.generate(prompt)
    with pytest.raises(ConfigError, match="an instruction comes with"):
        context.generate([1], instruction="Be short.")
    with pytest.raises(ContextOverflow):
        context.generate([1] * 129)
    with pytest.raises(ConfigError, match="no eviction policy"):
        dataclasses.replace(contexts.options, policy="random")
    plain = type("Plain", (), {"options": dataclasses.replace(contexts.engine.options, kv_codec="")})()
    with pytest.raises(ConfigError, match="keeps no contexts"):
        Contexts(plain, contexts.options)


# Answers that outgrow the window go on, and what is kept of them is what a prefill of it gives


PROMPT = TURNS[0][0]


def reference(engine, prompt, count, sinks):
    """What is answered if every slide is a new request, and the sequence that is left."""
    window, sequence, said = engine.options.context_tokens, list(prompt), []
    while True:
        room = min(count - len(said), window - len(sequence) + 1)
        config = GenerationConfig(max_tokens=room, ignore_eos=True)
        fresh = engine.generate(sequence, config).tokens
        said, sequence = said + fresh, sequence + fresh
        if len(said) == count:
            return said, sequence
        sequence = sequence[:sinks] + sequence[-(window // 2 - sinks) :]


def test_sinks_that_leave_no_room_are_refused(engine_of):
    for sinks in (-1, 63):
        with pytest.raises(ConfigError, match="tokens cannot stay"):
            engine_of("raw").stream(PROMPT, sliding=Sliding(sink_tokens=sinks))


def test_a_context_that_slid_in_an_answer_goes_on_after_a_restart(kept, compiles):
    """Token for token after several slides, and each chunk's attention is counted where it stood."""
    contexts = kept()
    context, engine = new(contexts), contexts.engine
    said, sequence = reference(engine, PROMPT, 230, C)
    with compiles() as count:
        answer = context.generate(PROMPT, max_tokens=230, ignore_eos=True, slide=True).result()
        assert count() == 0
    assert answer.tokens == said
    assert context.tokens == tuple(sequence)
    record, held = context.record, len(sequence) - 1
    assert len(record.bits) == held // C
    assert sorted(contexts.memory.chunks(context.name)) == [*range(held // C)]
    assert contexts.store.verify() == []

    cfg = engine.cfg
    model = dict(heads=[cfg.heads] * cfg.layers, windows=cfg.attention_windows)
    # 37 and 92 of 230 fill the window; each time 64 stay, and 65 more fill it again.
    last = sightings(C, held, held // C, C, **model)
    whole = [sightings(first, 128, 1, C, **model)[0] for first in (0, C, C)]
    assert record.seen == pytest.approx([last[0] + sum(whole), *last[1:]])
    density = np.array(record.mass) / record.seen
    assert np.all((density > 0) & (density < 1))

    contexts = kept()
    later = say(found(contexts, context), TURNS[0][1])
    config = GenerationConfig(max_tokens=6, ignore_eos=True)
    assert later.tokens == engine.generate([*sequence, *TURNS[0][1]], config).tokens
    assert later.reused_tokens == held // C * C
