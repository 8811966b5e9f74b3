"""Sampling against a sorting oracle and transformers' processors; refusals of bad requests."""

import dataclasses
import math

import chex
import jax
import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxllm.errors import ConfigError
from jaxllm.sampling import (
    MAX_BIAS,
    MAX_LOGIT_BIASES,
    Sampling,
    filtered,
    keep_top_p,
    penalize,
    sample,
    sampler_state,
)
from tests.quick_jit import jit
from tests.variants import every_variant

V = 8
DIMS = chex.Dimensions(B=1, V=V)
sample_jit, top_p_jit = jit(sample), jit(keep_top_p)


def drawn_from(logits, state):
    """What `sample` draws from: penalties, temperature, filters."""
    return filtered(penalize(logits, state) / state.temperature, state)


kept_logits = jit(drawn_from)


def state_of(prompt=(), answer=(), *, vocab=V, seed=0, **sampling):
    state = sampler_state(Sampling(**sampling), prompt, vocab, seed)
    counts = np.bincount(answer, minlength=vocab).astype(np.int32) if answer else state.counts[0]
    return dataclasses.replace(state, counts=counts[None])


def normal(*shape, seed=0):
    return (3 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def softmax(logits):
    logits = np.asarray(logits, np.float64)
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


@every_variant
@pytest.mark.parametrize("seed", range(5))
def test_default_is_greedy(seed, variant):
    logits, state = normal(*DIMS["BV"], seed=seed), state_of(seed=seed)
    token, after = variant(sample)(logits, state)
    assert token.tolist() == [logits.argmax()]
    chex.assert_shape(token, DIMS["B"])
    chex.assert_type(token, np.int32)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    assert int(after.drawn) == 1
    assert after.counts[0].tolist() == [int(i == logits.argmax()) for i in range(V)]


def test_bias_decides_and_forbids():
    logits = np.zeros((1, V), np.float32)
    logits[0, :3] = 5.0, 4.0, 3.0

    def chosen(*bias):
        return sample_jit(logits, state_of(logit_bias=bias))[0].tolist()

    assert chosen() == [0]
    assert chosen((2, 2.5)) == [2]
    assert chosen((0, -1.5)) == [1]
    assert chosen((0, -math.inf), (1, -math.inf)) == [2]
    # Entries of one token add up.
    assert chosen((2, 1.5), (2, 1.0)) == [2]
    assert chosen((7, MAX_BIAS)) == [7]


def test_greedy_counts_what_it_chose():
    """A frequency penalty moves greedy on: 5.0, then 4.5, then 4.0 again once it was paid."""
    logits = np.full((1, V), -9, np.float32)
    logits[0, :3] = 5.0, 4.5, 3.8
    state, tokens = state_of(frequency_penalty=1.0), []
    for _ in range(6):
        token, state = sample_jit(logits, state)
        tokens += token.tolist()
    assert tokens == [0, 1, 0, 2, 1, 0]
    assert state.counts[0, :3].tolist() == [3, 2, 1]


@every_variant
def test_penalties_by_hand(variant):
    logits = np.array([[2.0, -2.0, 4.0, -4.0, 1.0, 0.5]], np.float32)
    prompt, answer, run = (0, 1), (2, 3, 2), variant(penalize)

    def penalized(**sampling):
        state = state_of(prompt, answer, vocab=6, **sampling)
        return np.asarray(run(logits, state))[0]

    np.testing.assert_array_equal(penalized(), logits[0])
    # Of prompt and answer; pushed down whatever the sign.
    np.testing.assert_allclose(penalized(repetition_penalty=2.0), [1, -4, 2, -8, 1, 0.5])
    # Of the answer alone.
    np.testing.assert_allclose(penalized(presence_penalty=0.25), [2, -2, 3.75, -4.25, 1, 0.5])
    np.testing.assert_allclose(penalized(frequency_penalty=0.25), [2, -2, 3.5, -4.25, 1, 0.5])
    np.testing.assert_allclose(
        penalized(frequency_penalty=-0.5, presence_penalty=-1), [2, -2, 6, -2.5, 1, 0.5]
    )
    # The bias comes first, so it decides the sign that repetition looks at.
    np.testing.assert_allclose(
        penalized(repetition_penalty=2.0, logit_bias=((1, 3.0), (5, 1.0))), [1, 0.5, 2, -8, 1, 1.5]
    )


ROW = 9


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.integers(0, 40), min_size=ROW, max_size=ROW), min_size=2, max_size=2),
    st.floats(0.01, 0.99),
)
def test_top_p_is_a_sort(weights, p):
    assume(all(any(row) for row in weights))
    with np.errstate(divide="ignore"):
        logits = np.log(np.array(weights, np.float32))
    probabilities = np.array(weights) / np.sum(weights, axis=-1, keepdims=True)
    got = np.asarray(top_p_jit(logits, np.float32(p)))
    for row, kept, logit in zip(probabilities, got, logits, strict=True):
        order = np.sort(row)[::-1]
        sums = np.cumsum(order)
        # Where the sum meets p exactly, rounding decides.
        assume(np.abs(sums - p).min() > 1e-5)
        least = order[np.argmax(sums >= p)]
        np.testing.assert_array_equal(kept, np.where(row >= least, logit, -np.inf))


CHAINS = [
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.0, "repetition_penalty": 0.6, "top_p": 0.5},
    # Each filter sees what the one before has left.
    {"temperature": 3.0, "top_k": 12, "top_p": 0.7},
    {"temperature": 3.0, "top_k": 9, "top_p": 0.9, "min_p": 0.3},
    {"temperature": 1.6, "repetition_penalty": 1.3, "top_k": 20, "top_p": 0.85, "min_p": 0.05},
]
WORDS = 40


def their_scores(logits, ids, keys):
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    ids, scores = torch.tensor([ids]), torch.tensor(logits)
    chain = [processors.RepetitionPenaltyLogitsProcessor(keys.get("repetition_penalty", 1.0))]
    chain.append(processors.TemperatureLogitsWarper(keys["temperature"]))
    if "top_k" in keys:
        chain.append(processors.TopKLogitsWarper(keys["top_k"]))
    if "top_p" in keys:
        chain.append(processors.TopPLogitsWarper(keys["top_p"]))
    if "min_p" in keys:
        chain.append(processors.MinPLogitsWarper(keys["min_p"]))
    for process in chain:
        scores = process(ids, scores)
    return scores.numpy()


@pytest.mark.parametrize("keys", CHAINS, ids=lambda keys: "-".join(keys))
def test_distribution_is_transformers(keys):
    sizes = []
    for seed in range(8):
        logits = normal(1, WORDS, seed=seed)
        prompt, answer = [1, 5, 5, int(logits.argmax())], [7, 7, 39]
        expected = their_scores(logits, prompt + answer, keys)
        got = np.asarray(kept_logits(logits, state_of(prompt, answer, vocab=WORDS, **keys)))
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(expected))
        np.testing.assert_allclose(softmax(got), softmax(expected), atol=1e-6)
        sizes.append(np.isfinite(got).sum())
    if set(keys) & {"top_k", "top_p", "min_p"}:
        assert max(sizes) < WORDS
    if "top_k" in keys and set(keys) & {"top_p", "min_p"} and keys["temperature"] > 1:
        assert min(sizes) < keys["top_k"]


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"temperature": -0.1}, ("temperature", "-0.1", "0", "100")),
        ({"temperature": "1"}, ("temperature", "'1'")),
        ({"top_k": -1}, ("top_k", "-1")),
        ({"top_p": 0.0}, ("top_p", "above 0", "temperature 0")),
        ({"min_p": -0.1}, ("min_p", "-0.1")),
        ({"repetition_penalty": 0.0}, ("repetition_penalty", "0.0")),
        ({"presence_penalty": 101}, ("presence_penalty", "101")),
        ({"frequency_penalty": -101}, ("frequency_penalty", "-101")),
        ({"logit_bias": ((-1, 0.5),)}, ("logit_bias", "(-1, 0.5)")),
        ({"logit_bias": ((3, math.inf),)}, ("logit_bias", "token 3", "inf", "-inf to forbid")),
        ({"logit_bias": ((0, 1.0),) * (MAX_LOGIT_BIASES + 1)}, ("logit_bias", str(MAX_LOGIT_BIASES + 1))),
        ({"seed": -1}, ("seed", "-1")),
        ({"seed": 1 << 64}, ("seed", str(1 << 64))),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusals(keys, parts):
    with pytest.raises(ConfigError) as caught:
        Sampling(**keys)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


# Draws: their distribution by chi-square, seeds, and what forces a token


LOGITS = np.log(np.array([[0.30, 0.25, 0.18, 0.12, 0.08, 0.04, 0.02, 0.01]], np.float32))
DRAWS = 4096


@jit
def many(state, drawn):
    return jax.vmap(lambda n: sample(LOGITS, dataclasses.replace(state, drawn=n))[0][0])(drawn)


@jit
def one_of_each_seed(state, seeds):
    return jax.vmap(lambda seed: sample(LOGITS, dataclasses.replace(state, seed=seed))[0][0])(seeds)


def assert_drawn_from(tokens, probabilities):
    counts = np.bincount(tokens, minlength=len(probabilities))
    possible = probabilities > 0
    assert not np.any(counts[~possible])
    test = scipy.stats.chisquare(counts[possible], probabilities[possible] * len(tokens))
    assert test.pvalue > 1e-4


def power(temperature):
    weights = softmax(LOGITS[0]) ** (1 / temperature)
    return weights / weights.sum()


def largest(probabilities, n):
    """The n most likely tokens (probabilities fall)."""
    kept = np.where(np.arange(V) < n, probabilities, 0)
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"temperature": 1.0}, power(1)),
        ({"temperature": 2.0}, power(2)),
        ({"temperature": 0.5}, power(0.5)),
        ({"temperature": 2.0, "top_k": 3}, largest(power(2), 3)),
        # Filters after the temperature: before it, top-p would keep 3 tokens and min-p 5.
        ({"temperature": 2.0, "top_p": 0.7}, largest(power(2), 4)),
        ({"temperature": 2.0, "min_p": 0.25}, largest(power(2), 7)),
        ({"temperature": 1.0, "logit_bias": ((0, -math.inf),)}, np.append(0, softmax(LOGITS[0, 1:]))),
    ],
    ids=str,
)
def test_draws_have_the_distribution(sampling, expected):
    """Over an answer's tokens, and over the seeds of a first token."""
    state = state_of(**sampling)
    assert_drawn_from(many(state, np.arange(DRAWS, dtype=np.int32)), expected)
    seeds = np.stack([np.zeros(DRAWS), np.arange(DRAWS)], axis=-1).astype(np.uint32)
    assert_drawn_from(one_of_each_seed(state, seeds), expected)


def test_neighbouring_draws_are_independent():
    tokens = np.asarray(many(state_of(temperature=1.0, seed=3), np.arange(2 * DRAWS, dtype=np.int32)))
    coarse = np.minimum(tokens, 3)
    table = np.zeros((4, 4))
    np.add.at(table, (coarse[::2], coarse[1::2]), 1)
    assert scipy.stats.chi2_contingency(table).pvalue > 1e-4


def answer_of(seed, tokens=24, **sampling):
    state, out = state_of(seed=seed, **{"temperature": 1.0, **sampling}), []
    for _ in range(tokens):
        token, state = sample_jit(LOGITS, state)
        out += token.tolist()
    assert int(state.drawn) == tokens
    np.testing.assert_array_equal(state.counts[0], np.bincount(out, minlength=V))
    return out


def test_seed_decides():
    answers = [answer_of(seed) for seed in (0, 1, 1 << 32, 1 << 63, (1 << 64) - 1)]
    assert answer_of(0) == answers[0]
    assert answer_of((1 << 64) - 1) == answers[-1]
    assert all(a != b for i, a in enumerate(answers) for b in answers[:i])


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-37, 1e-30, 1e-6])
def test_tiny_temperatures_are_greedy(temperature):
    """Logits over such temperatures do not fit a float32."""
    logits = np.array([[1.0, 90.0, -80.0, 89.0, 0.0, 0.0, 0.0, 60.0]], np.float32)
    for seed in range(4):
        for extra in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}):
            token, _ = sample_jit(logits, state_of(seed=seed, temperature=temperature, **extra))
            assert token.tolist() == [1]
