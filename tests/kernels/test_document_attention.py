"""Attention inside the documents of packed rows, forward and backward: on every processor's kernels, and
fused for accelerators, interpreted."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels import fused_attention, native_attention
from jaxllm.kernels import fused_attention as kernel
from jaxllm.nn import documents, layers
from jaxllm.nn.documents import document_mask
from jaxllm.nn.layers import AttentionOptions, attention
from tests.gpu_lowering import lowers_for_gpus  # noqa: F401
from tests.kernels.drawing import answers, compiled, jit, same_on_threads
from tests.kernels.switching import fall_back, needs_native

NAMES = ("out", "dq", "dk", "dv")


def starts_of(draw: np.random.Generator, batch: int, tokens: int, longest: int) -> np.ndarray:
    """Documents of 1 to `longest` tokens."""
    starts = np.zeros((batch, tokens), np.int32)
    for row in starts:
        at = 0
        while at < tokens:
            length = int(draw.integers(1, longest + 1))
            row[at : at + length] = at
            at += length
    return starts


def case(seed=0, *, B=2, T=33, K=2, G=2, H=16, longest=20):
    """q, k, v, starts and what reaches the output."""
    draw = np.random.default_rng(seed)

    def normal(*shape):
        return draw.normal(size=shape).astype(np.float32)

    q, k, v, dout = 2 * normal(B, T, K, G, H), normal(B, T, K, H), normal(B, T, K, H), normal(B, T, K, G, H)
    return q, k, v, starts_of(draw, B, T, longest), dout


def seen(starts):
    tokens = np.arange(starts.shape[1])
    key, query = tokens[None, None, :], tokens[None, :, None]
    return (key <= query) & (key >= starts[:, :, None])


def expected(q, k, v, starts, dout, scale):
    """The textbook's, in float64."""
    q, k, v, dout = q.astype(float), k.astype(float), v.astype(float), dout.astype(float)
    scores = np.einsum("btkgh,bskh->bkgts", q, k) * scale
    scores = np.where(seen(starts)[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bkgts,bskh->btkgh", weights, v)
    reaching = np.einsum("btkgh,bskh->bkgts", dout, v)
    gradient = weights * (reaching - (reaching * weights).sum(-1, keepdims=True)) * scale
    dq = np.einsum("bkgts,bskh->btkgh", gradient, k)
    dk = np.einsum("bkgts,btkgh->bskh", gradient, q)
    return out, dq, dk, np.einsum("bkgts,btkgh->bskh", weights, dout)


def by_kernel(q, k, v, starts, dout, *, scale):
    out, lse = native_attention.document_attention(q, k, v, starts, scale=scale)
    return out, *native_attention.document_attention_gradients(q, k, v, starts, out, lse, dout, scale=scale)


def by_layers(q, k, v, starts, dout, **options):
    own = layers.AttentionOptions(**options)
    out, back = jax.vjp(lambda q, k, v: documents.document_attention(q, k, v, starts, options=own), q, k, v)
    return out, *back(dout)


def close(found, wanted, what="", room=3e-5):
    for name, got, want in zip(NAMES, found, wanted, strict=True):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        chex.assert_equal_shape([got, want])
        atol = room * max(1.0, float(np.abs(want).max()))
        np.testing.assert_allclose(got, want, atol=atol, rtol=0, err_msg=f"{what} {name}")


@needs_native
@pytest.mark.parametrize(("H", "G"), [(8, 1), (16, 2), (20, 3), (32, 1), (64, 2)])
def test_every_shape(H, G):
    """Rows of one token and of several tiles and blocks; documents of one token, of some, and of all."""
    for T, B, longest in ((1, 1, 1), (5, 3, 1), (33, 2, 20), (128, 1, 128), (200, 2, 300), (200, 1, 70)):
        args = case(T + H, B=B, T=T, G=G, H=H, longest=longest)
        if longest > T:
            args[3][:] = 0
        wanted = expected(*args, H**-0.5)
        for name, found in answers(functools.partial(by_kernel, scale=H**-0.5), *args).items():
            close(found, wanted, f"{name} T {T}")


@needs_native
def test_a_document_knows_nothing_of_others_and_of_what_comes():
    q, k, v, starts, dout = case(3, B=1, T=90, longest=1)
    starts[0, :30], starts[0, 30:] = 0, 30
    k, v = k.copy(), v.copy()
    clean = jit(functools.partial(by_kernel, scale=0.2))(q, k, v, starts, dout)
    k[0, :30], v[0, :30] = np.nan, np.nan
    k[0, 80:] = np.inf
    spoilt = jit(functools.partial(by_kernel, scale=0.2))(q, k, v, starts, dout)
    np.testing.assert_array_equal(spoilt[0][:, 30:80], clean[0][:, 30:80])
    assert np.isnan(spoilt[0][:, :30]).all()


@needs_native
def test_the_same_again_whatever_the_threads():
    args = case(4, B=3, T=150, K=3, longest=80)
    same_on_threads(compiled(functools.partial(by_kernel, scale=0.25), *args), *args)


@pytest.mark.parametrize("native_too", [pytest.param(True, marks=needs_native), False])
@pytest.mark.parametrize(("T", "longest"), [(1, 1), (128, 40), (200, 300)])
def test_layers_by_kernel_and_by_xla(T, longest, native_too, monkeypatch):
    """The same answers and gradients either way, also where no whole blocks of queries fit."""
    if not native_too:
        fall_back(monkeypatch)
    args = case(5, T=T, longest=longest)
    assert kernel.fits(jnp.asarray(args[0])) == native_too
    graph = jax.jit(functools.partial(by_layers, scale=0.25))
    assert ("jaxllm_document_attention" in graph.lower(*args).as_text()) == native_too
    close(graph(*args), expected(*args, 0.25))


@needs_native
def test_graphs_for_other_processors_have_none():
    args = case(9)
    graph = jax.jit(functools.partial(by_layers, scale=0.25))
    exported = jax.export.export(graph, platforms=["cuda"])(*args)
    assert "jaxllm_" not in exported.mlir_module()


MESHES = """
import functools, jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxllm.kernels import fused_attention as kernel
from tests.kernels.test_document_attention import by_layers, case, close, expected

assert len(jax.devices()) == 8
args = case(10, B=8, T=40, K=2, longest=30)
graph = functools.partial(by_layers, scale=0.25)
one = [np.array(each) for each in jax.jit(graph)(*args)]
close(one, expected(*args, 0.25))
for sizes in ((8, 1, 1), (2, 2, 2), (1, 4, 2), (2, 1, 4)):
    mesh = jax.make_mesh(sizes, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    shards = P(("data", "fsdp"), None, "tensor" if sizes[2] < 4 else None)
    rows = P(("data", "fsdp"))
    put = [jax.device_put(x, NamedSharding(mesh, shards if x.ndim > 2 else rows)) for x in args]
    with jax.set_mesh(mesh):
        fits = kernel.fits(put[0])
        compiled = jax.jit(graph).lower(*put).compile()
    # Two kv heads are not to be spread over four devices.
    assert fits == (sizes[2] < 4), sizes
    text = compiled.as_text()
    assert ("jaxllm_document_attention" in text) == fits
    if fits:
        assert "all-gather" not in text and "all-to-all" not in text, sizes
    for got, want in zip(compiled(*put), one):
        (np.testing.assert_array_equal if fits else functools.partial(np.testing.assert_allclose, atol=3e-5))(
            np.asarray(got), want
        )
# Where the caller has divided the work itself.
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
inner = jax.jit(jax.shard_map(graph, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False))
for got, want in zip(inner(*args), one):
    np.testing.assert_array_equal(np.asarray(got), want)
print("done")
"""


@needs_native
def test_each_device_of_a_mesh_computes_its_own():
    """Rows and kv heads, without moving any; to the last bit what one device computes."""
    more = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAXLLM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", MESHES], cwd=Path(__file__).parents[2], env=os.environ | more,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "done\n"


TOKENS, WIDTH, SCALE = 256, 128, 0.09
# Borders within and at the edge of a kernel's block, a document of one token, padding of several.
BORDERS = np.array([[0, 37, 128, 129, 250], [0, 1, 127, 200, 255]])


# Of JAX 0.12, see `fused_attention`.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")


def inputs(heads=2, group=2, dtype=jnp.float32, tokens=TOKENS, width=WIDTH):
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


def plain_attention(q, k, v, starts, window=0, softcap=0.0):
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
        # The loop over blocks.
        ("", 0, {"window": 0, "softcap": 20.0}),
        ("", 0, {"window": 100, "softcap": 20.0}),
    ],
)
def test_kernels_have_the_plain_outputs_and_gradients(kernel, width, options):
    if kernel:
        compute = functools.partial(getattr(fused_attention, kernel), scale=SCALE, interpret=True, **options)
        given, error = inputs(width=width), 2e-4
    else:
        how = AttentionOptions(scale=SCALE, **options)
        compute = functools.partial(documents.document_attention, options=how)
        given, error = inputs(tokens=1100), 1e-5
    found = outputs_and_gradients(compute, *given)
    expected = outputs_and_gradients(functools.partial(plain_attention, **options), *given)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=error, rtol=error)


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
