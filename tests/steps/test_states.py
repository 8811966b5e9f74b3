"""Steps of models with state layers: trees give the target's own answer and states, which are updated in
place."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.kv.cache import new_cache
from jaxllm.kv.states import states_bytes
from jaxllm.models import decoder
from jaxllm.models.layer_stack import by_address
from jaxllm.sampling import Sampling, sampler_state
from jaxllm.steps.model import decode_step
from jaxllm.steps.trees import read_nodes, verify
from tests.copied_bytes import copied_bytes
from tests.elastic.models import in_blocks, scaled_params
from tests.kernels.switching import needs_native
from tests.quick_jit import jit
from tests.speculation.test_tree import tree_of
from tests.tiny import tiny_params
from tests.tiny_states import CONFIGS

PROMPT = np.array([[5, 9, 40, 2, 77, 31]], np.int32)
# The root's token is that of `tree_of`.
ROOT, ROOM, DTYPE = 7, 8, jnp.float32
# Of the nodes 1 to 5.
PARENTS = [0, 0, 1, 1, 3]


@pytest.fixture(scope="module", params=CONFIGS)
def case(request):
    """(config, parameters, forward pass of the tokens after a cache, cache of the prompt)."""
    cfg = CONFIGS[request.param]
    params = {
        name: jnp.asarray(each) * (3 if each.ndim > 1 else 1) for name, each in tiny_params(cfg).items()
    }

    @jit
    def forward(params, tokens, cache):
        hidden, cache = decoder.forward(params, tokens, cache, cfg=cfg)
        return decoder.logits(params, hidden, cfg=cfg)[0], cache

    _, cache = forward(params, PROMPT, new_cache(cfg, batch=1, tokens=32, dtype=DTYPE))
    return cfg, params, functools.partial(forward, params), cache


def greedy(forward, cache, token, count):
    """Greedy tokens after a token, and the cache with all but the last."""
    found = []
    for _ in range(count):
        out, cache = forward(np.array([[token]], np.int32), cache)
        token = int(jnp.argmax(out[0]))
        found.append(token)
    return found, cache


@pytest.mark.parametrize("right", [0, 1, 3])
def test_the_accepted_path_is_the_greedy_one(case, right):
    cfg, params, forward, cache = case
    answer, after = greedy(forward, cache, ROOT, right + 1)
    # Nodes 1, 3 and 5 are a line, whose first `right` tokens are the answer's; no other node is right.
    line = [(token + (place >= right)) % cfg.vocab_size for place, token in enumerate([*answer, 0, 0, 0])]
    tokens = [line[0], (answer[0] + 2) % cfg.vocab_size, line[1], (line[1] + 2) % cfg.vocab_size, line[2]]
    tree = tree_of(PARENTS, tokens, room=ROOM)
    sampler = sampler_state(Sampling(temperature=0), [], cfg.vocab_size, 0)
    step = jit(functools.partial(verify, cfg=cfg, dtype=DTYPE))
    found, count, _, kept, _ = step(params, tree, cache, sampler, np.int32(ROOM))
    assert found[: int(count)].tolist() == answer
    assert int(kept.length) == int(after.length)
    for got, expected in zip(jax.tree.leaves(kept.states), jax.tree.leaves(after.states), strict=True):
        assert np.abs(got - expected).max() < 1e-4
    follow, _ = forward(np.array([[answer[-1]]], np.int32), kept)
    alone, _ = forward(np.array([[answer[-1]]], np.int32), after)
    assert np.abs(follow - alone).max() < 1e-3


def test_a_part_of_a_tree_is_refused(case):
    cfg, params, _, cache = case
    tree, nodes = tree_of(PARENTS, [1] * 5, room=ROOM), jnp.arange(2, dtype=jnp.int32)
    with pytest.raises(ConfigError, match="one token after another, or a whole tree"):
        read_nodes(params, tree, nodes, jnp.int32(2), cache, cfg=cfg, dtype=DTYPE)


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
