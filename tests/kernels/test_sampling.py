"""Tests the kernels that choose tokens: the largest, and one that is drawn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.kernels import native_attention
from jaxllm.sampling import choose, gumbel_noise, largest
from jaxllm.sampling_state import NO_TOKEN, Sampling, sampler_state
from tests.kernels.drawing import answers
from tests.kernels.switching import fall_back, needs_native

# Without subnormals: XLA takes them for zeros.
SPECIAL = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 1e-37, 3e38]


@pytest.mark.slow
@settings(max_examples=50)
@given(st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=700), st.integers(1, 3))
def test_the_largest_is_that_of_argmax(values, rows):
    """Of equal ones the first, of NaN the first, whatever else there is."""
    x = np.stack([np.roll(np.array(values, np.float32), row) for row in range(rows)])
    got = np.asarray(largest(jnp.asarray(x)))
    np.testing.assert_array_equal(got, np.argmax(x, axis=-1))
    with pytest.MonkeyPatch.context() as patch:
        fall_back(patch)
        np.testing.assert_array_equal(largest(jnp.asarray(x)), got)


@needs_native
@pytest.mark.parametrize("width", [1, 15, 16, 255, 256, 257, 512, 32000])
def test_the_largest_is_found_wherever_it_is(width):
    draw = np.random.default_rng(width)
    x = draw.normal(size=(30, width)).astype(np.float32)
    x[np.arange(30), draw.integers(0, width, 30)] = 50
    for kernels, got in answers(native_attention.largest, x).items():
        np.testing.assert_array_equal(got, np.argmax(x, axis=-1), err_msg=kernels)


def key_of(seed, drawn):
    return jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), drawn)


SEEDS = [[0, 0], [1, 2], [0xFFFFFFFF, 0xFFFFFFFF], [0x80000000, 77]]


@pytest.mark.parametrize("seed", SEEDS, ids=str)
def test_noise_is_that_of_jax(seed):
    """To the bit."""
    seed, drawn, shape = np.array(seed, np.uint32), np.int32(3), (2, 5000)
    expected = np.asarray(jax.jit(lambda s, n: jax.random.gumbel(key_of(s, n), shape))(seed, drawn))
    np.testing.assert_array_equal(jax.jit(lambda s, n: gumbel_noise(s, n, shape))(seed, drawn), expected)


def options_of(shape, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=(1, 2), drawn=0):
    state = sampler_state(Sampling(temperature=1.0), (), shape[1], 0)
    return dataclasses.replace(
        state, counts=np.zeros(shape, np.int32), temperature=np.float32(temperature),
        top_k=np.int32(top_k), top_p=np.float32(top_p), min_p=np.float32(min_p),
        seed=np.array(seed, np.uint32), drawn=np.int32(drawn),
    )  # fmt: skip


def drawn_by(state):
    floats = np.array([state.temperature, state.top_p, state.min_p])
    ints = np.array([state.top_k, state.drawn])
    return lambda x: native_attention.draw(x, floats, ints, state.seed)


@needs_native
@settings(max_examples=80)
@given(st.data())
def test_tokens_are_drawn_as_without_kernels(data):
    """With any filters, from flat and from peaked logits with equal and forbidden ones among them."""
    rows, width = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 15, 300, 5000]))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    x = random.normal(size=(rows, width)).astype(np.float32) * data.draw(st.sampled_from([0.0, 0.1, 3, 30]))
    # Zeros of one sign: the other one is less.
    x = (np.round(x, 1) if data.draw(st.booleans()) else x) + np.float32(0)
    x[:, 1:][random.random((rows, width - 1)) < data.draw(st.sampled_from([0.0, 0.5]))] = -np.inf
    state = options_of(
        x.shape, temperature=data.draw(st.sampled_from([1e-6, 0.3, 1.0, 2.0])),
        top_k=data.draw(st.sampled_from([0, 1, 5, 40, 400, width])),
        top_p=data.draw(st.sampled_from([1.0, 1e-6, 0.37, 0.93])),
        min_p=data.draw(st.sampled_from([0.0, 0.053, 1.0])),
        seed=random.integers(0, 2**32, 2, dtype=np.uint32), drawn=data.draw(st.integers(0, 2**31 - 1)),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        fall_back(patch)
        expected = np.asarray(jax.jit(lambda x: choose(x, state))(x))
    for kernels, got in answers(drawn_by(state), x).items():
        np.testing.assert_array_equal(got, expected, err_msg=kernels)


@needs_native
@pytest.mark.parametrize("wrong", [np.nan, -np.nan, np.inf])
def test_no_token_is_drawn_from_what_is_not_finite(wrong):
    x = np.random.default_rng(0).normal(size=(3, 700)).astype(np.float32)
    x[1, 333], x[2] = wrong, -np.inf
    for got in answers(drawn_by(options_of(x.shape, top_p=0.9)), x).values():
        assert got[0] >= 0
        assert (got[1:] == NO_TOKEN).all()


@needs_native
def test_tokens_are_drawn_by_their_probabilities():
    """Those that are kept, by a test of goodness of fit."""
    logits = np.log(np.array([[0.4, 0.3, 0.15, 0.1, 0.05]], np.float32))

    def run(n, state):
        return choose(jnp.asarray(logits), dataclasses.replace(state, drawn=n))

    for options, kept in (({}, 5), ({"top_p": 0.8}, 3), ({"top_k": 2}, 2)):
        state = options_of(logits.shape, **options)
        count = np.bincount(
            np.asarray(jax.vmap(run, (0, None))(jnp.arange(20_000), state)).ravel(), minlength=5
        )
        share = np.exp(logits[0, :kept]) / np.exp(logits[0, :kept]).sum()
        assert not count[kept:].any()
        assert ((count[:kept] - 20_000 * share) ** 2 / (20_000 * share)).sum() < 25
