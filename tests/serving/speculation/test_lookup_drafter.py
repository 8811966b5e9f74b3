"""A model's drafts beside what the text has said before: one tree, and each follows its own part of it."""

import numpy as np

from jaxllm.serving.ground.speculation_options import TreeShape
from jaxllm.serving.speculation.drafter import Growing
from jaxllm.serving.speculation.host_tree import grown, root_alone, united
from jaxllm.serving.speculation.lookup_drafter import LookupDrafter

SHAPE = TreeShape(nodes=(4, 8), room=16)


def tree(root, *nodes, room=16):
    """A tree of `(token, parent, confidence)`."""
    return (
        grown(root_alone(root, room), *map(list, zip(*nodes, strict=True)))
        if nodes
        else root_alone(root, room)
    )


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


def test_a_full_tree_gets_room_for_the_other():
    ours = tree(0, *((token, token - 1, 0.9**token) for token in range(1, 4)), room=4)
    union, places = united(ours, tree(0, (8, 0, 0.6), (9, 1, 0.4)))
    assert int(union.count) == 6 <= union.room
    assert nodes_of(union)[3:] == [(8, 0, 0.6), (9, 4, 0.4)]
    assert places.tolist() == [0, -1, -1, -1, 1, 2]


class Scripted:
    """Proposes one tree, and remembers what became of it."""

    run_s, branch_s, step_s, steps = 0.25, 0.0625, 0.5, 3

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
    assert (both.step_s, both.steps, other.stepped) == (0.5, 3, 1)
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
