"""The order in which branches grow, and when growing ends."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.errors import ConfigError
from jaxllm.speculation.token_tree import LEAST, MOST, START, Fallback
from jaxllm.speculation.tree import Calibration, best_confidence, grow, missing_tokens, new_tree, next_tips
from tests.speculation.test_tree import tree_of
from tests.variants import every_variant

# Confidences are the probabilities as they are.
NONE = Calibration.fresh().shifts()


def fed(*nodes, room=12):
    return np.isin(np.arange(room), nodes)


@every_variant
def test_the_most_confident_tips_are_next(variant):
    following, best = variant(next_tips, static_argnums=2), variant(best_confidence)
    tree = tree_of([0, 0, 1, 1, 2], confidences=[0.6, 0.4, 0.1, 0.8, 0.9])
    # Along their paths: 1, .6, .4, .06, .48, .36.
    tips, count = following(tree, fed(0, 1, 2), 2)
    chex.assert_shape([tips, count], [(2,), ()])
    chex.assert_type([tips, count], jnp.int32)
    assert (tips.tolist(), int(count)) == ([4, 5], 2)
    tips, count = following(tree, fed(0, 1, 2, 4, 5), 2)
    assert (tips.tolist(), int(count)) == ([3, 11], 1)
    assert float(best(tree, fed(0, 1, 2))) == pytest.approx(0.48)
    assert float(best(tree, fed(0, 1, 2, 3, 4, 5))) == 0
    assert int(following(tree, fed(0, 1, 2, 3, 4, 5), 3)[1]) == 0


@every_variant
def test_tokens_are_divided_fairly(variant):
    lacking, following = (
        variant(missing_tokens),
        variant(next_tips, static_argnums=2, static_argnames="pacer"),
    )
    # Two branches: 0-1-3-4 of three tokens at .6 · .9 · .8 = .432, and 0-2 of one at .3.
    tree = tree_of([0, 0, 1, 3], confidences=[0.6, 0.3, 0.9, 0.8])
    missing = lacking(tree, fed(0, 1, 3))
    chex.assert_shape(missing, (12,))
    # Equations 1 and 2: four drafted tokens, shares of .432 / .732 and .3 / .732.
    assert missing[jnp.array([4, 2])].tolist() == pytest.approx([4 * 0.432 / 0.732 - 3, 4 * 0.3 / 0.732 - 1])
    # The surer branch has had more than its share; the other one is next.
    assert following(tree, fed(0, 1, 3), 1, pacer="fair")[0].tolist() == [2]
    assert following(tree, fed(0, 1, 3), 1)[0].tolist() == [4]
    assert following(tree, fed(0, 1, 3), 1, pacer="order")[0].tolist() == [2]
    # A branch that is much surer gets more tokens than the other one before that is next.
    tree = tree_of([0, 0, 1, 3], confidences=[0.6, 0.05, 1.0, 1.0])
    assert lacking(tree, fed(0, 1, 3))[jnp.array([4, 2])].tolist() == pytest.approx(
        [4 * 0.6 / 0.65 - 3, 4 * 0.05 / 0.65 - 1], rel=1e-5
    )
    assert following(tree, fed(0, 1, 3), 2, pacer="fair")[0].tolist() == [2, 4]
    assert following(tree, fed(0, 1, 3), 1, pacer="fair")[0].tolist() == [4]
    # A root alone lacks nothing, and nothing is invented where no branch waits.
    assert lacking(tree_of([]), fed())[0] == 0
    assert int(following(tree, fed(0, 1, 2, 3, 4), 2, pacer="fair")[1]) == 0


@every_variant
def test_a_branch_divides_where_the_draft_is_torn(variant):
    tree, grow_tree = tree_of([0, 0]), variant(grow, static_argnames="branches")
    probabilities = np.array([[0.05, 0.45, 0.1, 0.4], [0.1, 0.1, 0.6, 0.2]], np.float32)
    grown = grow_tree(tree, jnp.array([1, 2]), jnp.int32(2), probabilities, NONE, branches=3)
    chex.assert_trees_all_equal_shapes_and_dtypes(grown, tree)
    # Node 1 goes on with tokens 1 and 3, node 2 with 2 alone; the best paths first.
    assert int(grown.count) == 6
    assert grown.parents[3:6].tolist() == [2, 1, 1]
    assert grown.tokens[3:6].tolist() == [2, 1, 3]
    np.testing.assert_allclose(grown.confidences[3:6], [0.3, 0.225, 0.2], rtol=1e-6)
    only = grow_tree(tree, jnp.array([1, 2]), jnp.int32(1), probabilities, NONE, branches=3)
    assert only.parents[3:5].tolist() == [1, 1]
    assert int(only.count) == 5


def test_where_the_room_ends_the_least_likely_are_left_out():
    tree = new_tree(jnp.int32(5), 3)
    probabilities = np.array([[0.3, 0.36, 0.34]], np.float32)
    grown = grow(tree, jnp.array([0]), jnp.int32(1), probabilities, NONE, branches=3, threshold=0.1)
    assert grown.tokens.tolist() == [5, 1, 2]


def test_the_threshold_by_hand():
    start = Fallback()
    assert start.alpha == START
    assert start.after(drafted=4, correct=4, confidence=0.008).alpha == pytest.approx(0.005)
    # alpha / Tc^((N - correct) / N)
    assert start.after(drafted=4, correct=3, confidence=0.0081).alpha == pytest.approx(0.01 / 0.0081**0.25)
    assert start.after(drafted=2, correct=0, confidence=1e-30).alpha == MOST
    assert Fallback(LEAST).after(drafted=0, correct=0, confidence=1.0).alpha == LEAST


@given(
    alpha=st.floats(LEAST, MOST),
    drafted=st.integers(0, 64),
    wrong=st.integers(0, 64),
    confidence=st.floats(0, 1),
)
def test_the_threshold_stays_in_range_and_moves_the_right_way(alpha, drafted, wrong, confidence):
    correct = max(0, drafted - wrong)
    after = Fallback(alpha).after(drafted=drafted, correct=correct, confidence=confidence)
    assert LEAST <= after.alpha <= MOST
    if correct == drafted:
        assert after.alpha <= alpha
    else:
        assert after.alpha >= alpha * (1 - 1e-9)


def test_impossible_numbers_are_refused():
    for change in ({"correct": 5}, {"correct": -1}, {"confidence": 1.5}, {"confidence": float("nan")}):
        with pytest.raises(ConfigError, match="tokens right"):
            Fallback().after(**{"drafted": 4, "correct": 2, "confidence": 0.5, **change})
    with pytest.raises(ConfigError, match="alpha must be"):
        Fallback(0.0)
