"""Tests how far trees grow and how much of them is verified: by hand, and beside the best fixed numbers."""

import numpy as np
import pytest

from jaxllm.speculation.token_tree import PassTimes, verified_nodes, worth

TIMES = PassTimes(run_s=0.004, branch_s=0.001, verify_s={8: 0.010, 16: 0.012, 24: 0.026}, free_s=0.017)


def test_what_a_run_has_to_bring_by_hand():
    # 100 tokens per second; a node takes (26 - 10) / 16 = 1 ms.
    asked = worth(TIMES, 100.0, tips=4, yields=0.5)
    assert (asked.run, asked.branch, asked.node) == pytest.approx((0.8, 0.4, 0.1))
    # Two runs of 4 + 4 ms fit.
    assert asked.free_runs == 2
    # Before anything is measured only likely branches grow.
    first = worth(TIMES, 0.0, tips=4, yields=1.0)
    assert (first.run, first.branch, first.free_runs) == (0.25, 0.0, 0)


def test_the_tree_that_is_verified_by_hand():
    sure = np.array([1.0, 0.9, 0.8, *(0.3,) * 21])
    # 8, 16 and 24 nodes promise 4.2, 6.6 and 9 tokens; a further one costs .25, or 1.75 tokens per ms.
    assert verified_nodes(sure, TIMES, 100.0) == 24
    assert verified_nodes(sure, TIMES, 400.0) == 16
    assert verified_nodes(sure, TIMES, 2000.0) == 8
    # Of a small tree no more than it has, also where nothing is known.
    assert [verified_nodes(sure[:count], TIMES, 0.0) for count in (2, 8, 9, 24, 40)] == [8, 8, 16, 24, 24]
    assert verified_nodes(sure[:9], TIMES, 1.0) == 16


def passes(share, run_s, verify_s, length, draw):
    """Tokens and seconds of a pass over a line of `length` drafted tokens, each right with a chance."""
    right = 0
    while right < length and draw.random() < share:
        right += 1
    size = min(nodes for nodes in verify_s if nodes > length)
    return right + 1, length * run_s + verify_s[size]


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("run_s", [0.0002, 0.004])
@pytest.mark.parametrize("base_s", [0.004, 0.05])
def test_the_rate_settles_at_the_best_fixed_length(share, run_s, base_s):
    """Lines whose tokens are right with a known chance: the rate that the decisions lead to is that of the
    best of all fixed lengths."""
    verify_s = {nodes: base_s + 0.0002 * nodes for nodes in (8, 16, 32, 64)}
    times = PassTimes(run_s=run_s, branch_s=0.0, verify_s=verify_s)

    def expected(length):
        size = min(nodes for nodes in verify_s if nodes > length)
        return sum(share**n for n in range(length + 1)) / (length * run_s + verify_s[size])

    best = max(map(expected, range(64)))
    draw, tokens, seconds = np.random.default_rng(0), 0.0, 0.0
    for _ in range(3000):
        rate = tokens / seconds if seconds else 0.0
        asked = worth(times, rate, tips=1, yields=share)
        length, confidence = 0, 1.0
        while length < 63 and confidence - asked.branch > asked.run:
            length, confidence = length + 1, confidence * share
        size = verified_nodes(share ** np.arange(length + 1), times, rate)
        got, _ = passes(share, run_s, verify_s, min(length, size - 1), draw)
        tokens, seconds = tokens + got, seconds + length * run_s + verify_s[size]
    assert tokens / seconds > 0.93 * best
