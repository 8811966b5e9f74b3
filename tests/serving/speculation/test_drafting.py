"""Tests what a verdict teaches, and how plain tokens come while drafting pauses."""

import dataclasses
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from jaxllm.serving.ground.speculation_options import SpeculationOptions, TreeShape
from jaxllm.serving.runners.runner import BatchRow, DecodedRow, Verdict
from jaxllm.serving.speculation import grower as grower_module
from jaxllm.serving.speculation.costs import DraftTimes
from jaxllm.serving.speculation.drafter import Drafter
from jaxllm.serving.speculation.grower import Confidence, Grower
from jaxllm.serving.speculation.host_tree import grown, matching_tokens, root_alone, united
from jaxllm.serving.speculation.lookup import LookupDrafter, NgramDrafter
from jaxllm.serving.speculation.speculation import Speculation
from jaxllm.speculation.token_tree import Growing

LEARNED = SpeculationOptions(drafter="ngram", fallback="learned", alpha=0.01, lookup=False)


@dataclasses.dataclass
class Cache:
    """Room, and how much of it is in use."""

    capacity_tokens: int = 128
    length: int = 0


class Silent(Drafter):
    """A drafter that never speaks, and remembers how far it was to look."""

    times = DraftTimes(run_s=0.001, step_s=0.001)

    def __init__(self):
        self.asked = []

    def grow(self, sequence, root, growing, cache):
        self.asked.append((growing.depth, growing.stop_ids))
        return root_alone(root, 16), cache


class Target:
    """Says 1, 2, 3 and so on, at most `block` tokens a call."""

    idle_read_s, lock, block = 0.0, threading.RLock(), 8

    def __init__(self):
        self.asked = []

    def decode_limit(self, pace, remaining):
        return min(pace, self.block, remaining)

    def decode(self, row):
        self.asked.append(row.limit)
        said = np.arange(1, row.limit + 1) + int(row.token[0])
        return DecodedRow(said.tolist(), row.cache, row.sampler)

    def expect(self, tokens):
        pass


def forked():
    """One branch of two tokens, and a longer one that the draft believes less."""
    tokens, parents = [1, 2, *range(3, 11)], [0, 1, 0, *range(3, 10)]
    shares = [0.9, 0.8, *(0.1 * 0.6**each for each in range(8))]
    return grown(root_alone(0, 16), tokens, parents, shares)


def learned(tree, path, limit=64):
    rounds = Speculation(Target(), Silent(), LEARNED)
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


def test_a_tree_as_published_is_verified_whole():
    sure = np.array([1.0, 0.9, *(0.01,) * 10])
    by_cost = Speculation(Target(), Silent(), LEARNED)
    for nodes, took_s in ((8, 0.01), (16, 1.0), (8, 0.01), (16, 1.0)):
        by_cost._verify_cost.measured(nodes, took_s)
    by_cost.payoff.drafted(draft_ms=1, verify_ms=10, tokens=2)
    assert by_cost._size(sure) == 8
    whole = Speculation(Target(), Silent(), SpeculationOptions.published(drafter="ngram"))
    whole._verify_cost = by_cost._verify_cost
    assert [whole._size(sure[:count]) for count in (2, 8, 9, 12)] == [8, 8, 16, 16]


def test_plain_tokens_come_by_the_dispatch_while_drafting_pauses():
    silent = Silent()
    rounds = Speculation(Target(), silent, SpeculationOptions(drafter="ngram", lookup=False))
    rounds.payoff.plain(took_ms=5, tokens=1)
    for _ in range(3):
        rounds.payoff.drafted(draft_ms=5, verify_ms=10, tokens=1)
    assert rounds.payoff.paused_tokens == 8
    rounds.payoff.plain(took_ms=1e-3, tokens=1)
    # Of a sampler drafting asks its temperature alone.
    row = BatchRow(
        token=np.array([0], np.int32), cache=Cache(), sampler=SimpleNamespace(temperature=np.float32(0)),
        stop_ids=np.array([5, 9, -1, -1], np.int32), limit=32,
    )  # fmt: skip
    found = rounds.decode(row, [7])
    # As many as drafting still pauses for, and not one by one.
    assert rounds.runner.asked == [7]
    assert (len(found.tokens), rounds.counts.plain_tokens) == (7, 7)
    assert rounds.payoff.worthwhile
    # A draft that says nothing is followed by one token. The rest of an answer bounds its drafts.
    rounds.decode(dataclasses.replace(row, limit=7), [7])
    assert rounds.runner.asked == [7, 1]
    assert silent.asked == [(6, (5, 9))]


# All that drafting asks of a sampler.


def test_a_line_is_the_one_that_promises_more():
    shape = TreeShape(nodes=(4, 8), room=16, tips=1, branches=1)
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    unsure = Scripted((9, 0, 0.1), (9, 1, 0.01))
    sure = Scripted((9, 0, 0.99), (8, 1, 0.98), (7, 2, 0.97), (6, 3, 0.96))
    # Who leaves trees out leaves out nothing else.
    both = Speculation(Target(), unsure, SpeculationOptions(model="draft", trees=shape)).drafter
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


def test_a_run_that_had_to_wait_is_not_the_last(monkeypatch):
    """Runs while weights are read end before the target goes on, so far as their time is known."""
    clock = [0.0]
    monkeypatch.setattr(grower_module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def drafting(took_s):
        def draft(params, tree, fed, cache, end):
            clock[0] += took_s
            fed = fed.copy()
            fed[0] = True
            return tree, fed, cache, np.int32(1)

        return draft

    model = SimpleNamespace(params=None, bucket=lambda family, **fields: family)
    runner = SimpleNamespace(model=model, buckets=SimpleNamespace())
    grower = Grower(runner, TreeShape(nodes=(8,), room=8), Confidence())
    for took_s, hidden in ((9.0, False), (0.01, False), (0.01, False), (5.0, True)):
        runner.buckets.get = lambda bucket, took_s=took_s: drafting(took_s)
        grower.grow(root_alone(1, 8), np.zeros(8, bool), Cache(), Growing(0.1, 8), 1, hidden=hidden)
    assert grower.times.step_s < 0.1


# A model's drafts beside what the text has said before: one tree, and each follows its own part of it.


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
    # Nothing was.
    both.grow([1, 2, 5, 6, 1], 2, Growing(1e-3, 8), None)[0]
    both.follow([0], 9)
    assert other.followed == [([0, 1], 6), ([0, 1, 2], 3), ([0], 9)]


def test_what_the_text_says_wrong_is_trusted_less():
    both = LookupDrafter(Scripted(), SHAPE)

    def trust():
        return nodes_of(both.grow([1, 2, 5, 6, 1], 2, Growing(1e-3, 8), None)[0])[0][2]

    first = trust()
    for _ in range(5):
        both.follow([0], 9)
        trust()
    assert trust() < 0.5 * first
    for _ in range(9):
        both.follow([0, 1], 9)
        trust()
    assert trust() > 0.4
