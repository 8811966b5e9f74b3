"""Attention of a source to itself by blocks is that over all pairs of tokens at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.nn.documents import source_self_attention
from jaxllm.nn.layers import MASKED, attention

K, G, H = 2, 3, 8


def inputs(count, biased):
    draw = np.random.default_rng(count)
    q = draw.normal(size=(2, count, K, G, H)).astype(np.float32)
    k, v = (draw.normal(size=(2, K, count, H)).astype(np.float32) for _ in "kv")
    return q, k, v, draw.normal(size=(K, G, 2 * count - 1)).astype(np.float32) if biased else None


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("count", "valid", "block"), [(12, 12, 4), (13, 9, 4), (13, 13, 5), (7, 3, 0), (7, 7, 64)]
)
def test_blocks_are_the_whole(biased, count, valid, block):
    q, k, v, bias = inputs(count, biased)
    at = np.arange(count)
    real = at < valid
    if bias is None:
        mask = np.broadcast_to(real, (count, count))
    else:
        by_pair = bias[:, :, at[None, :] - at[:, None] + count - 1].transpose(0, 2, 1, 3)
        mask = by_pair + np.where(real, np.float32(0), np.float32(MASKED))
    wanted = attention(q, k, v, jnp.asarray(mask), scale=0.5)[:, :valid]
    found = source_self_attention(q, k, v, bias, jnp.int32(valid), scale=0.5, block_tokens=block)
    np.testing.assert_allclose(found[:, :valid], wanted, atol=1e-6)


def test_memory_is_that_of_a_block():
    """Copies of scores of 512 tokens would be 6 MB each; one block's are under 1 MB each."""
    q, k, v, bias = inputs(512, True)
    step = jax.jit(functools.partial(source_self_attention, scale=0.5))
    compiled = step.lower(q[:1], k[:1], v[:1], bias, jnp.int32(512)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 6 << 20
