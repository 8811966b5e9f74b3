"""Activation paths: counts by hand, what they predict, how they are stored, and that they adapt."""

from typing import get_args

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.experts import prediction
from jaxllm.experts.prediction import (
    BACK_OFF,
    MOST_WEIGHT,
    POLICIES,
    PathCounts,
    Residents,
    TokenExperts,
    count_paths,
    count_tokens,
    learn,
    nearness,
    next_experts,
)
from jaxllm.serving.ground.expert_options import Eviction


def tokens(*paths):
    """`[L, M, 1]` of paths that are one expert per layer."""
    return np.array(paths).T[:, :, None]


def test_counts_by_hand():
    counts = count_paths(tokens((0, 1, 2), (0, 1, 2), (0, 1, 0), (2, 1, 1)), 3)
    assert counts.alone.tolist() == [[3, 0, 1], [0, 4, 0], [1, 1, 2]]
    assert counts.after_one[1].tolist() == [[0, 3, 0], [0, 0, 0], [0, 1, 0]]
    assert counts.after_one[2].tolist() == [[0, 0, 0], [1, 1, 2], [0, 0, 0]]
    assert counts.pairs[2].tolist() == list(range(9))
    assert counts.after_two[2][0 * 3 + 1].tolist() == [1, 0, 2]
    assert counts.after_two[2][2 * 3 + 1].tolist() == [0, 1, 0]
    assert counts.after_two.sum() == 4
    assert not counts.after_one[0].any()
    assert (counts.pairs[:2] == -1).all()


def test_sets_count_every_pair():
    """One token visits {0, 1}, then {2, 0}, then {1, 2}."""
    counts = count_paths(np.array([[[0, 1]], [[2, 0]], [[1, 2]]]), 3)
    assert counts.after_one[1].tolist() == [[1, 0, 1], [1, 0, 1], [0, 0, 0]]
    assert counts.after_two[2][0 * 3 + 2].tolist() == [0, 1, 1]
    assert counts.after_two[2].sum() == 2 * 2 * 2


def test_back_off_by_hand():
    counts = count_paths(tokens((0, 1, 2), (0, 1, 2), (0, 1, 0), (2, 1, 1)), 3)
    chance = np.array([2, 2, 3]) / 7
    np.testing.assert_allclose(next_experts(counts, 2), chance, rtol=1e-6)
    behind_one = (np.array([1, 1, 2]) + BACK_OFF * chance) / (4 + BACK_OFF)
    one = np.array([[1]])
    np.testing.assert_allclose(next_experts(counts, 2, one), behind_one, rtol=1e-6)
    behind_two = (np.array([1, 0, 2]) + BACK_OFF * behind_one) / (3 + BACK_OFF)
    np.testing.assert_allclose(next_experts(counts, 2, one, np.array([[0]])), behind_two, rtol=1e-6)
    # What never came says nothing beyond one layer.
    np.testing.assert_allclose(next_experts(counts, 2, one, np.array([[1]])), behind_one, rtol=1e-6)


def test_the_first_layers_fall_back():
    counts = count_paths(tokens((0, 1, 2), (2, 1, 1)), 3)
    before = np.array([[0]])
    np.testing.assert_array_equal(next_experts(counts, 0, before, before), next_experts(counts, 0))
    np.testing.assert_array_equal(next_experts(counts, 1, before, before), next_experts(counts, 1, before))


def test_several_tokens_are_a_mean():
    counts = count_paths(np.random.default_rng(0).integers(0, 4, (3, 50, 2)), 4)
    before, two = np.array([[0, 1], [2, 3]]), np.array([[1, 2], [3, 0]])
    each = [next_experts(counts, 2, before[i : i + 1], two[i : i + 1]) for i in range(2)]
    np.testing.assert_allclose(next_experts(counts, 2, before, two), np.mean(each, 0), rtol=1e-5)
    np.testing.assert_allclose(each[0].sum(), 1, rtol=1e-5)


def test_few_pairs_are_remembered(monkeypatch):
    """The most frequent ones; the others say as much as one layer."""
    monkeypatch.setattr(prediction, "_MOST_PAIRS", 1)
    counts = count_paths(tokens(*[(0, 1, 2)] * 3, (2, 1, 1)), 3)
    assert counts.pairs[2].tolist() == [1]
    assert counts.after_two.shape == (3, 1, 3)
    unknown = next_experts(counts, 2, np.array([[1]]), np.array([[2]]))
    np.testing.assert_allclose(unknown, next_experts(counts, 2, np.array([[1]])), rtol=1e-6)
    # Or none at all.
    monkeypatch.setattr(prediction, "_MOST_PAIRS", 0)
    counts = count_paths(tokens((0, 1, 2), (2, 1, 1)), 3)
    again = PathCounts.from_arrays(counts.to_arrays(), layers=3, experts=3)
    got = next_experts(again, 2, np.array([[1]]), np.array([[0]]))
    np.testing.assert_allclose(got, next_experts(counts, 2, np.array([[1]])), rtol=1e-6)


def test_stored_counts_come_back():
    counts = count_paths(np.random.default_rng(0).integers(0, 5, (4, 300, 2)), 5)
    arrays = counts.to_arrays()
    assert sum(each.nbytes for each in arrays.values()) < 4 * 25 * (5 * 2 + 4) + 4 * 2 * (25 + 5) + 1
    again = PathCounts.from_arrays(arrays, layers=4, experts=5)
    for name in ("alone", "after_one", "after_two", "pairs"):
        np.testing.assert_array_equal(getattr(again, name), getattr(counts, name))


def test_counts_beyond_float16_are_stored_as_shares():
    counts = count_paths(np.zeros((2, 200_000, 1), int), 2)
    again = PathCounts.from_arrays(counts.to_arrays(), layers=2, experts=2)
    np.testing.assert_allclose(next_experts(again, 1), next_experts(counts, 1), atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: arrays.pop("alone"), "lack 'alone'"),
        (lambda arrays: arrays.update(alone=arrays["alone"][:, 1:]), "of another model"),
        (lambda arrays: arrays.update(pairs=arrays["pairs"] + 100), "of another model"),
        (lambda arrays: arrays["after_two"].fill(np.nan), "no counts"),
        (lambda arrays: arrays["alone"].fill(-1), "no counts"),
    ],
)
def test_malformed_counts_are_refused(change, message):
    arrays = count_paths(np.zeros((3, 4, 1), int), 3).to_arrays()
    change(arrays)
    with pytest.raises(ConfigError, match=message):
        PathCounts.from_arrays(arrays, layers=3, experts=3)


def test_learning_is_counting():
    draw = np.random.default_rng(0)
    ids = np.argsort(draw.random((3, 12, 4)), axis=-1)[:, :, :2]
    counts, whole = count_paths(ids[:, :6], 4), count_paths(ids, 4)
    learn(counts, ids[:, 6:])
    for name in ("alone", "after_one", "after_two"):
        np.testing.assert_array_equal(getattr(counts, name), getattr(whole, name))


def test_learning_forgets():
    """After as many other visits as a row may weigh, the new ones lead."""
    counts = count_paths(tokens(*[(0, 1, 2)] * 1000), 3)
    before, two = np.array([[1]]), np.array([[0]])
    assert next_experts(counts, 2, before, two).argmax() == 2
    for _ in range(int(MOST_WEIGHT)):
        learn(counts, tokens((0, 1, 0)))
    assert next_experts(counts, 2, before, two).argmax() == 0
    assert counts.after_two[2][1].sum() <= MOST_WEIGHT * 1.001


# The experts of tokens: counts by hand, stored and read again


# Three visits of token 7 and one of token 3, at two layers of four experts, two a token.
TOKENS = np.array([7, 3, 7, 7])
IDS = np.array([[[0, 1], [2, 3], [1, 2], [0, 1]], [[3, 2], [0, 1], [3, 2], [3, 0]]])


def test_counts_of_tokens_by_hand():
    found = count_tokens(IDS, TOKENS, 4)
    assert found.tokens.tolist() == [3, 7]
    assert found.experts.tolist() == [[[2, 3], [1, 0]], [[0, 1], [3, 2]]]


def test_chances_are_the_mean_over_known_tokens():
    found = count_tokens(IDS, TOKENS, 4)
    np.testing.assert_allclose(found.chances(0, np.array([7]), 4), [0.5, 0.5, 0, 0])
    np.testing.assert_allclose(found.chances(1, np.array([3, 9, 7, 1]), 4), [0.25] * 4)
    assert found.chances(0, np.array([9, 1]), 4) is None
    assert found.chances(0, np.zeros(0, np.int32), 4) is None
    assert TokenExperts.none(2, 2).chances(1, np.array([7]), 4) is None


@pytest.mark.parametrize("experts", [4, 300])
def test_stored_tokens_come_back(experts):
    found = count_tokens(IDS, TOKENS, experts)
    again = TokenExperts.from_arrays(found.to_arrays(), layers=2, experts=experts, choices=2)
    assert (again.tokens.tolist(), again.experts.tolist()) == (found.tokens.tolist(), found.experts.tolist())
    assert len(TokenExperts.from_arrays({}, layers=2, experts=experts, choices=2).tokens) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": np.array([7, 3], np.int32)},
        {"tokens": np.array([3.0, 7.0], np.float32)},
        {"tokens": np.array([3], np.int32)},
        {"token_experts": np.full((2, 2, 2), 4, np.uint8)},
        {"token_experts": np.zeros((2, 2, 3), np.uint8)},
        {"token_experts": np.zeros((2, 2, 2), np.float32)},
        {"token_experts": None},
    ],
)
def test_malformed_ones_are_refused(change):
    arrays = {**count_tokens(IDS, TOKENS, 4).to_arrays(), **change}
    with pytest.raises(ConfigError, match="of another model"):
        TokenExperts.from_arrays(arrays, layers=2, experts=4, choices=2)


def test_nearness_counts_down_from_the_next_layer():
    assert nearness(np.arange(5), 2, 5).tolist() == [2, 1, 0, 4, 3]


# Four experts: one of the layer at work, one just passed, one next and often, one next and rare.
THOSE = Residents(
    layers=np.array([1, 0, 2, 2]),
    frequency=np.array([9.0, 4.0, 8.0, 1.0]),
    loaded=np.array([3, 2, 1, 4]),
    used=np.array([9, 8, 2, 5]),
)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        # 9 · 0, 4 · 1, 8 · 2, 1 · 2.
        ("frequency-nearness", [0, 3, 1, 2]),
        ("fifo", [2, 1, 0, 3]),
        ("lru", [2, 3, 1, 0]),
        ("lfu", [3, 1, 2, 0]),
        # 9 / 2, 4 / 3, 8 / 9, 1 / 6.
        ("lfru", [3, 2, 1, 0]),
    ],
)
def test_order(policy, order):
    scores = POLICIES[policy](THOSE, 1, 3, 10)
    assert np.argsort(scores, kind="stable").tolist() == order


def test_every_policy_is_tested():
    """Options name them all, and no others."""
    assert set(POLICIES) == set(get_args(Eviction)) == {"frequency-nearness", "fifo", "lru", "lfu", "lfru"}


def test_of_equally_near_experts_the_rarest_goes():
    """Those of the layer at work, too, whose nearness is 0."""
    those = Residents(np.array([1, 1]), np.array([3.0, 2.0]), np.array([1, 2]), np.array([3, 4]))
    scores = POLICIES["frequency-nearness"](those, 1, 4, 5)
    assert scores[1] < scores[0]
