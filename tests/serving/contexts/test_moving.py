"""Contexts of another model or of other settings, whose tokens are computed again, and the answer says so;
forks, and contexts whose level changes."""

import pytest

from jaxllm.contexts.recompute import LOST
from jaxllm.errors import BudgetExceeded, ConfigError, ContextGone
from jaxllm.serving.contexts.context import Context, fork
from jaxllm.serving.engine.request import GenerationConfig
from tests.serving.contexts.mutations import change_record, record_document
from tests.serving.contexts.talking import READ, TURNS, C, begun, found, new, say


def answer_of(engine, tokens, count=6, **options):
    config = GenerationConfig(max_tokens=count, ignore_eos=True)
    return engine.stream(list(tokens), config, **options).result().tokens


@pytest.fixture
def spoken(kept):
    """A context with an answer, at the whole model and raw."""
    return begun(kept)[1]


@pytest.mark.parametrize(
    ("settings", "moved"),
    [
        (("kivi",), ("codec",)),
        (("raw", "int8"), ("model", "dtype")),
    ],
)
def test_tokens_go_on_with_other_settings(kept, spoken, settings, moved):
    contexts = kept(*settings)
    context = found(contexts, spoken)
    # Until the call nothing has changed.
    stored = contexts.store.record(context.name)
    assert stored.files
    assert context.tokens == stored.tokens
    wanted = answer_of(contexts.engine, [*context.tokens, *TURNS[0][1]])
    answer = say(context, TURNS[0][1])
    assert answer.tokens == wanted
    assert (answer.restoration.moved, answer.reused_tokens) == (moved, 0)
    contexts.store.wait()
    assert contexts.store.record(context.name).origin == context.record.origin != stored.origin
    assert contexts.store.verify() == []
    again = say(context, TURNS[0][2])
    assert again.restoration.moved == ()
    assert again.reused_tokens


def test_a_level_that_is_not_served_gives_way_to_the_engines_own(kept):
    contexts = kept("raw", "int8", (50,))
    half = new(contexts, level=50)
    say(half, TURNS[0][0])
    # Another bundle, too: one without levels.
    contexts = kept("raw", "int8")
    context = found(contexts, half)
    assert context.level == 100
    answer = say(context, TURNS[0][1])
    assert answer.restoration.moved == ("model", "level")
    assert answer.tokens == answer_of(contexts.engine, context.tokens[:-6])


def test_a_context_that_slides_while_it_moves(kept, spoken):
    contexts = kept("kivi")
    context = found(contexts, spoken)
    answer = context.generate([5] * 100, max_tokens=4, ignore_eos=True, slide=True).result()
    assert answer.restoration.moved == ("codec",)
    assert context.tokens[:16] == tuple(TURNS[0][0][:16])
    assert len(say(context, [1]).tokens) == 6


def test_a_call_that_fails_leaves_the_tokens(kept, spoken):
    contexts = kept("kivi")
    context = found(contexts, spoken)
    before = context.tokens
    answer = context.generate(TURNS[0][1], max_tokens=6)
    contexts.resize(1)
    with pytest.raises(Exception, match="raise the budget"):
        answer.result()
    contexts.resize(1 << 20)
    assert context.tokens == before
    assert len(say(context, TURNS[0][1]).tokens) == 6


def test_tokens_of_another_tokenizer_mean_nothing(kept, spoken):
    """Nor those of an unknown one, unless the model is the same, which has its tokenizer."""
    contexts = kept()
    folder = contexts.store.root / "app-mail" / spoken.name
    contexts.close()
    assert record_document(folder)["tokenizer"]
    for digest, whose in (("other", "another tokenizer: open it with the model"), ("", "does not name")):
        change_record(folder, tokenizer=digest)
        contexts = kept("raw", "int8")
        with pytest.raises(ContextGone, match=whose):
            found(contexts, spoken)
        assert [each.name for each in contexts.store.records("mail")] == [spoken.name]
        contexts.close()
    contexts = kept("kivi")
    answer = say(found(contexts, spoken), TURNS[0][1])
    assert answer.restoration.moved == ("codec",)
    # From here on it is known.
    assert len(say(found(kept("raw", "int8"), spoken), [1]).tokens) == 6


# Forks


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
    # Chunks that are gone are computed again.
    made = fork(contexts, before, len(first.tokens))
    assert set(made.bits) == {LOST}
    assert say(found(contexts, Context(contexts, made)), TURNS[0][1]).tokens == wanted[1]
    assert contexts.store.verify() == []


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
