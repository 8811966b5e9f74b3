"""States of samplers and random logits, for tests."""

import dataclasses

import chex
import numpy as np

from jaxllm.sampling import Sampling, filtered, keep_top_k, keep_top_p, penalize, sample, sampler_state
from tests.quick_jit import jit

V = 8
DIMS = chex.Dimensions(B=1, V=V)
sample_jit, top_k_jit, top_p_jit = (jit(function) for function in (sample, keep_top_k, keep_top_p))


def drawn_from(logits, state):
    """What `sample` draws from: penalties, temperature, filters."""
    return filtered(penalize(logits, state) / state.temperature, state)


kept_logits = jit(drawn_from)


def state_of(prompt=(), answer=(), *, vocab=V, seed=0, **sampling):
    state = sampler_state(Sampling(**sampling), prompt, vocab, seed)
    counts = np.bincount(answer, minlength=vocab).astype(np.int32) if answer else state.counts[0]
    return dataclasses.replace(state, counts=counts[None])


def normal(*shape, seed=0):
    return (3 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def softmax(logits):
    logits = np.asarray(logits, np.float64)
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)
