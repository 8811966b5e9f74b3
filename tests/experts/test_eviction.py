"""Eviction policies by hand."""

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.experts.prediction import POLICIES, Residents, eviction_policy, nearness


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
    scores = eviction_policy(policy)(THOSE, 1, 3, 10)
    assert np.argsort(scores, kind="stable").tolist() == order


def test_every_policy_is_tested():
    assert set(POLICIES) == {"frequency-nearness", "fifo", "lru", "lfu", "lfru"}


def test_of_equally_near_experts_the_rarest_goes():
    """Those of the layer at work, too, whose nearness is 0."""
    those = Residents(np.array([1, 1]), np.array([3.0, 2.0]), np.array([1, 2]), np.array([3, 4]))
    scores = eviction_policy("frequency-nearness")(those, 1, 4, 5)
    assert scores[1] < scores[0]


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="no eviction policy 'random'; take one of frequency-nearness"):
        eviction_policy("random")
