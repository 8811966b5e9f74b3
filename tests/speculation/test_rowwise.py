"""Native kernels read a tree to the bit as its tokens one by one: only so is a verified answer the target's
own at every near-tie."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kv.cache import new_cache
from jaxllm.models import decoder
from jaxllm.steps.trees import read_nodes
from tests.elastic.models import MODELS, in_blocks, scaled_params
from tests.kernels.switching import needs_native
from tests.speculation.test_tree import tree_of, walk

pytestmark = [needs_native, pytest.mark.usefixtures("shipped_compilations")]
# So many rows make 4-bit products of prompts widen their weights; the tree begins inside a block of keys.
ROOM, PROMPT = 24, np.random.default_rng(0).integers(0, 64, (1, 23)).astype(np.int32)
PARENTS = [0, 0, 1, 1, 3, 2, 6, 6, 5, 9, 9, 4, 12, 12, 10, 15, 16, 17, 18]
TOKENS = np.random.default_rng(1).integers(0, 64, len(PARENTS)).tolist()
# Mixtures choose experts by a product in floats, which XLA makes as it likes.
DENSE = [name for name, cfg in MODELS.items() if not cfg.experts]


def rows_of(cache, rows):
    """Keys and values of some rows."""
    return jax.tree.map(lambda each: np.asarray(each)[..., rows, :], (cache.keys, cache.values))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bits"), [("llama", 4), *((name, 8) for name in DENSE)])
def test_a_tree_is_its_tokens_one_by_one(name, bits):
    cfg = dataclasses.replace(MODELS[name], window_tokens=128)
    params = in_blocks(cfg, scaled_params(cfg), bits)
    dtype = jnp.float32

    def read_logits(params, tokens, cache):
        hidden, cache = decoder.forward(params, tokens, cache, cfg=cfg, dtype=dtype)
        return decoder.logits(params, hidden[:, -1], cfg=cfg), cache

    read = jax.jit(read_logits)
    before = read(params, PROMPT, new_cache(cfg, batch=1, tokens=64, dtype=jnp.float16))[1]
    tree = tree_of(PARENTS, TOKENS, room=ROOM)
    nodes = np.arange(ROOM, dtype=np.int32)
    whole = jax.jit(functools.partial(read_nodes, cfg=cfg, dtype=dtype))
    found, after = whole(params, tree, nodes, tree.count, before)
    found = np.asarray(found)
    for leaf in (8, 11, 13, 19):
        cache, path = before, walk(PARENTS, leaf)
        for node in path:
            token = np.array([[[7, *TOKENS][node]]], np.int32)
            logits, cache = read(params, token, cache)
            np.testing.assert_array_equal(found[node], np.asarray(logits)[0])
        of_path = rows_of(after, PROMPT.shape[1] + np.array(path))
        alone = rows_of(cache, PROMPT.shape[1] + np.arange(len(path)))
        chex.assert_trees_all_equal(of_path, alone, strict=True)
