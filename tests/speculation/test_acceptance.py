"""Tests what is accepted: plain decoding's own answer, or tokens of the target's distribution."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.sampling import Sampling, sample, sampler_state
from jaxllm.speculation.tree import choices
from tests.speculation.test_tree import tree_of, walk

VOCAB, ROOM = 9, 8
PARENTS = [0, 0, 1, 1, 3, 2]
SAMPLINGS = {
    "greedy": Sampling(),
    "penalized": Sampling(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.4),
    "drawn": Sampling(temperature=0.8, top_p=0.9),
    "both": Sampling(temperature=1.2, top_k=6, repetition_penalty=1.5, frequency_penalty=0.3),
}


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_every_node_is_followed_by_what_plain_decoding_says_there(sampling):
    draw = np.random.default_rng(0)
    tokens = [3, 3, 1, 5, 3, 2]
    tree, one = tree_of(PARENTS, tokens, room=ROOM), jax.jit(sample)
    logits = draw.normal(size=(ROOM, VOCAB)).astype(np.float32) * 2
    state = sampler_state(sampling, [3, 4], VOCAB, seed=11)
    # The answer so far: two tokens, of which the root is the last.
    for said in ([0.0] * 7 + [9.0, 0.0], [0.0, 0.0, 0.0, 9.0] + [0.0] * 5):
        _, state = one(jnp.asarray([said], jnp.float32), state)
    found = jax.jit(choices)(tree, logits, state)
    chex.assert_shape(found, (ROOM,))
    chex.assert_type(found, jnp.int32)
    for node in range(len(PARENTS) + 1):
        after = state
        for child in walk(PARENTS, node)[1:]:
            forced = np.full((1, VOCAB), -1e9, np.float32)
            forced[0, tokens[child - 1]] = 1e9
            _, after = one(jnp.asarray(forced), after)
        assert int(found[node]) == int(one(logits[node : node + 1], after)[0][0]), node
