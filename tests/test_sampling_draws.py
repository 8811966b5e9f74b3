"""Draws of tokens: their distribution by chi-square, seeds, and what forces a token."""

import dataclasses
import math

import chex
import jax
import numpy as np
import pytest
import scipy.stats

from jaxllm.sampling import MAX_BIAS, sample
from tests.sampling_states import V, jit, sample_jit, softmax, state_of

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
    # The same draw of two seeds.
    other = np.minimum(many(state_of(temperature=1.0, seed=4), np.arange(2 * DRAWS, dtype=np.int32)), 3)
    table = np.zeros((4, 4))
    np.add.at(table, (coarse, other), 1)
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


def test_rows_of_a_batch_draw_for_themselves():
    state = dataclasses.replace(state_of(temperature=1.0), counts=np.zeros((32, V), np.int32))
    tokens, after = sample_jit(np.tile(LOGITS, (32, 1)), state)
    chex.assert_shape(tokens, (32,))
    assert len(set(tokens.tolist())) > 2
    np.testing.assert_array_equal(after.counts, np.eye(V, dtype=np.int32)[tokens])


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-37, 1e-30, 1e-6])
def test_tiny_temperatures_are_greedy(temperature):
    """Logits over such temperatures do not fit a float32."""
    logits = np.array([[1.0, 90.0, -80.0, 89.0, 0.0, 0.0, 0.0, 60.0]], np.float32)
    for seed in range(4):
        for extra in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}):
            token, _ = sample_jit(logits, state_of(seed=seed, temperature=temperature, **extra))
            assert token.tolist() == [1]


def test_largest_bias_forces_a_token():
    for seed in range(4):
        state = state_of(seed=seed, temperature=1.0, logit_bias=((6, MAX_BIAS), (2, -MAX_BIAS)))
        assert sample_jit(LOGITS, state)[0].tolist() == [6]
