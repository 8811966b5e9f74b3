"""Expert-wise widths: bounds, order and search, on losses that are known."""

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.experts.bitwidth import lowering_order, search_widths, width_bounds


@pytest.mark.parametrize(
    ("losses", "bounds"),
    [
        ({2: 0.3, 4: 0.02, 8: 0.001}, (2, 4)),
        ({2: 0.3, 4: 0.08, 8: 0.001}, (4, 8)),
        ({2: 0.05, 4: 0.01, 8: 0.001}, (2, 2)),
    ],
)
def test_bounds(losses, bounds):
    assert width_bounds(losses, 0.05) == bounds


def test_a_loss_that_no_width_reaches_is_refused_with_the_best():
    with pytest.raises(ConfigError, match=r"at most 1\.00%: the least, by 8 bits for all experts, is 2\.50%"):
        width_bounds({2: 0.3, 4: 0.08, 8: 0.025}, 0.01)


def test_robust_and_busy_experts_are_lowered_first():
    """0.2 for a half of the visits costs less than 0.1 for a tenth; what nothing is lost by goes first."""
    importance = np.array([[0.2, 0.1, -0.01], [0.0, 0.3, 0.6]])
    shares = np.array([[0.5, 0.1, 0.4], [0.1, 0.5, 0.4]])
    assert lowering_order(importance, shares).tolist() == [2, 3, 0, 4, 1, 5]


def additive(importance, uniform):
    """A loss that adds up what lowered experts cost, and how often it was asked for."""
    asked = []

    def loss_of(bits):
        asked.append(bits)
        if np.all(bits == bits.flat[0]) and bits.flat[0] != 4:
            return uniform[int(bits.flat[0])]
        return 0.01 + float(importance[bits == 2].sum())

    return loss_of, asked


def test_as_many_are_lowered_as_fit():
    importance = np.arange(1, 17).reshape(2, 8) / 1000
    shares = np.full((2, 8), 1 / 8)
    loss_of, asked = additive(importance, {2: 0.146, 8: 0.0})
    plan = search_widths(importance, shares, loss_of, most_loss=0.05)
    # 1 + 2 + ... + 8 = 36 thousandths fit into 40, and 45 do not.
    assert (plan.lower, plan.upper, plan.lowered) == (2, 4, 8)
    assert plan.bits.tolist() == [[2] * 8, [4] * 8]
    assert plan.loss == pytest.approx(0.046)
    assert len(asked) == 3 + 4


def test_nothing_is_lowered_where_nothing_fits():
    importance = np.full((1, 4), 0.1)
    loss_of, _ = additive(importance, {2: 0.41, 8: 0.0})
    plan = search_widths(importance, np.full((1, 4), 0.25), loss_of, most_loss=0.05)
    assert (plan.lowered, plan.loss) == (0, 0.01)
    assert plan.bits.tolist() == [[4] * 4]


def test_all_are_lowered_where_all_fit():
    loss_of, asked = additive(np.zeros((1, 4)), {2: 0.01, 8: 0.0})
    plan = search_widths(np.zeros((1, 4)), np.full((1, 4), 0.25), loss_of, most_loss=0.05)
    assert (plan.lower, plan.upper, plan.lowered, len(asked)) == (2, 2, 4, 3)
    assert plan.bits.tolist() == [[2] * 4]


@pytest.mark.parametrize("most", [0, -0.1, float("nan"), float("inf")])
def test_losses_that_are_no_bounds_are_refused(most):
    with pytest.raises(ConfigError, match="must be positive"):
        search_widths(np.zeros((1, 2)), np.ones((1, 2)), lambda _: 0.0, most_loss=most)
