"""Tests the support of words for an answer: against differences of losses, and labels by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.elastic.compression import NO_WORD
from jaxllm.elastic.ladder import Ladder
from jaxllm.errors import ConfigError
from jaxllm.models import decoder
from jaxllm.tasks.example import TaskExample
from jaxllm.tasks.questions import Question, branching
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.training.elastic.tiny_lm.self_labels import ElasticModel
from jaxllm.training.elastic.tiny_lm.start import Start
from jaxllm.training.elastic.tiny_lm.word_labels import question_score_rows, token_support
from tests.tiny import TINY, random_params, tiny_tokenizer
from tests.training.tiny_runs import TLM_RECIPE

# Its head is a table of its own, so that a token's embedding can be changed by itself.
CFG = dataclasses.replace(TINY, layers=1, attention_windows=(), tied_head=False)
TOKENIZER = Tokenizer(tiny_tokenizer())


@functools.cache
def model():
    params = {name: jnp.asarray(value) * np.float32(0.3) for name, value in random_params(CFG).items()}
    return ElasticModel(cfg=CFG, params=params, ladder=Ladder(levels=(100,)), tokenizer=TOKENIZER)


def question(user, system="Is it?"):
    return Question.read(
        TOKENIZER, TaskExample(system=system, user=user, answer="yes", options=("not", "yes"))
    )


@pytest.mark.slow
def test_support_adds_up_to_what_all_words_change():
    """Completeness (arXiv 1703.01365, proposition 1)."""
    asked = [question(user) for user in ("he is well", "a hill of them " * 8)]
    seen = []
    found = token_support(model(), asked, steps=64, on_measured=lambda *call: seen.append(call))
    assert seen[-1] == (2, 2)
    table = model().params["embed.tokens"]
    for each, support in zip(asked, found, strict=True):
        assert support.shape == each.prompt.ids.shape
        assert not support[each.prompt.forced].any()
        both = branching(TOKENIZER, each.example)
        ids = jnp.array([*both.trunk, *both.branches[1]])
        free = jnp.append(~each.prompt.forced[: len(both.trunk)], jnp.zeros(len(both.branches[1]), bool))
        whole, without = (
            loss(jnp.where(chosen[:, None], table.mean(0), table[ids]), ids, len(both.branches[1]))
            for chosen in (jnp.zeros(len(ids), bool), free)
        )
        assert abs(without - whole) > 0.01
        np.testing.assert_allclose(support.sum(), without - whole, rtol=0.01, atol=1e-4)


def loss(embedded, ids, answer):
    """Of the right answer, in nats, of tokens with these embeddings."""
    places = jnp.arange(len(ids), dtype=jnp.int32)
    hidden = decoder.forward_documents({**model().params, "embed.tokens": embedded}, places[None], cfg=CFG)
    likely = np.asarray(jax.nn.log_softmax(decoder.logits(model().params, hidden, cfg=CFG)[0]), np.float64)
    scored = np.arange(len(ids) - answer, len(ids))
    return -likely[scored - 1, np.asarray(ids)[scored]].sum()


def test_words_are_labelled_by_what_they_say_beside_the_most():
    asked = question("he is well again")
    words, forced = asked.prompt.words, asked.prompt.forced
    free = words[~forced & (words != NO_WORD)]
    says = dict(zip(sorted(set(free.tolist())), (0.2, 0.8, -0.5, 0.4), strict=True))
    # What must stay says most, and is no word to choose.
    support = np.array([says.get(word, 5.0) for word in words.tolist()])
    reader = Start.of(TLM_RECIPE, TOKENIZER).reader(64)
    rows = question_score_rows([asked], [support], reader, source=3, weight=2.0)
    counted = rows.weights > 0
    assert (rows.sources == 3).all()
    assert set(rows.weights[counted].tolist()) == {2.0}
    assert TOKENIZER.decode(rows.tokens[counted].tolist()).split() == ["he", "is", "well", "again"]
    labels = dict(zip(says, (0.25, 1.0, 0.0, 0.5), strict=True))
    np.testing.assert_allclose(rows.labels[counted], [labels[word] for word in free.tolist()], rtol=1e-6)
    # Nothing that speaks for the answer: nothing to keep.
    silent = question_score_rows([asked], [-np.abs(support)], reader, source=3)
    assert (silent.weights > 0).sum() == counted.sum()
    assert not silent.labels.any()


def test_questions_that_teach_nothing_are_refused():
    reader = Start.of(TLM_RECIPE, TOKENIZER).reader(64)
    alone = question("well")
    with pytest.raises(ConfigError, match="no question has words to choose from"):
        question_score_rows([alone], [np.ones(len(alone.prompt.ids))], reader, source=0)
    with pytest.raises(ConfigError, match="the model reads 32"):
        token_support(
            dataclasses.replace(model(), cfg=dataclasses.replace(CFG, window_tokens=32)),
            [question("a b " * 20)],
        )
    broken = {name: value * jnp.nan for name, value in model().params.items()}
    with pytest.raises(ConfigError, match="not finite"):
        token_support(dataclasses.replace(model(), params=broken), [alone])
