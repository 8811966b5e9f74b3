"""The pauses of drafting, and its new beginnings; the times of trees by size; and rows that drafts share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kv.cache import new_cache
from jaxllm.serving.speculation.costs import Payoff, SizeCost
from jaxllm.serving.speculation.drafters import with_rows
from tests.tiny import TINY


def tried(payoff, *, draft_ms, verify_ms, tokens, plain_ms):
    """The first passes, and the plain tokens that are tried after them."""
    passes = 0
    while payoff.worthwhile:
        payoff.drafted(draft_ms=draft_ms, verify_ms=verify_ms, tokens=tokens)
        passes += 1
    assert passes == 3
    assert payoff.pays is None
    assert payoff.paused_tokens == 4
    payoff.plain(took_ms=4 * plain_ms, tokens=4)
    assert payoff.worthwhile


def test_drafts_that_pay_go_on():
    payoff = Payoff()
    tried(payoff, draft_ms=2, verify_ms=10, tokens=3, plain_ms=9)
    assert payoff.pays
    assert payoff.rate == 250
    for _ in range(50):
        payoff.drafted(draft_ms=2, verify_ms=10, tokens=3)
        assert payoff.worthwhile
    # Plain tokens never take longer than verifications: a stall made them look slow.
    payoff = Payoff()
    tried(payoff, draft_ms=8, verify_ms=10, tokens=1, plain_ms=50)
    payoff.drafted(draft_ms=8, verify_ms=10, tokens=1)
    assert not payoff.worthwhile


def test_fewer_plain_tokens_are_tried_where_each_takes_long():
    tried = []
    for verify_ms in (5, 15, 30, 140):
        payoff = Payoff()
        while payoff.worthwhile:
            payoff.drafted(draft_ms=20, verify_ms=verify_ms, tokens=9)
        tried.append(payoff.paused_tokens)
    assert tried == [4, 2, 1, 1]


def test_drafts_that_cost_more_than_they_bring_pause_for_ever_longer():
    payoff, pauses = Payoff(), []
    tried(payoff, draft_ms=5, verify_ms=10, tokens=1, plain_ms=10)
    for turn in range(4):
        rounds = 0
        while payoff.worthwhile:
            payoff.drafted(draft_ms=5, verify_ms=10, tokens=1)
            rounds += 1
        # The first decision follows the passes that were there.
        assert rounds == (3 if turn else 1)
        assert not payoff.pays
        pause = 0
        while not payoff.worthwhile:
            payoff.plain(took_ms=10, tokens=1)
            pause += 1
        pauses.append(pause)
    assert pauses == [8, 16, 32, 64]
    assert payoff.rate == 100


# Times of trees by size: measured from any of them, and not unlearned by a stall.

SIZES = (8, 16, 32, 64)


def measured(base_s, node_s, sizes, *, noise=0.03):
    cost, draw = SizeCost(SIZES[-1]), np.random.default_rng(0)
    for nodes in sizes:
        cost.measured(nodes, (base_s + node_s * nodes) * (1 + noise * draw.standard_normal()))
    return cost


@pytest.mark.parametrize(("base_s", "node_s"), [(0.2, 0.0001), (0.01, 0.0005), (0.004, 0.0)])
def test_the_pass_and_its_nodes_are_told_apart(base_s, node_s):
    assert SizeCost(64).seconds(64) == 0
    cost = measured(base_s, node_s, SIZES * 10)
    for nodes in SIZES:
        assert cost.seconds(nodes) == pytest.approx(base_s + node_s * nodes, rel=0.1)


def test_what_one_size_says_of_the_machine_holds_for_all():
    cost = measured(0.2, 0.0002, SIZES * 5)
    before = [cost.seconds(nodes) for nodes in SIZES]
    # Twice as slow from here on, and only the largest is read.
    for _ in range(10):
        cost.measured(64, 2 * before[-1])
    after = [cost.seconds(nodes) for nodes in SIZES]
    assert after[-1] == pytest.approx(2 * before[-1], rel=0.1)
    assert after[0] == pytest.approx(2 * before[0], rel=0.15)


def test_a_stall_makes_no_size_look_cheap():
    cost = measured(0.2, 0.0002, SIZES * 5)
    cost.measured(64, 20.0)
    assert cost.seconds(8) > 0.8 * cost.seconds(64)
    for _ in range(10):
        cost.measured(64, 0.213)
    assert cost.seconds(8) == pytest.approx(0.2, rel=0.15)
    # More nodes never take less.
    expected = [cost.seconds(nodes) for nodes in SIZES]
    assert expected == sorted(expected)


# Keys and values go from one cache into another of the same model, whatever their layouts and lengths.

CFG, TOKENS = TINY, 5


def cache_of(tokens, *, stacked, seed):
    cache = new_cache(CFG, batch=1, tokens=tokens, dtype=jnp.float32, stacked=stacked)
    draw = np.random.default_rng(seed)
    drawn = jax.tree.map(lambda rows: draw.random(rows.shape, np.float32), (cache.keys, cache.values))
    return type(cache)(*drawn, length=jnp.int32(3), places=cache.places)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("others", [False, True])
def test_rows_of_each_layer(stacked, others):
    cache, other = cache_of(12, stacked=stacked, seed=0), cache_of(8, stacked=others, seed=1)
    found = with_rows(cache, other, TOKENS)
    assert int(found.length) == TOKENS
    assert found.places == cache.places
    for layer in range(CFG.layers):
        for ours, theirs, before in zip(
            found.past(layer).own, other.past(layer).own, cache.past(layer).own, strict=True
        ):
            assert ours.shape == before.shape
            np.testing.assert_array_equal(ours[..., :TOKENS, :], theirs[..., :TOKENS, :])
    # A copy: the other cache is donated afterwards.
    assert not any(np.shares_memory(a, b) for a in found.keys for b in other.keys)
