"""Sampling against a sorting oracle and transformers' processors; refusals of bad requests."""

import math

import chex
import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxllm.errors import ConfigError
from jaxllm.sampling import MAX_BIAS, MAX_LOGIT_BIASES, Sampling, keep_top_p, penalize, sample
from tests.sampling_states import (
    DIMS,
    V,
    drawn_from,
    kept_logits,
    normal,
    sample_jit,
    softmax,
    state_of,
    top_k_jit,
    top_p_jit,
)
from tests.variants import every_variant

# Greedy


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


def test_greedy_takes_the_first_of_equals():
    logits = np.zeros((1, V), np.float32)
    logits[0, [3, 5]] = 2.0
    assert sample_jit(logits, state_of())[0].tolist() == [3]


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


# Penalties


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
    np.testing.assert_allclose(
        penalized(repetition_penalty=2.0, frequency_penalty=1, presence_penalty=1), [1, -4, -1, -10, 1, 0.5]
    )


# Filters against a sort

ROW = 9
VALUES = st.one_of(
    st.floats(-1e6, 1e6, width=32),
    st.sampled_from([0.0, 1.0, -1.0, 2.5, -2.5, -math.inf, 1e-40, -1e-40, 3e38, -3e38]),
)
ROWS = st.lists(st.lists(VALUES, min_size=ROW, max_size=ROW), min_size=2, max_size=2)


@settings(deadline=None, max_examples=50)
@given(ROWS, st.integers(1, ROW))
def test_top_k_is_a_sort(rows, k):
    # Adding zero turns -0.0 into 0.0, which only a comparison takes for equal.
    logits = np.array(rows, np.float32) + np.float32(0)
    got = np.asarray(top_k_jit(logits, np.int32(k)))
    least = np.sort(logits, axis=-1)[:, -k][:, None]
    np.testing.assert_array_equal(got, np.where(logits >= least, logits, -np.inf))
    for row, kept in zip(logits, got, strict=True):
        if len(set(row.tolist())) == ROW and np.isfinite(row).all():
            assert np.isfinite(kept).sum() == k


@settings(deadline=None, max_examples=50)
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


@every_variant
@pytest.mark.parametrize(("p", "kept"), [(1e-6, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.96, 4)])
def test_top_p_by_hand(p, kept, variant):
    logits = np.log(np.array([[0.05, 0.5, 0.15, 0.3]], np.float32)) + np.float32(7)
    got = np.isfinite(np.asarray(variant(keep_top_p)(logits, np.float32(p))))[0]
    assert np.flatnonzero(got).tolist() == sorted([1, 3, 2, 0][:kept])


@every_variant
@pytest.mark.parametrize(("min_p", "kept"), [(0.0, 5), (0.09, 4), (0.11, 3), (0.29, 3), (0.31, 2), (1.0, 1)])
def test_min_p_by_hand(min_p, kept, variant):
    logits = np.log(np.array([[0.05, 0.5, 0.15, 0.3, 0.0]], np.float32) + np.float32(1e-30))
    state = state_of(vocab=5, temperature=1.0, min_p=min_p)
    got = np.isfinite(np.asarray(variant(drawn_from)(logits, state)))[0]
    assert np.flatnonzero(got).tolist() == sorted([1, 3, 2, 0, 4][:kept])


@every_variant
def test_filters_off_change_nothing(variant):
    logits, run = normal(*DIMS["BV"]), variant(drawn_from)
    chex.assert_trees_all_equal(
        logits, *(run(logits, state_of(temperature=1.0, top_k=k)) for k in (0, V, V + 3)), strict=True
    )


# Transformers

CHAINS = [
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 2.0, "min_p": 0.2},
    {"temperature": 1.0, "repetition_penalty": 1.7},
    {"temperature": 1.0, "repetition_penalty": 0.6, "top_p": 0.5},
    # Each filter sees what the one before has left.
    {"temperature": 3.0, "top_k": 12, "top_p": 0.7},
    {"temperature": 3.0, "top_k": 9, "top_p": 0.9, "min_p": 0.3},
    {"temperature": 1.6, "repetition_penalty": 1.3, "top_k": 20, "top_p": 0.85, "min_p": 0.05},
    {"temperature": 0.5, "repetition_penalty": 1.2, "top_k": 3, "top_p": 0.99, "min_p": 0.01},
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


# Requests


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"temperature": -0.1}, ("temperature", "-0.1", "0 (greedy) to 100")),
        ({"temperature": math.nan}, ("temperature", "nan")),
        ({"temperature": math.inf}, ("temperature", "inf")),
        ({"temperature": "1"}, ("temperature", "'1'")),
        ({"temperature": True}, ("temperature", "True")),
        ({"top_k": -1}, ("top_k", "-1")),
        ({"top_k": 1.5}, ("top_k", "1.5")),
        ({"top_k": 1 << 31}, ("top_k", str(1 << 31))),
        ({"top_p": 0.0}, ("top_p", "above 0", "temperature 0")),
        ({"top_p": 1.01}, ("top_p", "1.01")),
        ({"top_p": math.nan}, ("top_p", "nan")),
        ({"min_p": -0.1}, ("min_p", "-0.1")),
        ({"min_p": 1.1}, ("min_p", "1.1")),
        ({"repetition_penalty": 0.0}, ("repetition_penalty", "0.0")),
        ({"repetition_penalty": math.nan}, ("repetition_penalty", "nan")),
        ({"presence_penalty": 101}, ("presence_penalty", "101")),
        ({"frequency_penalty": -101}, ("frequency_penalty", "-101")),
        ({"logit_bias": ((-1, 0.5),)}, ("logit_bias", "(-1, 0.5)")),
        ({"logit_bias": ((1.5, 0.5),)}, ("logit_bias", "(1.5, 0.5)")),
        ({"logit_bias": ((3, math.nan),)}, ("logit_bias", "token 3", "nan")),
        ({"logit_bias": ((3, math.inf),)}, ("logit_bias", "token 3", "inf", "-inf to forbid")),
        ({"logit_bias": ((3, 2 * MAX_BIAS),)}, ("logit_bias", "token 3", "2000000")),
        ({"logit_bias": ((3, "1"),)}, ("logit_bias", "'1'")),
        ({"logit_bias": ((0, 1.0),) * (MAX_LOGIT_BIASES + 1)}, ("logit_bias", str(MAX_LOGIT_BIASES + 1))),
        ({"seed": -1}, ("seed", "-1")),
        ({"seed": 1 << 64}, ("seed", str(1 << 64))),
        ({"seed": 0.5}, ("seed", "0.5")),
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


def test_limits_are_allowed():
    Sampling(
        temperature=100, top_k=(1 << 31) - 1, top_p=1, min_p=1, repetition_penalty=100,
        presence_penalty=-100, frequency_penalty=100, seed=(1 << 64) - 1,
        logit_bias=((0, -math.inf), (1, MAX_BIAS)) * (MAX_LOGIT_BIASES // 2),
    )  # fmt: skip
    assert Sampling(temperature=0, top_p=1e-9, repetition_penalty=0.01, seed=0).seed == 0


def test_bias_outside_the_vocabulary_is_refused():
    with pytest.raises(ConfigError, match=f"token {V}; the vocabulary has {V}"):
        state_of(logit_bias=((V, 1.0),))
    assert state_of(logit_bias=((V - 1, 1.0),)).bias.tolist() == [0.0] * (V - 1) + [1.0]


def test_state_by_hand():
    state = state_of(prompt=(2, 0, 2), top_k=99, seed=(5 << 32) + 7)
    assert state.in_prompt.tolist() == [[True, False, True, *[False] * 5]]
    assert state.top_k == V
    assert state.seed.tolist() == [5, 7]
    assert state.drawn == 0
    assert not state.counts.any()
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float32", "int32", "uint32", "bool"}
