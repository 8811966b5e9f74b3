"""Forks of contexts, and contexts whose level changes: what stays, and nothing left where a fork fails."""

import pytest

from jaxllm.contexts.recompute import LOST
from jaxllm.errors import BudgetExceeded, ConfigError, ContextGone
from jaxllm.serving.contexts.context import Context, fork
from jaxllm.serving.engine.request import GenerationConfig
from tests.serving.contexts.talking import READ, TURNS, C, begun, found, new, say


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_fork_has_the_beginning_and_its_chunks(kept, tmp_path, encrypted):
    contexts, context, wanted = begun(kept, encryption=tmp_path / "keys" if encrypted else None)
    first = context.record
    say(context, TURNS[0][2])
    before = context.record
    contexts.store.wait()
    used = contexts.store.used_bytes()
    made = fork(contexts, before, len(first.tokens))
    # What both begin with is there once, where files can be shared.
    assert encrypted or contexts.store.used_bytes() - used < 1 << 14
    assert made.name != context.name
    assert (made.tokens, made.origin, made.app) == (first.tokens, first.origin, first.app)
    assert len(made.bits) == len(first.tokens) // C
    assert LOST not in made.bits
    assert context.record.agrees(before)
    # It answers as the context did then, after a restart too, when its chunks come from storage, and when
    # the context is deleted.
    contexts = kept(encryption=tmp_path / "keys" if encrypted else None)
    assert contexts.record("mail", context.name).tokens == before.tokens
    contexts.delete(context.name)
    contexts._delays[100] = READ
    answer = say(found(contexts, Context(contexts, made)), TURNS[0][1])
    assert answer.reused_tokens == len(made.bits) * C
    assert answer.tokens == wanted[1]
    assert contexts.store.verify() == []


def test_chunks_that_are_gone_are_computed_again(kept):
    contexts, context, wanted = begun(kept)
    record = context.record
    context.delete()
    made = fork(contexts, record, len(record.tokens))
    assert set(made.bits) == {LOST}
    assert say(found(contexts, Context(contexts, made)), TURNS[0][1]).tokens == wanted[1]


def test_a_context_at_another_level_has_its_tokens_alone(kept):
    contexts = kept(weights="int8", levels=(50,))
    context = new(contexts, level=50)
    say(context, TURNS[0][0])
    before = context.record
    assert contexts.at_level("mail", context.name, 50) == before
    running = context.generate([1], max_tokens=9, ignore_eos=True)
    next(running)
    with pytest.raises(ConfigError, match="is answering"):
        contexts.at_level("mail", context.name, 100)
    running.close()
    there = contexts.at_level("mail", context.name, 100)
    assert (there.origin.level, there.bits, contexts.memory.chunks(context.name)) == (100, (), {})
    asked = [*there.tokens, *TURNS[0][1]]
    wanted = contexts.engine.stream(asked, GenerationConfig(max_tokens=6, ignore_eos=True)).result()
    answer = say(context, TURNS[0][1])
    assert (answer.reused_tokens, answer.tokens) == (0, wanted.tokens)
    assert contexts.store.verify() == []
    with pytest.raises(ContextGone):
        contexts.at_level("spy", context.name, 50)


def test_nothing_is_left_of_a_fork_that_fails(kept):
    contexts, context, _ = begun(kept, contexts_per_app=1)
    with pytest.raises(BudgetExceeded, match="owns 1 contexts of at most 1"):
        fork(contexts, context.record, 16)
    contexts = kept(quota_bytes=contexts.store.used_bytes() + 2000, share_beginnings=False)
    with pytest.raises(BudgetExceeded, match="raise the quota"):
        fork(contexts, contexts.record("mail", context.name), 32)
    assert [each.name for each in contexts.store.records()] == [context.name]
    assert contexts.store.verify() == []
