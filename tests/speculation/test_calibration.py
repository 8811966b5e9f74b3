"""Confidences follow what was accepted, by rank and probability."""

import numpy as np
import pytest

from jaxllm.speculation.tree import CELLS, RANKS, Calibration, calibrated, outcomes
from tests.speculation.test_tree import tree_of
from tests.variants import every_variant


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
