"""Answers that think before the text of their grammar."""

import dataclasses
import re

import pytest

from jaxllm import EngineOptions, GenerationConfig, Grammar, Sampling, Thought
from jaxllm.errors import ConfigError
from tests.serving.ways import opened

PROMPT = [5, 9, 2, 44, 17, 3, 3, 8]
OPTIONS = EngineOptions(context_tokens=128, chunk_tokens=(16,), cache_tokens=(128,), decode_block=4)
OPENED = Thought(opening="<t>", closing="</t>", opened=True, most_tokens=9)


def answer(engine, kind="regex", text="[ab]{3}", *, thought=OPENED, seed=0, max_tokens=60, **options):
    grammar = Grammar(kind=kind, text=text, thought=thought)
    options = {"max_tokens": max_tokens, "sampling": Sampling(temperature=1.5, seed=seed)} | options
    return engine.generate(PROMPT, GenerationConfig(grammar=grammar, **options))


@pytest.mark.parametrize("options", [{}, {"top_logprobs": 0}], ids=str)
def test_a_thought_is_free_until_its_closing_and_no_longer_than_its_budget(engine, options):
    for seed in range(4):
        found = answer(engine, seed=seed, **options)
        thought, closing, rest = found.text.partition("</t>")
        assert closing
        assert re.fullmatch("[ab]{3}", rest)
        closes = engine.tokenizer.encode("</t>", add_special_tokens=False)
        begins = engine.tokenizer.decode(found.tokens[:9])
        assert found.tokens[9 : 9 + len(closes)] == closes or "</t>" in begins
        assert thought
        assert found.finish_reason == "stop"
    short = answer(engine, thought=dataclasses.replace(OPENED, most_tokens=0), **options)
    assert re.fullmatch("</t>[ab]{3}", short.text)


def test_the_model_may_close_its_thought_itself(engine):
    """In the middle of a block, whose other tokens are dropped: as one token at a time gives."""
    (token,) = engine.tokenizer.encode("o", add_special_tokens=False)
    sampling = Sampling(temperature=1.5, logit_bias=((token, 3.5),))
    thought, lengths = Thought(opening="", closing="o", opened=True), set()
    for seed in range(6):
        grammar = Grammar(kind="regex", text="[ab]{30}", thought=thought)
        config = GenerationConfig(
            max_tokens=110, sampling=dataclasses.replace(sampling, seed=seed), grammar=grammar
        )
        found = engine.generate(PROMPT, config)
        before, _, rest = found.text.partition("o")
        assert re.fullmatch("[ab]{30}", rest), found.text
        assert engine.generate(PROMPT, dataclasses.replace(config, top_logprobs=0)).text == found.text
        lengths.add(len(before))
    assert len(lengths) > 2


def test_an_answer_opens_its_thought_or_does_not(engine):
    """Where the grammar's text may begin like the opening, too."""
    thought, opened_it = Thought(opening="hello", closing="</t>", most_tokens=3), set()
    first = engine.tokenizer.encode("hello", add_special_tokens=False)[0]
    for text in ("[ab]{3}", "hell[ab]{3}|x", "h[ab]{3}"):
        for bias in (0.0, 100.0):
            sampling = Sampling(temperature=1.5, logit_bias=((first, bias),))
            found = answer(engine, text=text, thought=thought, sampling=sampling).text
            rest = found.partition("</t>")[2] if found.startswith("hello") else found
            assert re.fullmatch(text, rest), found
            opened_it.add(found.startswith("hello"))
    assert opened_it == {True, False}


def test_a_free_answer_has_a_budget_of_thought_alone(engine):
    for seed in range(3):
        found = answer(engine, "free", "", seed=seed, ignore_eos=True, max_tokens=50)
        assert "</t>" in engine.tokenizer.decode(found.tokens[:20])
        assert len(found.tokens) == 50
        assert found.finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"closing": ""}, "needs a closing"),
        ({"opening": ""}, "an opening if the prompt does not open it"),
        ({"most_tokens": -1}, "most_tokens must be 0 or more"),
        ({"most_tokens": True}, "most_tokens must be 0 or more"),
        ({"closing": "x" * 300}, "at most 256 characters"),
    ],
)
def test_a_thought_that_cannot_be_followed_is_refused(fields, part):
    with pytest.raises(ConfigError, match=part):
        Thought(**{"opening": "<t>", "closing": "</t>", **fields})
    with pytest.raises(ConfigError, match="needs no grammar unless it has a thought"):
        Grammar(kind="free")


@pytest.mark.parametrize("way", ["int8", pytest.param("streamed", marks=pytest.mark.slow)])
def test_every_runner_thinks_and_compiles_nothing(way, tmp_path, compiles):
    engine = opened(way, tmp_path / "model.jaxllm", OPTIONS)
    with compiles() as count:
        for seed in range(2):
            assert re.fullmatch("[ab]{3}", answer(engine, seed=seed).text.partition("</t>")[2])
        assert count() == 0
    engine.close()
