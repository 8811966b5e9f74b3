"""Nodes of a token tree read what their own path gives, and only the accepted path stays in the states."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.kv.states import StateNodes, States
from jaxllm.nn.states import DeltaInputs, after_path, tree_convolution, tree_delta_rule
from tests.nn.state_definitions import convolution, delta_rule
from tests.quick_jit import jit

# The nodes of each node's path; one more node is not there.
PATHS = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4], [0, 2, 5], [0, 2, 5, 6]]
NODES, ROOM = len(PATHS), len(PATHS) + 1
HEADS, KEY, VALUE, CHANNELS, TAPS = 2, 3, 5, 4, 4


def ancestors():
    found = np.zeros((ROOM, ROOM), bool)
    for node, path in enumerate(PATHS):
        found[node, path] = True
    return found


def drawn(*shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def delta_nodes():
    nodes = DeltaInputs(
        q=drawn(1, ROOM, HEADS, KEY, seed=0),
        k=drawn(1, ROOM, HEADS, KEY, seed=1) / 2,
        v=drawn(1, ROOM, HEADS, VALUE, seed=2),
        log_decay=-np.exp(drawn(1, ROOM, HEADS, seed=3)),
        correction=1 / (1 + np.exp(drawn(1, ROOM, HEADS, seed=4))),
    )
    for each in jax.tree.leaves(nodes):
        # As padding is masked.
        each[:, NODES:] = 0
    return nodes


def along(nodes, path):
    return jax.tree.map(lambda each: each[:, path], nodes)


def test_nodes_read_their_own_paths():
    x, before = drawn(1, ROOM, CHANNELS, seed=5), drawn(1, TAPS - 1, CHANNELS, seed=6)
    # What products leave in padding may be anything.
    x[:, NODES:] = np.nan
    kernel, matrix = drawn(CHANNELS, TAPS, seed=7), drawn(1, HEADS, KEY, VALUE, seed=8)
    convolved = jit(tree_convolution)(x, before, kernel, ancestors())
    read = jit(tree_delta_rule)(delta_nodes(), matrix, ancestors())
    for node, path in enumerate(PATHS):
        expected = convolution(x[:, path], before, kernel)[:, -1]
        assert np.abs(convolved[:, node] - expected).max() < 1e-5, f"node {node}"
        expected = delta_rule(along(delta_nodes(), path), matrix)[0][:, -1]
        assert np.abs(read[:, node] - expected).max() < 1e-5, f"node {node}"


def test_the_accepted_path_stays():
    layers, of = 3, delta_nodes()
    inputs = drawn(layers, 1, TAPS - 1, CHANNELS, seed=9)
    matrix = drawn(layers, 1, HEADS, KEY, VALUE, seed=10)
    x = drawn(layers, 1, ROOM, CHANNELS, seed=11)
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
