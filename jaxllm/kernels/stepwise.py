"""Multiplies activations that are quantized with a static step, by XLA, where native kernels do not run.

Weights of 8 bits with one scale per output are multiplied in integers, exactly, which is faster on
accelerators than floats. With other weights, activations are rounded to steps and the product is in floats.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.quant import QArray, Weight

# Largest number of steps, of a symmetric 8-bit range.
TOP_LEVEL = 127


def in_integers(weight: Weight) -> bool:
    """Whether the weight is multiplied in integers."""
    return isinstance(weight, QArray) and weight.bits == 8 and not weight.group


def levels(x: jax.Array, step: jax.Array) -> jax.Array:
    """`x` in steps, as floats: integers in [-127, 127], and NaN where x is NaN."""
    top = np.float32(TOP_LEVEL)
    return jnp.clip(jnp.round(x.astype(jnp.float32) / step), -top, top)


def rounded(x: jax.Array, step: jax.Array) -> jax.Array:
    """`x` `[M, D]` rounded to whole steps and clipped; rows with an infinity become NaN."""
    return _broken_as_nan(x, levels(x, step) * step).astype(x.dtype)


def rows_product(rows: jax.Array, weight: Weight, step: jax.Array) -> jax.Array:
    """Activations `[M, D]` times a matrix `[R, D]` that `in_integers` accepts: `[M, R]`."""
    assert isinstance(weight, QArray)
    sums = jax.lax.dot_general(
        levels(rows, step).astype(jnp.int8),
        weight.data,
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.int32,
    )
    return _broken_as_nan(rows, sums.astype(jnp.float32) * (step * weight.scale[:, 0])).astype(rows.dtype)


def reduction_product(rows: jax.Array, weight: Weight, step: jax.Array) -> jax.Array:
    """Activations `[M, prod(U)]` times a weight `[*U, D]` that `in_integers` accepts: `[M, D]`."""
    assert isinstance(weight, QArray)
    # Each entry of a stack has its own scale per output.
    data = weight.data.reshape(-1, *weight.data.shape[-2:])
    scale = weight.scale.reshape(-1, weight.scale.shape[-1])
    parts = levels(rows, step).astype(jnp.int8).reshape(len(rows), len(data), -1)
    sums = jax.lax.dot_general(
        parts, data, (((2,), (1,)), ((1,), (0,))), preferred_element_type=jnp.int32
    ).astype(jnp.float32)
    out = jnp.sum(sums * (step * scale)[:, None], axis=0)
    return _broken_as_nan(rows, out).astype(rows.dtype)


def _broken_as_nan(rows: jax.Array, out: jax.Array) -> jax.Array:
    """Sets rows of the result to NaN where the activations have NaN or infinity, which integers cannot
    represent."""
    fine = jnp.all(jnp.isfinite(rows), axis=-1, keepdims=True)
    return jnp.where(fine, out, np.asarray(np.nan, out.dtype))
