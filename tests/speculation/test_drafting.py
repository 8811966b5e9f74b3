"""The order in which branches grow, and when growing ends."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.speculation.token_tree import LEAST, MOST, START, Fallback
from jaxllm.speculation.tree import (
    CELLS,
    RANKS,
    Calibration,
    best_confidence,
    calibrated,
    grow,
    missing_tokens,
    new_tree,
    next_tips,
    outcomes,
)
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


@every_variant
def test_without_outcomes_probabilities_are_confidences(variant):
    own = np.array([[0.9999999, 0.7, 0.01, 1e-6], [0.5, 0.3, 0.2, 0.0]], np.float32)
    found = variant(calibrated)(own, Calibration.fresh().shifts())
    np.testing.assert_allclose(found[:, 1:], own[:, 1:], rtol=1e-4)
    np.testing.assert_allclose(found[:, 0], [1.0, 0.5], atol=4e-4)


def test_one_cell_by_hand():
    # Eight of eight tokens that half promised, the weight of the prior: 12 of 16 are expected.
    counts = Calibration.fresh().after(np.zeros(8, int), np.full(8, 0.5), np.ones(8, bool))
    shifts = counts.shifts()
    assert shifts.shape == (RANKS, CELLS)
    assert shifts[0, CELLS // 2] == pytest.approx(np.log(0.75 / 0.25), rel=1e-5)
    assert np.count_nonzero(shifts) == 1
    found = np.asarray(calibrated(np.full((1, 2), 0.5, np.float32), shifts))
    np.testing.assert_allclose(found[0], [0.75, 0.5], rtol=1e-5)


def test_what_was_promised_wrongly_is_learned_and_unlearned():
    draw = np.random.default_rng(0)
    promised = draw.uniform(0.02, 0.98, 4000)

    def learned(counts, chance):
        for some in np.split(np.arange(4000), 400):
            right = draw.random(10) < chance(promised[some])
            counts = counts.after(np.zeros(10, int), promised[some], right)
        return counts

    asked = np.linspace(0.1, 0.9, 9, dtype=np.float32)
    counts = learned(Calibration.fresh(), np.sqrt)
    for chance in (np.sqrt, np.square):
        counts = learned(counts, chance)
        found = np.asarray(calibrated(asked[:, None], counts.shifts()))[:, 0]
        assert np.abs(found - chance(asked)).max() < 0.1
        assert (np.diff(found) > 0).all()


def test_what_a_verification_says_by_hand():
    # Root -> 1 (a), 2 (b), 3 (c); 2 -> 4 (d), 5 (e); 1 -> 6.
    tree = tree_of([0, 0, 0, 2, 2, 1], [11, 12, 13, 14, 15, 16], confidences=[0.3, 0.5, 0.1, 0.2, 0.6, 0.9])
    ranks, own, right = outcomes(tree, [0, 2, 4], 99)
    assert ranks.tolist() == [1, 0, 2, 1, 0]
    assert own.tolist() == pytest.approx([0.3, 0.5, 0.1, 0.2, 0.6])
    assert right.tolist() == [False, True, False, True, False]
    # A child that was not verified is right if it is the target's own token.
    assert outcomes(tree, [0, 1], 16)[2].tolist() == [True, False, False, True]
    assert outcomes(tree_of([]), [0], 5)[0].size == 0
