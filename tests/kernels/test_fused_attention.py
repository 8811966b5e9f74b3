"""Fused attention of accelerators, interpreted, against the plain one: outputs and gradients, at the borders
of documents too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels import fused_attention
from jaxllm.nn import documents
from jaxllm.nn.documents import document_mask
from jaxllm.nn.layers import AttentionOptions, attention

T, H, SCALE = 256, 128, 0.09
# Borders within and at the edge of a kernel's block, a document of one token, padding of several.
BORDERS = np.array([[0, 37, 128, 129, 250], [0, 1, 127, 200, 255]])


def inputs(heads=2, group=2, dtype=jnp.float32, tokens=T):
    draw = np.random.default_rng(0)

    def random(*shape):
        return jnp.asarray(draw.normal(size=shape), dtype)

    starts = np.zeros((2, tokens), np.int32)
    for row, borders in enumerate(BORDERS):
        for border in borders:
            starts[row, border:] = border
    q, k, v = random(2, tokens, heads, group, H), random(2, tokens, heads, H), random(2, tokens, heads, H)
    return (q, k, v), jnp.asarray(starts), random(2, tokens, heads, group, H)


def plain(q, k, v, starts):
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    return attention(q, keys, values, document_mask(starts, 0), scale=SCALE)


def outputs_and_gradients(compute, given, starts, cotangent):
    out, pull = jax.vjp(lambda *given: compute(*given, starts), *given)
    return (out, *pull(cotangent))


@pytest.mark.parametrize("kernel", ["on_gpu", "on_tpu"])
def test_kernels_have_the_plain_outputs_and_gradients(kernel):
    compute = functools.partial(getattr(fused_attention, kernel), scale=SCALE, interpret=True)
    given, starts, cotangent = inputs()
    found = outputs_and_gradients(compute, given, starts, cotangent)
    expected = outputs_and_gradients(plain, given, starts, cotangent)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4, rtol=2e-4)


def test_nothing_crosses_a_border():
    given, starts, cotangent = inputs()
    compute = functools.partial(fused_attention.on_gpu, scale=SCALE, interpret=True)
    # The second document of the first row alone is asked for.
    asked = cotangent.at[:, :37].set(0).at[:, 128:].set(0).at[1].set(0)
    for gradient in outputs_and_gradients(compute, given, starts, asked)[1:]:
        assert not np.asarray(gradient[0, :37]).any()
        assert not np.asarray(gradient[0, 128:]).any()
        assert not np.asarray(gradient[1]).any()


@pytest.mark.parametrize("window", [0, 100])
def test_the_loop_over_blocks_is_the_plain_attention(window):
    given, starts, cotangent = inputs(tokens=1100)
    options = AttentionOptions(scale=SCALE, softcap=20.0, window=window)

    def expected(q, k, v, starts):
        keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        mask = document_mask(starts, window)
        return attention(q, keys, values, mask, scale=SCALE, softcap=20.0)

    found = functools.partial(documents.document_attention, options=options)
    pairs = zip(
        outputs_and_gradients(found, given, starts, cotangent),
        outputs_and_gradients(expected, given, starts, cotangent),
        strict=True,
    )
    for one, other in pairs:
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("platform", "kernel"), [("cuda", "triton"), ("tpu", "tpu_custom_call")])
def test_accelerators_get_the_fused_kernels(platform, kernel):
    given, starts, _ = inputs(dtype=jnp.bfloat16)
    step = jax.jit(functools.partial(documents.document_attention, options=AttentionOptions(scale=SCALE)))
    text = step.trace(*given, starts).lower(lowering_platforms=(platform,)).as_text()
    assert kernel in text
