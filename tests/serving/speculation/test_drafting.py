"""Tests what verdicts teach, whose drafts a tree has, when drafting pauses, and what trees cost by size."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxllm.serving.ground.speculation_options import SpeculationOptions, TreeShape
from jaxllm.serving.runners.runner import Verdict
from jaxllm.serving.speculation.costs import DraftTimes, Payoff, SizeCost
from jaxllm.serving.speculation.drafter import Drafter, LookupDrafter, NgramDrafter
from jaxllm.serving.speculation.speculation import Speculation
from jaxllm.speculation.token_tree import Growing, grown, matching_tokens, root_alone, united


def forked():
    """One branch of two tokens, and a longer one that the draft believes less."""
    tokens, parents = [1, 2, *range(3, 11)], [0, 1, 0, *range(3, 10)]
    shares = [0.9, 0.8, *(0.1 * 0.6**each for each in range(8))]
    return grown(root_alone(0, 16), tokens, parents, shares)


def learned(tree, path, limit=64):
    how = SpeculationOptions(drafter="ngram", fallback="learned", alpha=0.01, lookup=False)
    rounds = Speculation(SimpleNamespace(), Scripted(), how)
    tokens = np.zeros(len(path), np.int32)
    rounds._learn(tree, Verdict(tokens, np.array(path, np.int32)), limit, 0.001, 0.01)
    return rounds._fallback.alpha


def test_the_threshold_learns_from_the_branch_that_matches():
    tree = forked()
    # All of the short branch is right, whatever the long one holds.
    assert learned(tree, [0, 1, 2]) == pytest.approx(0.005)
    # One of its two tokens, none of them, and three of the long one's eight.
    confidence = 0.8
    assert learned(tree, [0, 1]) == pytest.approx(0.01 / confidence**0.5)
    assert learned(tree, [0]) == pytest.approx(0.01 / confidence)
    assert learned(tree, [0, 3, 4, 5]) == pytest.approx(0.01 / confidence ** (5 / 8))
    # An answer that was full says nothing of the rest.
    assert learned(tree, [0, 1], limit=2) == 0.01
    assert [matching_tokens(tree, node) for node in (0, 1, 2, 3)] == [2, 2, 2, 8]


def test_a_line_is_the_one_that_promises_more():
    shape = TreeShape(nodes=(4, 8), room=16, tips=1, branches=1)
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    unsure = Scripted((9, 0, 0.1), (9, 1, 0.01))
    sure = Scripted((9, 0, 0.99), (8, 1, 0.98), (7, 2, 0.97), (6, 3, 0.96))
    # Who leaves trees out leaves out nothing else.
    both = Speculation(SimpleNamespace(), unsure, SpeculationOptions(model="draft", trees=shape)).drafter
    assert isinstance(both, LookupDrafter)
    assert both.grow(text, 3, Growing(0.01, 8), None)[0].tokens[:4].tolist() == [3, 4, 5, 6]
    # To the model, what the text knew is what the target said.
    both.follow([0, 1, 2], 7)
    assert unsure.followed == [([0], 4)]
    both = LookupDrafter(sure, shape)
    rates = dict(both._ngrams._rates)
    assert both.grow(text, 3, Growing(0.01, 8), None)[0].tokens[:4].tolist() == [3, 9, 8, 7]
    both.follow([0, 1], 4)
    assert sure.followed == [([0, 1], 4)]
    # What was not read says nothing of the text.
    assert both._ngrams._rates == rates


def test_nothing_is_looked_up_behind_the_end():
    text, drafter = [1, 2, 3, 4, 5, 6, 1, 2], NgramDrafter(TreeShape(nodes=(8,), room=8))

    def tokens(**changes):
        tree, _ = drafter.grow(text, 3, Growing(1e-6, 8, **changes), None)
        return np.asarray(tree.tokens)[: int(tree.count)].tolist()

    assert tokens() == [3, 4, 5, 6, 1, 2, 3]
    assert tokens(depth=2) == [3, 4, 5]
    assert tokens(stop_ids=(5, 9)) == [3, 4, 5]


# A model's drafts and what the text has said before: one tree, and each follows its own part of it.

SHAPE = TreeShape(nodes=(4, 8), room=16)


def tree(root, *nodes, room=16):
    """A tree of `(token, parent, confidence)`."""
    alone = root_alone(root, room)
    return grown(alone, *map(list, zip(*nodes, strict=True))) if nodes else alone


def nodes_of(tree):
    """Its nodes as `(token, parent, confidence)`, the root left aside."""
    count = int(tree.count)
    columns = (np.asarray(each)[1:count].tolist() for each in (tree.tokens, tree.parents, tree.confidences))
    return [(token, parent, round(confidence, 4)) for token, parent, confidence in zip(*columns, strict=True)]


def test_the_union_has_what_both_say_once():
    ours = tree(7, (1, 0, 0.5), (2, 0, 0.25), (3, 1, 0.2))
    other = tree(7, (2, 0, 0.75), (9, 1, 0.5), (1, 0, 0.4), (3, 3, 0.3), (4, 4, 0.1))
    union, places = united(ours, other)
    assert nodes_of(union) == [
        (1, 0, 0.5), (2, 0, 0.75), (3, 1, 0.3), (9, 2, 0.5), (4, 3, 0.1)
    ]  # fmt: skip
    assert places.tolist() == [0, 3, 1, 4, 2, 5]
    assert np.asarray(union.depths)[:6].tolist() == [0, 1, 1, 2, 2, 3]
    # The last node stands behind 7, 1 and 3.
    assert np.flatnonzero(np.asarray(union.ancestors)[5]).tolist() == [0, 1, 3, 5]
    assert nodes_of(ours) == [(1, 0, 0.5), (2, 0, 0.25), (3, 1, 0.2)]
    # A full tree gets room for the other.
    full = tree(0, *((token, token - 1, 0.9**token) for token in range(1, 4)), room=4)
    union, places = united(full, tree(0, (8, 0, 0.6), (9, 1, 0.4)))
    assert int(union.count) == 6 <= union.room
    assert nodes_of(union)[3:] == [(8, 0, 0.6), (9, 4, 0.4)]
    assert places.tolist() == [0, -1, -1, -1, 1, 2]


class Scripted(Drafter):
    """Proposes one tree, and remembers what became of it."""

    times = DraftTimes(0.25, 0.0625, 0.5, 3)

    def __init__(self, *nodes):
        self.nodes, self.followed, self.stepped = nodes, [], 0

    def grow(self, sequence, root, growing, cache):
        return tree(root, *self.nodes), cache

    def step(self):
        self.stepped += 1
        return True

    def follow(self, path, token):
        self.followed.append((list(path), token))


def test_each_follows_its_own_part():
    # The text says 5 6 behind 1 2; the model 5 8 or 4.
    other = Scripted((5, 0, 0.5), (8, 1, 0.25), (4, 0, 0.1))
    both = LookupDrafter(other, SHAPE)
    union = both.grow([1, 2, 5, 6, 1], 2, Growing(1e-3, 8), None)[0]
    assert nodes_of(union)[:4] == [(5, 0, 0.6), (8, 1, 0.25), (4, 0, 0.1), (6, 1, 0.36)]
    assert both.step()
    assert (both.times, other.stepped) == (other.times, 1)
    # 5 and 6 were right, and 1: to the model, 6 is what was said behind 5.
    both.follow([0, 1, 4], 1)
    # 5 and 8 were right.
    both.grow([1, 2, 5, 6, 1], 2, Growing(1e-3, 8), None)[0]
    both.follow([0, 1, 2], 3)
    assert other.followed == [([0, 1], 6), ([0, 1, 2], 3)]


def test_what_the_text_says_wrong_is_trusted_less():
    both = LookupDrafter(Scripted(), SHAPE)

    def trust():
        return nodes_of(both.grow([1, 2, 5, 6, 1], 2, Growing(1e-3, 8), None)[0])[0][2]

    first, trusts = trust(), []
    for path in [[0]] * 5 + [[0, 1]] * 9:
        both.follow(path, 9)
        trusts.append(trust())
    assert trusts[4] < 0.5 * first
    assert trusts[-1] > 0.4


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
