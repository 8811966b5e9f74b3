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
from tests.gpu_lowering import lowers_for_gpus  # noqa: F401

T, H, SCALE = 256, 128, 0.09
# Borders within and at the edge of a kernel's block, a document of one token, padding of several.
BORDERS = np.array([[0, 37, 128, 129, 250], [0, 1, 127, 200, 255]])


# Of JAX 0.12, see `fused_attention`.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")


def inputs(heads=2, group=2, dtype=jnp.float32, tokens=T, width=H):
    draw = np.random.default_rng(0)

    def random(*shape):
        return jnp.asarray(draw.normal(size=shape), dtype)

    starts = np.zeros((2, tokens), np.int32)
    for row, borders in enumerate(BORDERS):
        for border in borders:
            starts[row, border:] = border
    queries, pairs = (2, tokens, heads, group, width), (2, tokens, heads, width)
    q, k, v = random(*queries), random(*pairs), random(*pairs)
    return (q, k, v), jnp.asarray(starts), random(*queries)


def plain(q, k, v, starts, window=0, softcap=0.0):
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    return attention(q, keys, values, document_mask(starts, window), scale=SCALE, softcap=softcap)


def outputs_and_gradients(compute, given, starts, cotangent):
    out, pull = jax.vjp(lambda *given: compute(*given, starts), *given)
    return (out, *pull(cotangent))


@pytest.mark.parametrize(
    ("kernel", "width", "options"),
    [
        ("on_gpu", 128, {}),
        ("on_gpu", 256, {}),
        ("on_tpu", 128, {}),
        ("on_tpu", 64, {"window": 100, "softcap": 1.5}),
    ],
)
def test_kernels_have_the_plain_outputs_and_gradients(kernel, width, options):
    compute = functools.partial(getattr(fused_attention, kernel), scale=SCALE, interpret=True, **options)
    given, starts, cotangent = inputs(width=width)
    found = outputs_and_gradients(compute, given, starts, cotangent)
    expected = outputs_and_gradients(functools.partial(plain, **options), given, starts, cotangent)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("window", [0, 100])
def test_the_loop_over_blocks_is_the_plain_attention(window):
    given, starts, cotangent = inputs(tokens=1100)
    options = dict(window=window, softcap=20.0)
    loop = functools.partial(documents.document_attention, options=AttentionOptions(scale=SCALE, **options))
    found = outputs_and_gradients(loop, given, starts, cotangent)
    expected = outputs_and_gradients(functools.partial(plain, **options), given, starts, cotangent)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("platform", "kernel", "options", "width"),
    [
        ("cuda", "triton", {}, 128),
        ("tpu", "tpu_custom_call", {}, 64),
        ("tpu", "tpu_custom_call", {"window": 100, "softcap": 30.0}, 128),
    ],
)
@pytest.mark.usefixtures("lowers_for_gpus")
def test_accelerators_get_the_fused_kernels(platform, kernel, options, width):
    given, starts, _ = inputs(dtype=jnp.bfloat16, width=width)
    options = AttentionOptions(scale=SCALE, **options)
    step = jax.jit(functools.partial(documents.document_attention, options=options))
    text = step.trace(*given, starts).lower(lowering_platforms=(platform,)).as_text()
    assert kernel in text


@pytest.mark.parametrize(
    ("width", "dtype", "consumer", "datacentre"),
    [
        (64, "bfloat16", (128, 128, 32), (128, 128, 32)),
        (80, "float32", (64, 32, 32), (128, 64, 32)),
        (256, "float32", (32, 16, 16), (64, 32, 32)),
        (512, "float32", None, None),
    ],
)
def test_blocks_shrink_with_what_a_gpu_has(width, dtype, consumer, datacentre):
    for shared_memory, wanted in ((101_376, consumer), (166_912, datacentre), (232_448, datacentre)):
        found = fused_attention.gpu_blocks(width, jnp.dtype(dtype), shared_memory)
        assert found == wanted
        assert fused_attention.gpu_blocks(width, jnp.dtype(dtype), 65_536) is None


@pytest.mark.parametrize(
    ("platform", "width", "options", "tokens", "reason"),
    [
        ("gpu", 512, {}, 256, "head_dim 512 in float32 does not fit the 101376 bytes"),
        ("gpu", 64, {"window": 8}, 256, "has no window"),
        ("gpu", 64, {"sink_logits": np.zeros((1, 1), np.float32)}, 256, "no sinks"),
        ("tpu", 64, {}, 300, "rows of 300 tokens are no multiple of 128"),
        ("tpu", 64, {"window": 8}, 256, None),
    ],
)
def test_a_line_says_where_no_kernel_fits(platform, width, options, tokens, reason, monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    fused_attention.log_fallback.cache_clear()
    given, starts, _ = inputs(heads=1, group=1, width=width, tokens=tokens)
    step = functools.partial(documents.document_attention, options=AttentionOptions(scale=SCALE, **options))
    for _ in range(2):
        jax.eval_shape(step, *given, starts)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (reason is not None)
    assert reason is None or reason in said[0]


def test_kernels_are_left_out_where_the_environment_says_so(monkeypatch):
    given, _, _ = inputs(heads=1, group=1)
    assert not fused_attention.why_none("gpu", given[0])
    monkeypatch.setenv("JAXLLM_KERNELS", "xla")
    assert "JAXLLM_KERNELS=xla" in fused_attention.why_none("gpu", given[0])
