"""Portable sampling chooses the tokens that `jaxllm.sampling` chooses, in a loop and without one."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import sampling
from jaxllm.export.folder_format.signature import STOP_IDS, control_shapes, controls
from jaxllm.export.steps import exported
from jaxllm.export.steps.exported import one_by_one
from jaxllm.sampling import by_loop
from jaxllm.sampling_state import NO_TOKEN, Sampling, sampler_state
from jaxllm.serving.ground.text_stream import MAX_STOP_IDS

VOCAB = 61
STOPS = np.full(STOP_IDS, -1, np.int32)
ROWS = np.random.default_rng(0).normal(size=(6, 1, VOCAB)).astype(np.float32) * 3
# Ties at the threshold of every filter.
ROWS[1, 0, :20] = 1.5
CASES = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.05, top_k=1),
    Sampling(temperature=1.5, top_k=7, top_p=0.8, min_p=0.03),
    Sampling(temperature=1.0, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
    Sampling(repetition_penalty=3.0, logit_bias=((3, -np.inf), (5, 4.0))),
]


@pytest.fixture(scope="module")
def chosen():
    """The choices of both modules, compiled once for all options."""

    def each(repeat):
        def choose(row, given, done):
            return exported.choose(row, given, given["counts"], done, repeat)

        return jax.jit(choose)

    return each(by_loop), each(one_by_one), jax.jit(sampling.choose)


def test_the_same_tokens(chosen):
    looped, unrolled, wanted = chosen
    for options, (index, row) in itertools.product(CASES, enumerate(ROWS)):
        state = sampler_state(options, [1, 2, 3], VOCAB, 77 + (index << 40))
        state.counts[0, :4] = 2
        given, done = controls(state, STOPS, 1), jnp.int32(3)
        later = wanted(row, dataclasses.replace(state, drawn=np.int32(3)))
        assert looped(row, given, done) == unrolled(row, given, done) == later, options


def test_logits_that_are_no_numbers_give_no_token(chosen):
    looped, unrolled, _ = chosen
    row = ROWS[0].copy()
    row[0, 9] = np.nan
    for options in (Sampling(), Sampling(temperature=1.0)):
        given = controls(sampler_state(options, [], VOCAB, 1), STOPS, 1)
        assert looped(row, given, jnp.int32(0)) == unrolled(row, given, jnp.int32(0)) == NO_TOKEN


def test_controls_have_their_shapes():
    given = controls(sampler_state(Sampling(seed=3), [1], VOCAB, 3), STOPS, 4)
    assert {name: (each.shape, each.dtype) for name, each in given.items()} == {
        name: (shape, np.dtype(dtype)) for name, (shape, dtype) in control_shapes(VOCAB).items()
    }
    assert STOP_IDS == MAX_STOP_IDS
