"""Tests how long calls of contexts hold what they hold: answers after their service, pins, slides."""

import gc
import logging
import os

import pytest

from jaxllm.contexts.codecs import RAW
from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.serving.contexts.chunk_io import UNMEASURED_READ, measure_read
from jaxllm.serving.contexts.store import ContextStore
from jaxllm.serving.host.direct_io import Storage
from tests.faults import FailingDevice
from tests.serving.contexts.talking import TURNS, answers_without_contexts, new, say


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


def test_nothing_slides_before_an_answer_has_ended(kept):
    contexts = kept()
    context = new(contexts)
    say(context, TURNS[0][0] * 2, 20)
    contexts.store.wait()
    before, prompt = context.record, [5] * 60
    context.generate(prompt, max_tokens=4, slide=True)
    context.generate(prompt, max_tokens=4, slide=True).close()
    assert context.record == before
    answer = context.generate(prompt, max_tokens=4, ignore_eos=True, slide=True)
    next(answer)
    assert context.record == before
    answer.result()
    assert len(context.tokens) < len(before.tokens) + len(prompt)


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


def test_a_full_device_does_not_keep_a_store_from_being_opened(tmp_path, caplog):
    with FailingDevice(tmp_path, 1, persistent=True):
        assert measure_read(tmp_path, Storage()) == UNMEASURED_READ
    assert "250 MB/s and 0.1 ms each are assumed" in caplog.text
    assert measure_read(tmp_path, Storage()) != UNMEASURED_READ
    assert not list(tmp_path.iterdir())


def test_timing_reads_leaves_what_others_have_in_the_folder(tmp_path):
    (tmp_path / "meant").write_text("mine")
    (tmp_path / ".timed").symlink_to("meant")
    (tmp_path / "timed").write_text("mine")
    measure_read(tmp_path, Storage())
    assert sorted(os.listdir(tmp_path)) == [".timed", "meant", "timed"]
    assert (tmp_path / ".timed").read_text() == (tmp_path / "timed").read_text() == "mine"


def test_less_memory_evicts_and_loses_nothing(kept):
    contexts = kept()
    size = contexts._chunk_io[100].chunk_bytes(RAW)
    wanted = [answers_without_contexts(contexts.engine, turns) for turns in TURNS]
    mine = [new(contexts) for _ in TURNS]
    for context, turns in zip(mine, TURNS, strict=True):
        say(context, turns[0])
    assert contexts.memory.resident_bytes > 5 * size
    contexts.resize(5 * size)
    assert contexts.memory.resident_bytes <= contexts.memory.budget_bytes == 5 * size
    assert contexts.options.budget_bytes == 5 * size
    for turn in (1, 2):
        for context, turns, answers in zip(mine, TURNS, wanted, strict=True):
            assert say(context, turns[turn]).tokens == answers[turn]
            assert contexts.memory.resident_bytes <= 5 * size
    contexts.resize(50 * size)
    before = contexts.memory.evicted
    for context in mine:
        say(context, [1])
    assert contexts.memory.evicted == before


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


def test_what_is_no_budget_is_refused(kept):
    contexts = kept()
    for budget in (0, -1, 1.5, "1MB", True, None):
        with pytest.raises(ConfigError, match="budget_bytes must be a whole number of at least 1"):
            contexts.resize(budget)
