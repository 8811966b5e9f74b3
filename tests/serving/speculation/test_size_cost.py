"""Tests the times of trees by size: learned from any of them, and not unlearned by a stall."""

import numpy as np
import pytest

from jaxllm.serving.speculation.size_cost import SizeCost

SIZES = (8, 16, 32, 64)


def learned(base_s, node_s, sizes, *, noise=0.03):
    cost, draw = SizeCost(SIZES[-1]), np.random.default_rng(0)
    for nodes in sizes:
        cost.measured(nodes, (base_s + node_s * nodes) * (1 + noise * draw.standard_normal()))
    return cost


def test_nothing_is_known_before():
    assert SizeCost(64).seconds(64) == 0


@pytest.mark.parametrize(("base_s", "node_s"), [(0.2, 0.0001), (0.01, 0.0005), (0.004, 0.0)])
def test_the_pass_and_its_nodes_are_told_apart(base_s, node_s):
    cost = learned(base_s, node_s, SIZES * 10)
    for nodes in SIZES:
        assert cost.seconds(nodes) == pytest.approx(base_s + node_s * nodes, rel=0.1)


def test_what_one_size_says_of_the_machine_holds_for_all():
    cost = learned(0.2, 0.0002, SIZES * 5)
    before = [cost.seconds(nodes) for nodes in SIZES]
    # Twice as slow from here on, and only the largest is read.
    for _ in range(10):
        cost.measured(64, 2 * before[-1])
    after = [cost.seconds(nodes) for nodes in SIZES]
    assert after[-1] == pytest.approx(2 * before[-1], rel=0.1)
    assert after[0] == pytest.approx(2 * before[0], rel=0.15)


def test_a_stall_makes_no_size_look_cheap():
    cost = learned(0.2, 0.0002, SIZES * 5)
    cost.measured(64, 20.0)
    assert cost.seconds(8) > 0.8 * cost.seconds(64)
    for _ in range(10):
        cost.measured(64, 0.213)
    assert cost.seconds(8) == pytest.approx(0.2, rel=0.15)
    # More nodes never take less.
    expected = [cost.seconds(nodes) for nodes in SIZES]
    assert expected == sorted(expected)
