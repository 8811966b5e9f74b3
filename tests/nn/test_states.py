"""Short convolutions and the delta rule equal their definitions, however tokens are cut, padded or packed."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.nn import states
from jaxllm.nn.states import DeltaInputs, gated_delta_rule, short_convolution
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
