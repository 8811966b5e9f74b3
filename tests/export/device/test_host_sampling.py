"""Draws on a device are those of the live service."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.export.device import host_sampling
from jaxllm.export.device.host_sampling import HostChooser
from jaxllm.sampling import gumbel_noise, sample
from jaxllm.sampling_state import NO_TOKEN, Sampling, sampler_state
from jaxllm.speculation.token_tree import grown, root_alone
from jaxllm.speculation.tree import choices

VOCAB = 97
SAMPLINGS = {
    "greedy": Sampling(),
    "drawn": Sampling(temperature=1.3),
    "top-k": Sampling(temperature=0.8, top_k=5),
    "top-p": Sampling(temperature=1.0, top_p=0.6),
    "min-p": Sampling(temperature=2.0, min_p=0.2),
    "penalties": Sampling(
        temperature=0.5, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.3,
        logit_bias=((3, 4.0), (5, -np.inf)),
    ),
    "greedy penalties": Sampling(repetition_penalty=3.0, frequency_penalty=2.0),
    "all": Sampling(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, presence_penalty=1.0),
}  # fmt: skip


def drawn_logits(seed: int, rows: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (rows, VOCAB)).astype(np.float32)


@pytest.mark.parametrize(("seed", "drawn"), [(1 << 40 | 7, 3), ((1 << 64) - 1, 1 << 20)])
def test_random_numbers_are_jax_s(seed, drawn):
    key = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
    wrapped = jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32")
    whole = jax.random.bits(jax.random.fold_in(wrapped, drawn), (1, VOCAB), jnp.uint32)
    found = host_sampling.random_bits(key, drawn, np.arange(VOCAB))
    np.testing.assert_array_equal(found.view(np.uint32), np.asarray(whole)[0])
    noise = np.asarray(gumbel_noise(jnp.asarray(key), jnp.int32(drawn), (1, VOCAB)))[0]
    for tokens in (np.arange(VOCAB), np.array([3, 40, 96])):
        found = host_sampling.gumbel_noise(key, drawn, tokens)
        np.testing.assert_allclose(found, noise[tokens], rtol=1e-5, atol=1e-5)


def test_tokens_are_those_of_the_compiled_sampler():
    compiled = jax.jit(sample)
    for name, sampling in SAMPLINGS.items():
        live = here = sampler_state(sampling, [3, 5, 11], VOCAB, seed=1234567890123)
        for turn in range(40):
            logits = drawn_logits(turn)
            token, live = compiled(logits, live)
            ours, here = host_sampling.sample(logits[0], here)
            assert ours == int(token[0]), name
        assert int(here.drawn) == int(live.drawn) == 40
        np.testing.assert_array_equal(here.counts, np.asarray(live.counts))


def test_logits_that_are_not_finite_give_no_token():
    for bad, temperature in ((np.nan, 0.0), (np.inf, 0.0), (np.nan, 1.0), (np.inf, 1.0)):
        logits = drawn_logits(0)[0]
        logits[7] = bad
        state = sampler_state(Sampling(temperature=temperature), [], VOCAB, seed=0)
        assert host_sampling.choose(logits, state) == NO_TOKEN


@pytest.mark.parametrize("name", ["drawn", "penalties", "all"])
def test_tokens_of_a_tree_are_those_of_the_compiled_step(name):
    tree = grown(root_alone(4, 8), [7, 9, 7, 3], [0, 0, 1, 3], [0.9, 0.8, 0.7, 0.6])
    state = sampler_state(SAMPLINGS[name], [1, 2], VOCAB, seed=99)
    logits = drawn_logits(5, rows=8)
    wanted = np.asarray(jax.jit(choices)(tree, logits, state))
    found = HostChooser().of_tree(tree, logits, state)
    count = int(tree.count)
    assert found[:count].tolist() == wanted[:count].tolist()
