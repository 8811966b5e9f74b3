"""Drafting and verifying with tiny models: the target's own answer and states, whatever the draft."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.kv.cache import new_cache
from jaxllm.kv.states import states_bytes
from jaxllm.models import decoder
from jaxllm.models.layer_stack import by_address
from jaxllm.sampling import Sampling, sample, sampler_state
from jaxllm.speculation.growth import Growth
from jaxllm.speculation.token_tree import by_confidence, some_nodes
from jaxllm.speculation.tree import new_tree
from jaxllm.steps.model import decode_step
from jaxllm.steps.trees import DraftEnd, draft, follow, keep_path, prune, read_nodes, verify
from tests.copied_bytes import copied_bytes
from tests.elastic.models import in_blocks, scaled_params
from tests.kernels.switching import needs_native
from tests.quick_jit import jit
from tests.speculation.test_tree import tree_of, walk
from tests.tiny import TINY, tiny_params
from tests.tiny_states import CONFIGS

CFG = TINY
SMALL = dataclasses.replace(TINY, layers=1, heads=2, kv_heads=1, ffn_size=48, attention_windows=())
SINKS = dataclasses.replace(
    TINY, attention_windows=(3, 0), sink_logits=True, experts=4, experts_per_token=2, expert_bias=True,
    activation="clamped_swiglu",
)  # fmt: skip
PROMPT = np.array([[5, 9, 40, 2, 77, 31]], np.int32)
ROOM, VERIFIED, DTYPE = 24, 8, jnp.float32
PARENTS, TOKENS = [0, 0, 1, 1, 3], [11, 12, 13, 14, 15]


def params_of(cfg, scale=3.0):
    """Sharper than a fresh model's, so that answers are not all alike."""
    return {
        name: jnp.asarray(value) * (scale if value.ndim > 1 else 1)
        for name, value in tiny_params(cfg).items()
    }


PARAMS, SMALL_PARAMS = params_of(CFG), params_of(SMALL)
# Compiled once for all tests, as each operation by itself is compiled for each shape.
prefill = jit(decoder.forward, static_argnames=("cfg", "dtype"))
documents = jit(decoder.forward_documents, static_argnames=("cfg",))
logits = jit(decoder.logits, static_argnames=("cfg",))
read = jit(functools.partial(read_nodes, cfg=CFG, dtype=DTYPE))
verifying = jit(functools.partial(verify, cfg=CFG, dtype=DTYPE))
keep, following, pruned, choose = jit(keep_path), jit(follow), jit(prune), jit(sample)


def cache_of(cfg, params, tokens):
    cache = new_cache(cfg, batch=1, tokens=64, dtype=DTYPE)
    return prefill(params, tokens, cache, cfg=cfg)[1]


@pytest.mark.parametrize("cfg", [CFG, SINKS], ids=["plain", "sinks"])
def test_a_tree_reads_as_each_of_its_paths_alone(cfg):
    tree, params = tree_of(PARENTS, TOKENS, room=ROOM), params_of(cfg)
    read = jit(functools.partial(read_nodes, cfg=cfg, dtype=DTYPE))
    cache = cache_of(cfg, params, PROMPT)
    nodes = jnp.arange(ROOM, dtype=jnp.int32)
    out, after = read(params, tree, nodes, tree.count, cache)
    chex.assert_shape(out, (ROOM, cfg.vocab_size))
    chex.assert_trees_all_equal_shapes_and_dtypes(after, cache)
    assert int(after.length) == PROMPT.shape[1]
    # In two readings as in one.
    _, first = read(params, tree, nodes, jnp.int32(3), cache)
    rest, _ = read(params, tree, jnp.arange(3, ROOM, dtype=jnp.int32), jnp.int32(3), first)
    np.testing.assert_allclose(rest[:3], out[3:6], atol=1e-4)
    all_tokens = [7, *TOKENS]
    for node in range(6):
        path = [all_tokens[each] for each in walk(PARENTS, node)]
        whole = np.zeros((1, 16), np.int32)
        last = PROMPT.shape[1] + len(path) - 1
        whole[0, : last + 1] = [*PROMPT[0], *path]
        expected = logits(params, documents(params, whole, cfg=cfg)[0, last], cfg=cfg)
        np.testing.assert_allclose(out[node], expected, atol=2e-4 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("stacked", [True, False], ids=["stacks", "layers"])
def test_rows_move_without_a_copy_of_the_cache(stacked, shipped_compilations):
    cache = new_cache(CFG, batch=1, tokens=4096, dtype=DTYPE, stacked=stacked)
    tree, fed, one = new_tree(jnp.int32(7), ROOM), jnp.zeros(ROOM, bool), jnp.int32(1)
    nodes = jnp.arange(ROOM, dtype=jnp.int32)
    moves = {
        keep_path: (cache, nodes, one),
        follow: (cache, tree, fed, nodes, one, one),
        prune: (cache, tree, fed, one),
    }
    for step, given in moves.items():
        compiled = jax.jit(step, donate_argnums=(0,)).lower(*given).compile()
        # Of a token tree, and not of thousands of tokens.
        assert copied_bytes(compiled) < cache.keys[0].nbytes // 8, step.__name__


def test_a_pruned_tree_reads_on_as_before():
    # Along their paths: 1, .5, .9, .4, .1, .36; 1 and 4, the least confident ones, are dropped after 0 to 4
    # were read.
    tree = tree_of([0, 0, 2, 1, 3], TOKENS, confidences=[0.3, 0.9, 0.5, 0.2, 0.9], room=ROOM)
    cache = cache_of(CFG, PARAMS, PROMPT)
    nodes = jnp.arange(ROOM, dtype=jnp.int32)
    whole, _ = read(PARAMS, tree, nodes, tree.count, cache)
    _, begun = read(PARAMS, tree, nodes, jnp.int32(5), cache)
    cache, left, fed, places = pruned(begun, tree, nodes < 5, jnp.int32(4))
    assert places[:7].tolist() == [0, -1, 1, 2, -1, 3, -1]
    assert left.tokens[:4].tolist() == [7, 12, 13, 15]
    assert left.parents[:4].tolist() == [-1, 0, 1, 2]
    assert left.confidences[:4].tolist() == pytest.approx([1, 0.9, 0.45, 0.405])
    assert (int(left.count), np.flatnonzero(fed).tolist()) == (4, [0, 1, 2])
    assert int(cache.length) == PROMPT.shape[1]
    out, _ = read(PARAMS, left, jnp.arange(3, ROOM, dtype=jnp.int32), jnp.int32(1), cache)
    np.testing.assert_allclose(out[0], whole[5], atol=1e-4)


def test_what_was_attended_to_is_that_of_the_path_alone():
    """As if its tokens had been fed: other nodes' queries, which nobody keeps, add nothing."""
    tree = tree_of(PARENTS, TOKENS, room=ROOM)
    empty = new_cache(CFG, batch=1, tokens=64, dtype=DTYPE, mass=True)
    cache = prefill(PARAMS, PROMPT, empty, cfg=CFG)[1]
    state = sampler_state(Sampling(), PROMPT[0].tolist(), CFG.vocab_size, seed=3)
    _, count, path, kept, _ = verifying(PARAMS, tree, cache, state, jnp.int32(ROOM))
    told = np.array([7, *TOKENS])[np.asarray(path)[: int(count)]]
    fed = prefill(PARAMS, np.concatenate([PROMPT[0], told])[None].astype(np.int32), empty, cfg=CFG)[1]
    assert kept.mass is not None
    assert fed.mass is not None
    np.testing.assert_allclose(kept.mass, fed.mass, atol=1e-4)

    # Layer by layer, where the path is not known before all layers have run.
    nodes = jnp.arange(ROOM, dtype=jnp.int32)
    _, cache = read(PARAMS, tree, nodes, tree.count, cache.counted_by_node(ROOM))
    path = jnp.array([0, 1, 3, 5] + [5] * (ROOM - 4), jnp.int32)
    kept = keep(cache, path, jnp.int32(4))
    told = np.array([7, 11, 13, 15])
    fed = prefill(PARAMS, np.concatenate([PROMPT[0], told])[None].astype(np.int32), empty, cfg=CFG)[1]
    np.testing.assert_allclose(kept.mass, fed.mass, atol=1e-4)


def plain(sampling, count):
    """The target's answer, one token at a time."""
    state = sampler_state(sampling, PROMPT[0].tolist(), CFG.vocab_size, seed=3)
    cache = new_cache(CFG, batch=1, tokens=64, dtype=DTYPE)
    hidden, cache = prefill(PARAMS, PROMPT, cache, cfg=CFG)
    said = []
    for _ in range(count):
        token, state = choose(logits(PARAMS, hidden[:, -1], cfg=CFG), state)
        said.append(int(token[0]))
        hidden, cache = prefill(PARAMS, token[:, None], cache, cfg=CFG)
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampling", "drafter"),
    [
        (Sampling(), "itself"),
        (Sampling(temperature=0.9, top_p=0.95), "another"),
        (Sampling(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.2), "itself"),
    ],
    ids=["greedy", "drawn", "penalized"],
)
def test_the_answer_is_the_targets_own(sampling, drafter):
    cfg, params = (CFG, PARAMS) if drafter == "itself" else (SMALL, SMALL_PARAMS)
    growth = Growth(tips=2, branches=3, threshold=0.05)
    growing = jit(functools.partial(draft, cfg=cfg, growth=growth, dtype=DTYPE))
    state = sampler_state(sampling, PROMPT[0].tolist(), CFG.vocab_size, seed=3)
    ours = new_cache(CFG, batch=1, tokens=64, dtype=DTYPE)
    hidden, ours = prefill(PARAMS, PROMPT, ours, cfg=CFG)
    theirs = cache_of(cfg, params, PROMPT)
    token, state = choose(logits(PARAMS, hidden[:, -1], cfg=CFG), state)
    said, lengths = [int(token[0])], []
    tree, fed, foreseen = new_tree(token[0], ROOM), jnp.zeros(ROOM, bool), 0
    while len(said) < 24:
        end = DraftEnd.at_room(ROOM)
        tree, fed, theirs, runs = growing(params, tree, fed, theirs, end)
        assert int(runs) <= ROOM
        chosen = np.sort(by_confidence(tree)[:VERIFIED])
        part = some_nodes(tree, chosen, VERIFIED)
        tokens, count, path, ours, state = verifying(PARAMS, part, ours, state, jnp.int32(24 - len(said)))
        said += tokens[: int(count)].tolist()
        lengths.append(int(count))
        theirs, tree, fed, missing = following(
            theirs, tree, fed, chosen[np.asarray(path)], count, tokens[count - 1]
        )
        foreseen += int(tree.count) > 1
        if int(missing):
            # What the draft had not read when it stopped: the path's last node.
            left = np.array([said[-1 - int(missing) : -1]], np.int32)
            theirs = prefill(params, left, theirs, cfg=cfg)[1]
        assert int(theirs.length) == int(ours.length) == PROMPT.shape[1] + len(said) - 1
    assert said == plain(sampling, 24)
    if drafter == "itself" and not sampling.temperature:
        # The target drafts what it would say: all of a branch is accepted, and what lies behind it stays.
        assert min(lengths[:-1]) >= 3
        assert foreseen


def test_a_draft_ends_where_runs_bring_too_little():
    growth = Growth(tips=2, branches=3, threshold=0.05)
    growing = jit(functools.partial(draft, cfg=CFG, growth=growth, dtype=DTYPE))

    def drafted(**changes):
        end = dataclasses.replace(DraftEnd.at_room(ROOM), **changes)
        cache = cache_of(CFG, PARAMS, PROMPT)
        tree, fed, _, runs = growing(PARAMS, new_tree(jnp.int32(7), ROOM), jnp.zeros(ROOM, bool), cache, end)
        return tree, np.asarray(fed), int(runs)

    _, _, runs = drafted()
    assert runs > 3
    # A root that ends the answer has no children.
    assert drafted(stop_ids=jnp.array([7], jnp.int32))[2] == 0
    # The root's confidence is 1: no run brings more than two, and each brings less than one.
    assert drafted(run=jnp.float32(1.0))[2] == 0
    assert drafted(branch=jnp.float32(1.0))[2] == 0
    # Random weights are sure of nothing: each token takes about a hundredth.
    tree, fed, fewer = drafted(branch=jnp.float32(0.001), run=jnp.float32(0.01))
    assert fewer == 2
    assert (np.asarray(tree.confidences)[fed] > 0.01).all()
    # Free runs are taken whatever they bring.
    assert drafted(run=jnp.float32(1.0), free=jnp.int32(2))[2] == 2
    # Nodes have no children where the answer ends: at a depth, or at a token.
    tree, fed, _ = drafted(depth=jnp.int32(2))
    assert np.asarray(tree.depths).max() == 2
    assert not fed[np.asarray(tree.depths) == 2].any()
    whole, _, _ = drafted()
    stop = int(whole.tokens[np.asarray(whole.parents)[2:].min()])
    tree, _, _ = drafted(stop_ids=jnp.array([stop], jnp.int32))
    tokens, parents = np.asarray(tree.tokens), np.asarray(tree.parents)[1 : int(tree.count)]
    assert stop in tokens
    assert stop not in tokens[parents]


def leaves_that_cannot_grow(tree, fed):
    count = int(tree.count)
    inner = np.isin(np.arange(count), np.asarray(tree.parents)[:count])
    return np.flatnonzero(np.asarray(fed)[:count] & ~inner)


def test_every_branch_can_go_on():
    """Also where a tree has no room for new nodes, or has lost some: else a drafter that goes on from such a
    branch has nothing to say."""
    growth = Growth(tips=4, branches=3, threshold=0.001)
    growing = jit(functools.partial(draft, cfg=CFG, growth=growth, dtype=DTYPE))
    cache, tree = cache_of(CFG, PARAMS, PROMPT), new_tree(jnp.int32(7), ROOM)
    tree, fed, cache, _ = growing(PARAMS, tree, jnp.zeros(ROOM, bool), cache, DraftEnd.at_room(ROOM))
    assert int(tree.count) == ROOM
    assert not leaves_that_cannot_grow(tree, fed).size
    for most in (ROOM - 2, ROOM // 2, 2, 1):
        _, left, fed_then, _ = pruned(cache, tree, fed, jnp.int32(most))
        assert int(left.count) == most
        assert not leaves_that_cannot_grow(left, fed_then).size


# The root's token is that of `tree_of`.
ROOT = 7


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
