"""Answers under grammars and with log-probabilities: by every runner, to the bit where paths differ."""

import dataclasses
import json
import math
import re

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm import EngineOptions, GenerationConfig, Grammar, Sampling, Sliding
from jaxllm.errors import ConfigError
from jaxllm.models.decoder import forward, logits
from jaxllm.serving.engine import guided_decoding as guided
from jaxllm.serving.engine.guided_decoding import token_logprob
from jaxllm.serving.guided.matcher import Matcher
from tests.serving.ways import opened

PROMPT = [5, 9, 2, 44, 17, 3, 3, 8]
OPTIONS = EngineOptions(context_tokens=128, chunk_tokens=(16,), cache_tokens=(128,), decode_block=4)
SCHEMA = {
    "type": "object",
    "properties": {
        "hello": {"type": "integer", "minimum": 0, "maximum": 130},
        "mood": {"enum": ["up", "low"]},
    },
    "required": ["hello", "mood"],
    "additionalProperties": False,
}


def config(text, kind="regex", *, seed=0, max_tokens=110, **options):
    sampling = Sampling(temperature=1.5, seed=seed)
    grammar = None if text is None else Grammar(kind=kind, text=text)
    return GenerationConfig(**{"max_tokens": max_tokens, "sampling": sampling, "grammar": grammar, **options})


def require_schema(text):
    value = json.loads(text)
    assert set(value) == {"hello", "mood"}
    assert isinstance(value["hello"], int)
    assert 0 <= value["hello"] <= 130
    assert value["mood"] in ("up", "low")


EXPRESSIONS = st.recursive(
    st.sampled_from(["a", "[0-9]", "x?y", "the", "\\.", "é"]),
    lambda part: st.one_of(
        st.builds("({})({})".format, part, part),
        st.builds("({}|{})".format, part, part),
        st.builds("({}){{1,3}}".format, part),
    ),
    max_leaves=5,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(expression=EXPRESSIONS, seed=st.integers(0, 1000))
def test_an_answer_matches_its_expression(engine, expression, seed):
    answer = engine.generate(PROMPT, config(expression, seed=seed))
    assert answer.finish_reason == "stop"
    assert re.fullmatch(expression, answer.text), (expression, answer.text)


def test_forced_tokens_fed_together_give_what_one_by_one_gives(engine, monkeypatch):
    text = "(no|yes), hello the (cat|dog)[a-z]{2} hello hello hello hello!"
    together = [engine.generate(PROMPT, config(text, seed=seed)) for seed in range(4)]
    limits, limit_of = [], guided.GuidedDecoding.limit

    def one(self, pace, remaining):
        limits.append(limit_of(self, pace, remaining))
        return 1

    monkeypatch.setattr(guided.GuidedDecoding, "limit", one)
    for seed, answer in enumerate(together):
        apart = engine.generate(PROMPT, config(text, seed=seed))
        assert (apart.tokens, apart.text) == (answer.tokens, answer.text)
    assert max(limits) > 8
    # An answer may end by its length in the middle of them.
    monkeypatch.undo()
    cut = engine.generate(PROMPT, config(text, seed=0, max_tokens=5))
    assert (cut.tokens, cut.finish_reason) == (together[0].tokens[:5], "length")


def test_json_is_completed_before_an_answer_reaches_its_length(engine):
    """By max_tokens, or by the window; too few tokens for any text of the schema cut it, as without."""
    schema = json.dumps({"type": "array", "items": {"type": "string"}, "minItems": 2})
    for seed in range(4):
        answer = engine.generate(PROMPT, config(schema, "json_schema", seed=seed, max_tokens=60))
        value = json.loads(answer.text)
        assert len(answer.tokens) <= 60
        assert len(value) >= 2
        assert answer.finish_reason == "length" or len(answer.tokens) < 40
    long = engine.generate(PROMPT, config(schema, "json_schema", seed=1, max_tokens=1000))
    assert json.loads(long.text)
    assert len(long.tokens) <= 128 - len(PROMPT) + 1
    cut = engine.generate(PROMPT, config(schema, "json_schema", max_tokens=3))
    assert cut.finish_reason == "length"
    assert len(cut.tokens) == 3


def test_end_tokens_and_stop_strings(engine):
    """An end token is allowed only where the text may end; a stop token or string ends it as ever."""
    for seed in range(4):
        answer = engine.generate(PROMPT, config("a{3,}", seed=seed, max_tokens=30))
        text = engine.tokenizer.decode(answer.tokens)
        assert re.fullmatch("a{3,}", text)
        endless = engine.generate(PROMPT, config("a{3,}", seed=seed, max_tokens=30, ignore_eos=True))
        assert endless.text == "a" * 30
    comma = engine.tokenizer.encode(",", add_special_tokens=False)[0]
    with pytest.raises(ConfigError, match="no token of the model can go on"):
        engine.generate(PROMPT, config("a,b", stop_token_ids=(comma,)))
    assert engine.generate(PROMPT, config("ab,cd", stop=(",",))).text == "ab"


def test_a_grammar_that_leads_nowhere_is_an_error(engine):
    letter = engine.tokenizer.encode("o", add_special_tokens=False)[0]
    sampling = Sampling(logit_bias=((letter, -math.inf),))
    with pytest.raises(ConfigError, match="logit_bias forbids every token that the grammar allows"):
        engine.generate(PROMPT, config("x hello", sampling=sampling))
    assert engine.generate(PROMPT, config("xo?", sampling=sampling)).text == "x"
    with pytest.raises(ConfigError, match="it matches no text"):
        engine.generate(PROMPT, config('{"$ref": "#"}', "json_schema"))
    optional = {f"p{number}": {"type": "integer"} for number in range(1500)}
    schema = json.dumps({"type": "object", "properties": optional})
    with pytest.raises(ConfigError, match=r"cannot be used.*items"):
        engine.generate(PROMPT, config(schema, "json_schema", ignore_eos=True))


def test_log_probabilities_are_those_of_the_model(engine):
    sampling = Sampling(temperature=1.5, repetition_penalty=1.3, logit_bias=((3, 5.0),), seed=3)
    answer = engine.generate(PROMPT, config(None, sampling=sampling, top_logprobs=4, max_tokens=20))
    sequence = np.array([[*PROMPT, *answer.tokens]], np.int32)
    params = engine.model.bundle.load()
    hidden, _ = forward(params, sequence, cfg=engine.cfg)
    expected = np.asarray(jax.nn.log_softmax(logits(params, hidden, cfg=engine.cfg), axis=-1))[0]
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.tokens)
    for at, each in enumerate(answer.logprobs, len(PROMPT) - 1):
        assert each.token == sequence[0, at + 1]
        np.testing.assert_allclose(each.logprob, expected[at, each.token], atol=1e-4)
        assert [token for token, _ in each.top] == np.argsort(-expected[at], kind="stable")[:4].tolist()
        np.testing.assert_allclose([p for _, p in each.top], np.sort(expected[at])[::-1][:4], atol=1e-4)


def test_log_probabilities_change_no_token(engine):
    greedy = GenerationConfig(max_tokens=60, ignore_eos=True)
    scored = dataclasses.replace(greedy, top_logprobs=0)
    assert engine.generate(PROMPT, scored).tokens == engine.generate(PROMPT, greedy).tokens
    text = json.dumps(SCHEMA)
    plain = engine.generate(PROMPT, config(text, "json_schema"))
    both = engine.generate(PROMPT, config(text, "json_schema", top_logprobs=1))
    assert both.tokens == plain.tokens
    assert plain.logprobs is None


def test_equal_logits_come_by_their_ids():
    found = token_logprob(np.array([0.0, 1.0, 0.0, 1.0, -np.inf], np.float32), 2, 3)
    assert [token for token, _ in found.top] == [1, 3, 0]
    total = math.log(2 + 2 * math.e)
    np.testing.assert_allclose([found.logprob, found.top[0][1]], [-total, 1 - total], rtol=1e-6)


@pytest.mark.parametrize("sliding", [None, Sliding(sink_tokens=4)])
def test_the_window_and_what_slides(engine, sliding):
    many = config("(hello the ){20}[a-z]{80}", max_tokens=400, top_logprobs=0)
    for each in (many, dataclasses.replace(many, top_logprobs=None)):
        answer = engine.stream(PROMPT, each, sliding=sliding).result()
        if sliding is None:
            assert answer.finish_reason == "length"
            assert len(answer.tokens) == engine.options.context_tokens - len(PROMPT) + 1
        else:
            assert answer.finish_reason == "stop"
            assert re.fullmatch("(hello the ){20}[a-z]{80}", answer.text)


@pytest.mark.parametrize("way", ["int8", "streamed", "drafted"])
def test_masks_between_tokens_and_tokens_under_one_mask_give_what_a_mask_for_each_gives(
    way, tmp_path, monkeypatch
):
    """Masks that the device asks for, and tokens that are sampled together, plainly or drafted."""
    engine = opened(way, tmp_path / "model.jaxllm", OPTIONS)
    sequence = {"type": "array", "items": {"enum": ["hello the", "no"]}, "minItems": 4}
    story = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    # Where the model repeats itself, drafts are accepted.
    biased = Sampling(logit_bias=tuple((each, 12.0) for each in range(40, 60)))
    cases = [
        config(json.dumps(schema), "json_schema", seed=seed, max_tokens=most)
        for schema in (SCHEMA, sequence, story)
        for seed in range(2)
        for most in (7, 60)
    ]
    cases += [config("[a-z ]{30,}", seed=seed, max_tokens=60) for seed in range(3)]
    cases += [config(text, max_tokens=60, sampling=biased) for text in ("[a-z ]{30,}", "(?s:.)*")]
    # Masks that become narrower, and samplers for which they must be equal.
    cases += [config("[a-z ]{30,50}", seed=seed, max_tokens=60) for seed in range(3)]
    filters = Sampling(temperature=1.5, top_k=20, top_p=0.9, seed=1)
    cases += [config(text, max_tokens=60, sampling=filters) for text in ("[a-z ]{30,}", "[a-z ]{3,50}")]
    offers, asked, offer = [], [], Matcher.offer

    def offered(self, tokens, jumps, **how):
        (asked if how else offers).append((offer(self, tokens, jumps, **how), len(tokens)))
        return (asked if how else offers)[-1][0]

    def answers(tokens, guides=False):
        with monkeypatch.context() as patch:
            patch.setattr(guided.Chances, "tokens", tokens)
            patch.setattr(Matcher, "offer", offered)
            if not guides:
                patch.setattr(guided.GuidedDecoding, "_can_guide_after", lambda self, row: False)
            found = [engine.generate(PROMPT, each) for each in cases]
        drafted.append(sum(each.drafted_tokens for each in found))
        return [(each.tokens, each.finish_reason) for each in found]

    drafted: list[int] = []
    expected = answers(lambda self, wide, most, one_pass: 1)
    assert not offers
    assert answers(lambda self, wide, most, one_pass: 1, guides=True) == expected
    assert sum(kept for kept, _ in asked) > 200 or way != "int8"
    # Plain text under the last mask, which its own cut.
    assert any(kept < tokens for kept, tokens in asked) or way != "int8"
    assert answers(lambda self, wide, most, one_pass: min(most, 9)) == expected
    assert answers(guided.Chances.tokens) == expected
    # Most tokens of a draft are refused before the grammar is asked.
    assert {kept == tokens for kept, tokens in offers} == ({True} if way == "drafted" else {True, False})
    assert max(kept for kept, _ in offers) > 2
    assert drafted[:2] == [0, 0]
    assert (drafted[2] > 10) == (way == "drafted")
    assert all(len(tokens) <= case.max_tokens for case, (tokens, _) in zip(cases, expected, strict=True))
    engine.close()


@pytest.mark.parametrize(
    "way",
    ["int8", "streamed", *(pytest.param(each, marks=pytest.mark.slow) for each in ("experts", "drafted"))],
)
def test_every_runner_follows_grammars_and_compiles_nothing(way, tmp_path, compiles):
    engine = opened(way, tmp_path / "model.jaxllm", OPTIONS)
    with compiles() as count:
        for seed in range(2):
            each = config(json.dumps(SCHEMA), "json_schema", seed=seed)
            answer = engine.generate(PROMPT, each)
            assert answer.finish_reason == "stop"
            require_schema(answer.text)
            scored = engine.generate(PROMPT, dataclasses.replace(each, top_logprobs=2))
            require_schema(scored.text)
            assert scored.logprobs is not None
            assert len(scored.logprobs) == len(scored.tokens)
        assert engine.request(PROMPT, each).drafted == (way == "drafted")
        assert count() == 0
    engine.close()
