"""What is accepted: plain decoding's own answer, or tokens of the target's distribution."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxllm.sampling import Sampling, sample, sampler_state
from jaxllm.speculative.acceptance import accept_drawn, choices
from jaxllm.speculative.tree import add_nodes, new_tree, path_to
from tests.speculative.test_tree import tree_of, walk

VOCAB, ROOM = 9, 8
PARENTS = [0, 0, 1, 1, 3, 2]
SAMPLINGS = {
    "greedy": Sampling(),
    "penalized": Sampling(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.4),
    "drawn": Sampling(temperature=0.8, top_p=0.9),
    "both": Sampling(temperature=1.2, top_k=6, repetition_penalty=1.5, frequency_penalty=0.3),
}


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
    for node in range(len(PARENTS) + 1):
        after = state
        for child in walk(PARENTS, node)[1:]:
            forced = np.full((1, VOCAB), -1e9, np.float32)
            forced[0, tokens[child - 1]] = 1e9
            _, after = one(jnp.asarray(forced), after)
        assert int(found[node]) == int(one(logits[node : node + 1], after)[0][0]), node


def draft_and_accept(key, target, draft, *, widths):
    """Draws a tree of the draft, `widths[d]` children behind each node of depth d, and accepts of it."""
    tree = new_tree(jnp.int32(0), ROOM)
    first, count = 0, 1
    for depth, width in enumerate(widths):
        for node in range(first, first + count):
            key, own = jax.random.split(key)
            # Without replacement, in the order drawn.
            noise = jax.random.gumbel(own, (VOCAB,)) + jnp.log(draft[depth, tree.tokens[node]])
            tokens = jax.lax.top_k(noise, width)[1].astype(jnp.int32)
            at = jnp.full(width, node, jnp.int32)
            tree, _ = add_nodes(tree, at, tokens, jnp.ones(width), jnp.ones(width, bool))
        first, count = first + count, count * width
    depths = jnp.minimum(tree.depths, target.shape[0] - 1)
    last, token = accept_drawn(tree, target[depths, tree.tokens], draft[depths, tree.tokens], key)
    nodes, length = path_to(tree, last)
    said = jnp.where(jnp.arange(ROOM) < length - 1, tree.tokens[jnp.roll(nodes, -1)], -1)
    return said.at[length - 1].set(token)[: len(widths) + 1], length - 1


def chance(counts, weights):
    """How likely counts at least this far off are, where draws follow the weights."""
    weights = np.asarray(weights, np.float64)
    return scipy.stats.chisquare(counts, weights / weights.sum() * counts.sum()).pvalue


@pytest.mark.parametrize("widths", [(1,), (3,), (2, 2), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("alike", [0.0, 0.7, 1.0])
def test_rejection_leaves_the_targets_distribution(widths, alike):
    """Of the first tokens, by a chi-square test: 20,000 trees."""
    rng = np.random.default_rng(5)
    depth = len(widths) + 1
    target = rng.dirichlet(np.full(VOCAB, 0.7), (depth, VOCAB)).astype(np.float32)
    other = rng.dirichlet(np.full(VOCAB, 0.7), (depth, VOCAB)).astype(np.float32)
    draft = alike * target + (1 - alike) * other
    run = jax.jit(jax.vmap(functools.partial(draft_and_accept, widths=widths), in_axes=(0, None, None)))
    said, accepted = run(jax.random.split(jax.random.key(2), 20_000), target, draft)
    said, accepted = np.asarray(said), np.asarray(accepted)
    counts = np.bincount(said[:, 0], minlength=VOCAB)
    assert chance(counts, target[0, 0]) > 1e-3
    # Of the second where there is one, given each first that is frequent.
    for token in np.flatnonzero(counts > 2_000):
        seconds = said[(said[:, 0] == token) & (accepted >= 1), 1]
        frequent = target[1, token] * len(seconds) > 5
        if frequent.sum() > 1:
            got = np.bincount(seconds, minlength=VOCAB)[frequent]
            assert chance(got, target[1, token][frequent]) > 1e-3
    if alike == 1:
        assert (accepted == len(widths)).all()
    elif widths == (1,):
        # A single candidate is accepted as often as both distributions overlap (arXiv 2211.17192).
        assert accepted.mean() == pytest.approx(np.minimum(target[0, 0], draft[0, 0]).sum(), abs=0.02)


def test_the_test_sees_a_draft_that_is_taken_at_its_word():
    """Accepting all that was drafted is far from the target's distribution, by the same test."""
    rng = np.random.default_rng(5)
    target, draft = rng.dirichlet(np.full(VOCAB, 0.7), 2)
    counts = np.random.default_rng(0).multinomial(20_000, draft)
    assert chance(counts, target) < 1e-6
