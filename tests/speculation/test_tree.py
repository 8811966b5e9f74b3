"""Token trees, how they grow and what is accepted: by hand, against lists, and to the bit."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.kv.cache import new_cache
from jaxllm.models import decoder
from jaxllm.speculation.growth import LEAST, MOST, START
from jaxllm.speculation.token_tree import Fallback, Growing, PassTimes, verified_nodes, worthwhile
from jaxllm.speculation.tree import (
    CELLS,
    RANKS,
    Calibration,
    accepted_nodes,
    add_nodes,
    best_confidence,
    calibrated,
    deepest,
    grow,
    missing_tokens,
    new_tree,
    next_tips,
    outcomes,
    path_to,
)
from jaxllm.steps.trees import read_nodes
from tests.elastic.models import MODELS, in_blocks, scaled_params
from tests.kernels.switching import needs_native
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


# Confidences are the probabilities as they are.
NONE = Calibration.fresh().shifts()


def fed(*nodes, room=12):
    return np.isin(np.arange(room), nodes)


@every_variant
def test_the_most_confident_tips_are_next(variant):
    following, best = variant(next_tips, static_argnums=2), variant(best_confidence)
    tree = tree_of([0, 0, 1, 1, 2], confidences=[0.6, 0.4, 0.1, 0.8, 0.9])
    # Along their paths: 1, .6, .4, .06, .48, .36.
    tips, count = following(tree, fed(0, 1, 2), 2)
    chex.assert_shape([tips, count], [(2,), ()])
    chex.assert_type([tips, count], jnp.int32)
    assert (tips.tolist(), int(count)) == ([4, 5], 2)
    tips, count = following(tree, fed(0, 1, 2, 4, 5), 2)
    assert (tips.tolist(), int(count)) == ([3, 11], 1)
    assert float(best(tree, fed(0, 1, 2))) == pytest.approx(0.48)
    assert float(best(tree, fed(0, 1, 2, 3, 4, 5))) == 0
    assert int(following(tree, fed(0, 1, 2, 3, 4, 5), 3)[1]) == 0


@every_variant
def test_tokens_are_divided_fairly(variant):
    lacking, following = (
        variant(missing_tokens),
        variant(next_tips, static_argnums=2, static_argnames="pacer"),
    )
    # Two branches: 0-1-3-4 of three tokens at .6 · .9 · .8 = .432, and 0-2 of one at .3.
    tree = tree_of([0, 0, 1, 3], confidences=[0.6, 0.3, 0.9, 0.8])
    missing = lacking(tree, fed(0, 1, 3))
    chex.assert_shape(missing, (12,))
    # Equations 1 and 2: four drafted tokens, shares of .432 / .732 and .3 / .732.
    assert missing[jnp.array([4, 2])].tolist() == pytest.approx([4 * 0.432 / 0.732 - 3, 4 * 0.3 / 0.732 - 1])
    # The surer branch has had more than its share; the other one is next.
    assert following(tree, fed(0, 1, 3), 1, pacer="fair")[0].tolist() == [2]
    assert following(tree, fed(0, 1, 3), 1)[0].tolist() == [4]
    assert following(tree, fed(0, 1, 3), 1, pacer="order")[0].tolist() == [2]
    # A branch that is much surer gets more tokens than the other one before that is next.
    tree = tree_of([0, 0, 1, 3], confidences=[0.6, 0.05, 1.0, 1.0])
    assert following(tree, fed(0, 1, 3), 1, pacer="fair")[0].tolist() == [4]
    # Nothing is invented where no branch waits.
    assert int(following(tree, fed(0, 1, 2, 3, 4), 2, pacer="fair")[1]) == 0


@every_variant
def test_a_branch_divides_where_the_draft_is_torn(variant):
    tree, grow_tree = tree_of([0, 0]), variant(grow, static_argnames="branches")
    probabilities = np.array([[0.05, 0.45, 0.1, 0.4], [0.1, 0.1, 0.6, 0.2]], np.float32)
    grown = grow_tree(tree, jnp.array([1, 2]), jnp.int32(2), probabilities, NONE, branches=3)
    chex.assert_trees_all_equal_shapes_and_dtypes(grown, tree)
    # Node 1 goes on with tokens 1 and 3, node 2 with 2 alone; the best paths first.
    assert int(grown.count) == 6
    assert grown.parents[3:6].tolist() == [2, 1, 1]
    assert grown.tokens[3:6].tolist() == [2, 1, 3]
    np.testing.assert_allclose(grown.confidences[3:6], [0.3, 0.225, 0.2], rtol=1e-6)
    only = grow_tree(tree, jnp.array([1, 2]), jnp.int32(1), probabilities, NONE, branches=3)
    assert only.parents[3:5].tolist() == [1, 1]
    assert int(only.count) == 5


def test_where_the_room_ends_the_least_likely_are_left_out():
    tree = new_tree(jnp.int32(5), 3)
    probabilities = np.array([[0.3, 0.36, 0.34]], np.float32)
    grown = grow(tree, jnp.array([0]), jnp.int32(1), probabilities, NONE, branches=3, threshold=0.1)
    assert grown.tokens.tolist() == [5, 1, 2]


def test_the_threshold_by_hand():
    start = Fallback()
    assert start.alpha == START
    assert start.after(drafted=4, correct=4, confidence=0.008).alpha == pytest.approx(0.005)
    # alpha / Tc^((N - correct) / N)
    assert start.after(drafted=4, correct=3, confidence=0.0081).alpha == pytest.approx(0.01 / 0.0081**0.25)
    assert start.after(drafted=2, correct=0, confidence=1e-30).alpha == MOST
    assert Fallback(LEAST).after(drafted=0, correct=0, confidence=1.0).alpha == LEAST


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


# Native kernels read a tree to the bit as its tokens one by one: only so is a verified answer the target's
# own at every near-tie. So many rows make 4-bit products of prompts widen their weights; the tree begins
# inside a block of keys.
TREE_ROOM, PROMPT = 24, np.random.default_rng(0).integers(0, 64, (1, 23)).astype(np.int32)
READ_PARENTS = [0, 0, 1, 1, 3, 2, 6, 6, 5, 9, 9, 4, 12, 12, 10, 15, 16, 17, 18]
READ_TOKENS = np.random.default_rng(1).integers(0, 64, len(READ_PARENTS)).tolist()
# Mixtures choose experts by a product in floats, which XLA makes as it likes.
DENSE = [name for name, cfg in MODELS.items() if not cfg.experts]


def rows_of(cache, rows):
    """Keys and values of some rows."""
    return jax.tree.map(lambda each: np.asarray(each)[..., rows, :], (cache.keys, cache.values))


@pytest.mark.slow
@needs_native
@pytest.mark.usefixtures("shipped_compilations")
@pytest.mark.parametrize(("name", "bits"), [("llama", 4), *((name, 8) for name in DENSE)])
def test_a_tree_is_its_tokens_one_by_one(name, bits):
    cfg = dataclasses.replace(MODELS[name], window_tokens=128)
    params = in_blocks(cfg, scaled_params(cfg), bits)
    dtype = jnp.float32

    def read_logits(params, tokens, cache):
        hidden, cache = decoder.forward(params, tokens, cache, cfg=cfg, dtype=dtype)
        return decoder.logits(params, hidden[:, -1], cfg=cfg), cache

    read = jax.jit(read_logits)
    before = read(params, PROMPT, new_cache(cfg, batch=1, tokens=64, dtype=jnp.float16))[1]
    tree = tree_of(READ_PARENTS, READ_TOKENS, room=TREE_ROOM)
    nodes = np.arange(TREE_ROOM, dtype=np.int32)
    whole = jax.jit(functools.partial(read_nodes, cfg=cfg, dtype=dtype))
    found, after = whole(params, tree, nodes, tree.count, before)
    found = np.asarray(found)
    for leaf in (8, 11, 13, 19):
        cache, path = before, walk(READ_PARENTS, leaf)
        for node in path:
            token = np.array([[[7, *READ_TOKENS][node]]], np.int32)
            logits, cache = read(params, token, cache)
            np.testing.assert_array_equal(found[node], np.asarray(logits)[0])
        of_path = rows_of(after, PROMPT.shape[1] + np.array(path))
        alone = rows_of(cache, PROMPT.shape[1] + np.arange(len(path)))
        chex.assert_trees_all_equal(of_path, alone, strict=True)
