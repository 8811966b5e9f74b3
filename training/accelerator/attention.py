"""Checks attention within packed documents on the device: outputs, gradients and borders, against float32."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.nn.documents import document_attention, document_mask
from jaxllm.nn.layers import AttentionOptions, attention
from training.accelerator.rows import Row
from training.accelerator.timing import median_s
from training.loop.hardware import known_device

# Borders inside and at the edges of a kernel's blocks, a document of one token, one of several blocks.
BORDERS = (0, 37, 128, 129, 250, 512, 1000)
# Of q, k, v and starts.
Compute = Callable[..., jax.Array]


def check_attention(tokens: int, heads: int, kv_heads: int, width: int, repetitions: int) -> list[Row]:
    """Rows of errors and of time.

    Args:
      tokens: T of the sequence that is timed; at most 1,024 of it are compared with the plain attention.
      heads, kv_heads: N and K.
      width: H.
      repetitions: of the timed step.
    """
    compared = min(tokens, 1024)
    case = f"attention T={compared} N={heads} K={kv_heads} H={width}"
    options = AttentionOptions(scale=width**-0.5)
    ours = functools.partial(document_attention, options=options)

    def plain(q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array) -> jax.Array:
        keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        return attention(q, keys, values, document_mask(starts, 0), scale=width**-0.5)

    given, starts, cotangent = _inputs(compared, heads, kv_heads, width)
    with jax.default_matmul_precision("highest"):
        wanted = _outputs_and_gradients(plain, given, starts, cotangent)
    half = [each.astype(jnp.bfloat16) for each in given]
    found = _outputs_and_gradients(ours, half, starts, cotangent.astype(jnp.bfloat16))
    rows = []
    for name, one, other in zip(("output", "dq", "dk", "dv"), found, wanted, strict=True):
        error = float(_norm(one - other) / _norm(other))
        rows.append(Row(case, f"relative_error_{name}", error, "", "of bfloat16 to float32"))
    inside = slice(BORDERS[1], BORDERS[2])
    asked = jnp.zeros_like(cotangent).at[:, inside].set(cotangent[:, inside])
    crossed = 0.0
    for gradient in _outputs_and_gradients(ours, half, starts, asked.astype(jnp.bfloat16))[1:]:
        outside = np.array(gradient)
        outside[:, inside] = 0
        crossed = max(crossed, float(np.abs(outside).max()))
    rows.append(Row(case, "gradient_across_borders", crossed, "", "must be 0"))
    return rows + _timed(ours, tokens, heads, kv_heads, width, repetitions)


def _timed(ours: Compute, tokens: int, heads: int, kv_heads: int, width: int, repetitions: int) -> list[Row]:
    given, starts, cotangent = _inputs(tokens, heads, kv_heads, width)
    half, out = [each.astype(jnp.bfloat16) for each in given], cotangent.astype(jnp.bfloat16)
    step = jax.jit(functools.partial(_outputs_and_gradients, ours))
    took_s = median_s(lambda: step(half, starts, out), repetitions, warm_steps=1)
    case = f"attention T={tokens} N={heads} K={kv_heads} H={width}"
    rows = [Row(case, "step_ms", took_s * 1e3, "ms", "forward and backward")]
    device = known_device(jax.devices()[0].device_kind)
    if device is not None:
        # Half of the scores are causal; the backward pass is 2.5 forward passes of 2 products.
        flops = 3.5 * 2 * 2 * given[0].shape[0] * tokens * tokens * heads * width / 2
        share = flops / took_s / device.flops
        rows.append(Row(case, "mfu", share, "share", "as if rows were one document each"))
    return rows


def _inputs(
    tokens: int, heads: int, kv_heads: int, width: int
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    queries, pairs = (2, tokens, kv_heads, heads // kv_heads, width), (2, tokens, kv_heads, width)
    given = [jax.random.normal(key, shape) for key, shape in zip(keys, (queries, pairs, pairs), strict=False)]
    starts = np.zeros((2, tokens), np.int32)
    for border in BORDERS:
        starts[:, border:] = border
    return given, jnp.asarray(starts), jax.random.normal(keys[3], queries)


def _outputs_and_gradients(
    compute: Compute, given: Sequence[jax.Array], starts: jax.Array, cotangent: jax.Array
) -> list[jax.Array]:
    out, pull = jax.vjp(lambda *given: compute(*given, starts), *given)
    return [each.astype(jnp.float32) for each in (out, *pull(cotangent))]


def _norm(value: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(value.astype(jnp.float32))))
