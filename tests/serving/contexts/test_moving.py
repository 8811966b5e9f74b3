"""Contexts of another model or of other settings: their tokens are computed again, and the answer says so."""

import contextlib
import dataclasses

import pytest

from jaxllm import Engine
from jaxllm.errors import ContextGone
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.engine.request import GenerationConfig
from tests.serving.contexts.conftest import CFG, OPTIONS
from tests.serving.contexts.mutations import change_record, record_document
from tests.serving.contexts.talking import TURNS, answers_without_contexts, begun, found, new, say
from tests.tiny import tiny_params, tiny_tokenizer, write_tiny_bundle


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
        pytest.param(("channel", "int8"), ("model", "codec", "dtype"), marks=pytest.mark.campaign),
    ],
)
def test_tokens_go_on_with_other_settings(kept, spoken, settings, moved):
    contexts = kept(*settings)
    context = found(contexts, spoken)
    assert contexts.moving("mail", context.name) == moved
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


def test_a_layout_of_other_kernels_is_computed_again(kept, spoken):
    """As chunks have it where other kernels read them: those of all heads, say, or of a level's alone."""
    contexts = kept()
    origin = {**found(contexts, spoken).record.origin.facts(), "heads": [2, 2, 2]}
    contexts.close()
    change_record(contexts.store.root / "app-mail" / spoken.name, origin=origin)
    contexts = kept()
    answer = say(found(contexts, spoken), TURNS[0][1])
    assert answer.restoration.moved == ("heads",)
    assert answer.tokens == answers_without_contexts(contexts.engine, TURNS[0])[1]


def test_an_empty_context_moves_to_whatever_there_is(kept):
    context = new(kept())
    answer = say(found(kept("kivi"), context), TURNS[0][0])
    assert answer.restoration.moved == ("codec",)


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


def test_tokens_of_another_tokenizer_mean_nothing(kept, spoken, tmp_path):
    """Of an engine of the same weights, with other merges."""
    files = tiny_tokenizer()
    files = dataclasses.replace(files, tokenizer_json=f"{files.tokenizer_json} ")
    path = write_tiny_bundle(tmp_path / "other.jaxllm", cfg=CFG, params=tiny_params(CFG), tokenizer=files)
    engine = Engine.open(path, options=dataclasses.replace(OPTIONS, kv_codec="raw"))
    contexts = kept()
    contexts.close()
    with contextlib.closing(Contexts(engine, contexts.options)) as contexts:
        with pytest.raises(ContextGone, match="its tokens are of another tokenizer: open it with the model"):
            found(contexts, spoken)
        # It is there, and can be deleted.
        assert [each.name for each in contexts.store.records("mail")] == [spoken.name]
        contexts.delete(spoken.name)


def test_records_may_name_no_tokenizer(kept, spoken):
    """Their model has its tokenizer; another model's is not known to be the same."""
    contexts = kept()
    folder = contexts.store.root / "app-mail" / spoken.name
    contexts.close()
    assert record_document(folder)["tokenizer"]
    change_record(folder, tokenizer="")
    with pytest.raises(ContextGone, match="a tokenizer that its record does not name"):
        found(kept("raw", "int8"), spoken)
    contexts = kept("kivi")
    answer = say(found(contexts, spoken), TURNS[0][1])
    assert answer.restoration.moved == ("codec",)
    # From here on it is known.
    assert len(say(found(kept("raw", "int8"), spoken), [1]).tokens) == 6
