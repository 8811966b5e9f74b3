"""Keys and values go from one cache into another of the same model, whatever their layouts and lengths."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kv.cache import new_cache
from jaxllm.serving.speculation.shared_rows import has_own_rows, with_rows
from tests.tiny import TINY

CFG, TOKENS = TINY, 5


def cache_of(tokens, *, stacked, seed):
    cache = new_cache(CFG, batch=1, tokens=tokens, dtype=jnp.float32, stacked=stacked)
    draw = np.random.default_rng(seed)
    drawn = jax.tree.map(lambda rows: draw.random(rows.shape, np.float32), (cache.keys, cache.values))
    return type(cache)(*drawn, length=jnp.int32(3), places=cache.places)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("others", [False, True])
def test_rows_of_each_layer(stacked, others):
    cache, other = cache_of(12, stacked=stacked, seed=0), cache_of(8, stacked=others, seed=1)
    found = with_rows(cache, other, TOKENS)
    assert int(found.length) == TOKENS
    assert found.places == cache.places
    for layer in range(CFG.layers):
        for ours, theirs, before in zip(
            found.past(layer).own, other.past(layer).own, cache.past(layer).own, strict=True
        ):
            assert ours.shape == before.shape
            np.testing.assert_array_equal(ours[..., :TOKENS, :], theirs[..., :TOKENS, :])
    # A copy: the other cache is donated afterwards.
    assert not any(np.shares_memory(a, b) for a in found.keys for b in other.keys)


def test_what_a_cache_has_no_rows_of():
    cache = cache_of(8, stacked=True, seed=0)
    assert has_own_rows(cache)
    assert not has_own_rows(dataclasses.replace(cache, states=object()))
