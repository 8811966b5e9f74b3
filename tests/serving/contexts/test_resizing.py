"""The memory of contexts that changes while they run."""

import pytest

from jaxllm.contexts.codecs import RAW
from jaxllm.errors import BudgetExceeded, ConfigError
from tests.serving.contexts.talking import TURNS, answers_without_contexts, new, say


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
