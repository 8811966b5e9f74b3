"""Short convolutions and the delta rule equal their definitions, however tokens are cut, padded or packed."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kv.states import StateNodes, States
from jaxllm.nn import states
from jaxllm.nn.states import (
    DeltaInputs,
    after_path,
    gated_delta_rule,
    short_convolution,
    tree_convolution,
    tree_delta_rule,
)
from tests.nn.state_definitions import convolution, delta_rule
from tests.quick_jit import jit

BATCH, COUNT, HEADS, KEY, VALUE = 2, 21, 3, 4, 6


def delta_inputs(count=COUNT):
    draw = np.random.default_rng(0)

    def normal(*shape):
        return draw.normal(size=(BATCH, count, HEADS, *shape)).astype(np.float32)

    k = normal(KEY)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    return DeltaInputs(normal(KEY), k, normal(VALUE), -np.exp(normal()), 1 / (1 + np.exp(normal())))


def some_matrix():
    return np.random.default_rng(3).normal(size=(BATCH, HEADS, KEY, VALUE)).astype(np.float32)


def computed(size, tokens, starts=None):
    """The delta rule by chunks of `size` tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "DELTA_CHUNK", size)
        # A new function, as what was compiled has another size of chunks.
        return jit(lambda *of: gated_delta_rule(*of))(tokens, some_matrix(), starts)


@pytest.mark.parametrize(("size", "count"), [(4, COUNT), (7, COUNT), (64, COUNT), (64, 1)])
def test_chunks_of_the_delta_rule(size, count):
    tokens = delta_inputs(count)
    expected, after = delta_rule(tokens, some_matrix())
    got, state = computed(size, tokens)
    assert np.abs(got - expected).max() < 1e-4
    assert np.abs(state - after).max() < 1e-4


def test_equal_keys_that_hardly_decay():
    # Powers of the triangular system would grow to 1e18 here.
    tokens = delta_inputs(count=64)
    k = np.zeros_like(tokens.k)
    k[..., 0] = 1.0
    tokens = DeltaInputs(tokens.q, k, tokens.v, 1e-3 * tokens.log_decay, np.ones_like(tokens.correction))
    expected, _ = delta_rule(tokens, some_matrix())
    assert np.abs(computed(64, tokens)[0] - expected).max() < 1e-3


@pytest.mark.parametrize("size", [4, 64])
def test_documents_of_the_delta_rule_begin_anew(size):
    tokens, begins = delta_inputs(), [0, 3, 4, 17, COUNT]
    starts = np.zeros((BATCH, COUNT), np.int32)
    for first, end in itertools.pairwise(begins):
        starts[:, first:end] = first
    got, _ = computed(size, tokens, starts)
    for first, end in itertools.pairwise(begins):
        part = jax.tree.map(lambda each, first=first, end=end: each[:, first:end], tokens)
        expected, _ = delta_rule(part, np.zeros((BATCH, HEADS, KEY, VALUE)))
        assert np.abs(got[:, first:end] - expected).max() < 1e-4, f"document at {first}"


def test_convolutions_go_on_where_they_were_cut():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(BATCH, COUNT, 5)).astype(np.float32)
    kernel = draw.normal(size=(5, 4)).astype(np.float32)
    before, run = np.zeros((BATCH, 3, 5), np.float32), jit(short_convolution)
    expected = convolution(x, before, kernel)
    for cut in (1, 2, 9, COUNT - 1):
        # What follows the first part is padding, which must not be seen.
        first, state = run(x, before, kernel, np.int32(cut))
        rest = np.concatenate([x[:, cut:], x[:, :cut]], axis=1)
        second, state = run(rest, state, kernel, np.int32(COUNT - cut))
        got = np.concatenate([first[:, :cut], second[:, : COUNT - cut]], axis=1)
        assert np.abs(got - expected).max() < 1e-5
        assert np.array_equal(state, x[:, -3:])


def test_convolutions_of_documents():
    starts = np.array([[0, 0, 2, 2, 2, 5]], np.int32)
    ones = jnp.ones((1, 6, 1)), jnp.zeros((1, 2, 1)), jnp.ones((1, 3))
    out, _ = jit(short_convolution)(*ones, np.int32(6), starts)
    assert out[0, :, 0].tolist() == [1, 2, 1, 2, 3, 1]


# Trees: nodes read what their own path gives, and only the accepted path stays


# The nodes of each node's path; one more node is not there.
PATHS = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4], [0, 2, 5], [0, 2, 5, 6]]
NODES, ROOM = len(PATHS), len(PATHS) + 1
TREE_HEADS, TREE_KEY, TREE_VALUE, CHANNELS, TAPS = 2, 3, 5, 4, 4


def ancestors():
    found = np.zeros((ROOM, ROOM), bool)
    for node, path in enumerate(PATHS):
        found[node, path] = True
    return found


def normal_of(*shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def delta_nodes():
    nodes = DeltaInputs(
        q=normal_of(1, ROOM, TREE_HEADS, TREE_KEY, seed=0),
        k=normal_of(1, ROOM, TREE_HEADS, TREE_KEY, seed=1) / 2,
        v=normal_of(1, ROOM, TREE_HEADS, TREE_VALUE, seed=2),
        log_decay=-np.exp(normal_of(1, ROOM, TREE_HEADS, seed=3)),
        correction=1 / (1 + np.exp(normal_of(1, ROOM, TREE_HEADS, seed=4))),
    )
    for each in jax.tree.leaves(nodes):
        # As padding is masked.
        each[:, NODES:] = 0
    return nodes


def along(nodes, path):
    return jax.tree.map(lambda each: each[:, path], nodes)


def test_nodes_read_their_own_paths():
    x, before = normal_of(1, ROOM, CHANNELS, seed=5), normal_of(1, TAPS - 1, CHANNELS, seed=6)
    # What products leave in padding may be anything.
    x[:, NODES:] = np.nan
    kernel, matrix = normal_of(CHANNELS, TAPS, seed=7), normal_of(1, TREE_HEADS, TREE_KEY, TREE_VALUE, seed=8)
    convolved = jit(tree_convolution)(x, before, kernel, ancestors())
    read = jit(tree_delta_rule)(delta_nodes(), matrix, ancestors())
    for node, path in enumerate(PATHS):
        expected = convolution(x[:, path], before, kernel)[:, -1]
        assert np.abs(convolved[:, node] - expected).max() < 1e-5, f"node {node}"
        expected = delta_rule(along(delta_nodes(), path), matrix)[0][:, -1]
        assert np.abs(read[:, node] - expected).max() < 1e-5, f"node {node}"


def test_the_accepted_path_stays():
    layers, of = 3, delta_nodes()
    inputs = normal_of(layers, 1, TAPS - 1, CHANNELS, seed=9)
    matrix = normal_of(layers, 1, TREE_HEADS, TREE_KEY, TREE_VALUE, seed=10)
    x = normal_of(layers, 1, ROOM, CHANNELS, seed=11)
    every = [jnp.stack([each] * layers) for each in (of.k, of.v, of.log_decay, of.correction)]
    states = States(jnp.asarray(inputs), jnp.asarray(matrix), StateNodes(jnp.asarray(x), *every))
    for path in (PATHS[0], PATHS[-1]):
        # Beyond the count stands anything.
        padded = np.array([*path, *[4] * (ROOM - len(path))], np.int32)
        after = jit(after_path)(states, padded, np.int32(len(path)))
        assert after.nodes is None
        for layer in range(layers):
            _, expected = delta_rule(along(of, path), matrix[layer])
            assert np.abs(after.matrix[layer] - expected).max() < 1e-5
            window = np.concatenate([inputs[layer], x[layer][:, path]], axis=1)
            assert np.array_equal(after.inputs[layer], window[:, -(TAPS - 1) :])
