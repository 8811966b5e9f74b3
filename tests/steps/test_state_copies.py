"""Decoding updates states where they are."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from jaxllm.kv.cache import new_cache
from jaxllm.kv.states import states_bytes
from jaxllm.models.layer_stack import by_address
from jaxllm.sampling import Sampling, sampler_state
from jaxllm.steps.model import decode_step
from tests.copied_bytes import copied_bytes
from tests.elastic.models import in_blocks, scaled_params
from tests.kernels.switching import needs_native
from tests.tiny_states import CONFIGS

# By kind, which layers have states (s) and which attend (a): in loops, and beside them.
PATTERNS = {"short_conv": "ssassasasasas", "delta_rule": "sssasssasssa"}


def deep(kind):
    """A config of many layers, in the order of the models that people have."""
    marked = tuple(each == "s" for each in PATTERNS[kind])
    return dataclasses.replace(CONFIGS[kind], layers=len(marked), state_layers=marked, attention_windows=())


@needs_native
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_token_copies_no_stack_of_states(kind, shipped_compilations):
    cfg = deep(kind)
    params = by_address(in_blocks(cfg, scaled_params(cfg), 8), cfg)
    cache = new_cache(cfg, batch=1, tokens=64, dtype=jnp.float32)
    sampler = sampler_state(Sampling(temperature=0), [], cfg.vocab_size, 0)
    step = functools.partial(decode_step, cfg=cfg, dtype=jnp.float32)
    decode = jax.jit(step, donate_argnums=(2, 3))
    compiled = decode.lower(params, jnp.zeros(1, jnp.int32), cache, sampler).compile()
    # What is copied is the sampler's.
    assert copied_bytes(compiled) < states_bytes(cfg)
