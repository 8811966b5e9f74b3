"""Token trees: by hand, and beside a plain one of lists."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.sampling import Sampling, sample, sampler_state
from jaxllm.speculation.token_tree import LEAST, Growing, PassTimes, verified_nodes, worthwhile
from jaxllm.speculation.tree import accepted_nodes, add_nodes, choices, deepest, new_tree, path_to
from tests.variants import every_variant

ROOM = 12
DIMS = chex.Dimensions(M=ROOM)


def tree_of(parents, tokens=None, confidences=None, room=ROOM):
    """A tree whose node i + 1 has `parents[i]`, added one at a time."""
    tree = new_tree(jnp.int32(7), room)
    for i, parent in enumerate(parents):
        one = [np.array([parent], np.int32), np.array([tokens[i] if tokens else i], np.int32)]
        own = np.array([confidences[i] if confidences else 0.5], np.float32)
        tree = add_nodes(tree, *one, own, np.array([True]), own)
    return tree


@st.composite
def parents_of(draw):
    count = draw(st.integers(0, ROOM - 1))
    return [draw(st.integers(0, i)) for i in range(count)]


def walk(parents, node):
    """The path from the root to a node, by hand."""
    path = [node]
    while path[-1]:
        path.append(parents[path[-1] - 1])
    return path[::-1]


@every_variant
def test_a_tree_by_hand(variant):
    #        0
    #      1   2
    #     3 4   5
    tree = tree_of([0, 0, 1, 1, 2], tokens=[11, 12, 13, 14, 15], confidences=[0.5, 0.25, 0.5, 0.25, 1.0])
    assert tree.tokens[:6].tolist() == [7, 11, 12, 13, 14, 15]
    assert tree.depths[:6].tolist() == [0, 1, 1, 2, 2, 2]
    assert tree.confidences[:6].tolist() == [1, 0.5, 0.25, 0.25, 0.125, 0.25]
    assert int(tree.count) == 6
    mask = np.asarray(tree.ancestors)
    assert [np.flatnonzero(row).tolist() for row in mask[:6]] == [
        [0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5],
    ]  # fmt: skip
    assert not mask[6:].any()
    # The target says 11 behind the root and 14 behind that; 15 behind 2 would be right, but 2 is not.
    chosen = np.array([11, 14, 15, 0, 99, 0] + [0] * 6, np.int32)
    accepted = variant(accepted_nodes)(tree, chosen)
    chex.assert_shape(accepted, DIMS["M"])
    assert np.flatnonzero(accepted).tolist() == [0, 1, 4]
    nodes, length = variant(path_to)(tree, variant(deepest)(tree, accepted))
    chex.assert_shape([nodes, length], [DIMS["M"], ()])
    chex.assert_type([nodes, length], jnp.int32)
    assert (nodes.tolist(), int(length)) == ([0, 1, 4] + [4] * 9, 3)


@settings(max_examples=40)
@given(parents=parents_of(), seed=st.integers(0, 2**31 - 1))
def test_laws(parents, seed):
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, 3, len(parents)).tolist()
    tree = tree_of(parents, tokens)
    mask = np.asarray(tree.ancestors)
    for node in range(ROOM):
        path = walk(parents, node) if node <= len(parents) else []
        assert np.flatnonzero(mask[node]).tolist() == path
        if path:
            nodes, length = path_to(tree, jnp.int32(node))
            assert nodes[: int(length)].tolist() == path
            assert int(tree.depths[node]) == len(path) - 1
            assert float(tree.confidences[node]) == 0.5 ** (len(path) - 1)
    chosen = draw.integers(0, 3, ROOM).astype(np.int32)
    known = [
        node <= len(parents)
        and all(tokens[child - 1] == chosen[parents[child - 1]] for child in walk(parents, node)[1:])
        for node in range(ROOM)
    ]
    accepted = accepted_nodes(tree, chosen)
    assert accepted.tolist() == known
    best = int(deepest(tree, accepted))
    assert known[best]
    assert all(len(walk(parents, node)) <= len(walk(parents, best)) for node in range(ROOM) if known[node])


@every_variant
def test_what_is_not_wanted_or_has_no_room_is_left_out(variant):
    tree = tree_of([0], room=4)
    parents, tokens = np.array([1, 0, 0, 1, 1], np.int32), np.arange(20, 25, dtype=np.int32)
    wanted = np.array([True, False, True, True, True])
    add = variant(add_nodes)
    half = np.full(5, 0.5, np.float32)
    tree = add(tree, parents, tokens, half, wanted, half)
    assert int(tree.count) == 4
    assert tree.tokens.tolist() == [7, 0, 20, 22]
    assert tree.parents.tolist() == [-1, 0, 1, 0]


# What is accepted: plain decoding's own answer, or tokens of the target's distribution


VOCAB, ACCEPTED_ROOM = 9, 8
PARENTS = [0, 0, 1, 1, 3, 2]
SAMPLINGS = {
    "greedy": Sampling(),
    "penalized": Sampling(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.4),
    "drawn": Sampling(temperature=0.8, top_p=0.9),
    "both": Sampling(temperature=1.2, top_k=6, repetition_penalty=1.5, frequency_penalty=0.3),
}


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_every_node_is_followed_by_what_plain_decoding_says_there(sampling):
    draw = np.random.default_rng(0)
    tokens = [3, 3, 1, 5, 3, 2]
    tree, one = tree_of(PARENTS, tokens, room=ACCEPTED_ROOM), jax.jit(sample)
    logits = draw.normal(size=(ACCEPTED_ROOM, VOCAB)).astype(np.float32) * 2
    state = sampler_state(sampling, [3, 4], VOCAB, seed=11)
    # The answer so far: two tokens, of which the root is the last.
    for said in ([0.0] * 7 + [9.0, 0.0], [0.0, 0.0, 0.0, 9.0] + [0.0] * 5):
        _, state = one(jnp.asarray([said], jnp.float32), state)
    found = jax.jit(choices)(tree, logits, state)
    chex.assert_shape(found, (ACCEPTED_ROOM,))
    chex.assert_type(found, jnp.int32)
    for node in range(len(PARENTS) + 1):
        after = state
        for child in walk(PARENTS, node)[1:]:
            forced = np.full((1, VOCAB), -1e9, np.float32)
            forced[0, tokens[child - 1]] = 1e9
            _, after = one(jnp.asarray(forced), after)
        assert int(found[node]) == int(one(logits[node : node + 1], after)[0][0]), node


TIMES = PassTimes(run_s=0.004, branch_s=0.001, verify_s={8: 0.010, 16: 0.012, 24: 0.026}, free_s=0.017)


def test_what_a_run_has_to_bring_by_hand():
    # 100 tokens per second; a node takes (26 - 10) / 16 = 1 ms.
    asked = worthwhile(Growing(0.5, 8, depth=3), TIMES, 100.0, tips=4, yields=0.5)
    assert (asked.run, asked.branch, asked.alpha) == pytest.approx((0.8, 0.4, 0.1))
    assert (asked.most, asked.depth) == (8, 3)
    # Two runs of 4 + 4 ms fit.
    assert asked.free_runs == 2
    # Before anything is measured only likely branches grow.
    first = worthwhile(Growing(0.5, 8), TIMES, 0.0, tips=4, yields=1.0)
    assert (first.run, first.branch, first.alpha, first.free_runs) == (0.25, 0.0, LEAST, 0)


def test_the_tree_that_is_verified_by_hand():
    sure = np.array([1.0, 0.9, 0.8, *(0.3,) * 21])
    # 8, 16 and 24 nodes promise 4.2, 6.6 and 9 tokens; a further one costs .25, or 1.75 tokens per ms.
    assert verified_nodes(sure, TIMES, 100.0) == 24
    assert verified_nodes(sure, TIMES, 400.0) == 16
    assert verified_nodes(sure, TIMES, 2000.0) == 8
    # Of a small tree no more than it has, also where nothing is known.
    assert [verified_nodes(sure[:count], TIMES, 0.0) for count in (2, 8, 9, 24, 40)] == [8, 8, 16, 24, 24]
    assert verified_nodes(sure[:9], TIMES, 1.0) == 16
