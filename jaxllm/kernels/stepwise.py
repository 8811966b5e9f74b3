"""Products of activations in whole numbers of steps, by XLA: what native kernels do with a `step`, elsewhere.

Weights of 8 bits with a scale per output are multiplied in integers, exactly, which accelerators do faster
than in floats; other weights meet activations that are rounded to steps, and stay floats.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.quant import QArray, Weight

# Largest number of steps: an 8-bit range that is the same on both sides.
TOP_LEVEL = 127


def in_integers(weight: Weight) -> bool:
    """Whether the weight is multiplied in integers."""
    return isinstance(weight, QArray) and weight.bits == 8 and not weight.group


def levels(x: jax.Array, step: jax.Array) -> jax.Array:
    """`x` in steps, as floats: whole numbers in [-127, 127], and NaN where x is."""
    top = np.float32(TOP_LEVEL)
    return jnp.clip(jnp.round(x.astype(jnp.float32) / step), -top, top)


def rounded(x: jax.Array, step: jax.Array) -> jax.Array:
    """`x` rounded to whole steps and clipped; rows `[M, D]` that hold infinity become NaN."""
    return _broken_as_nan(x, levels(x, step) * step).astype(x.dtype)


def rows_product(rows: jax.Array, weight: Weight, step: jax.Array) -> jax.Array:
    """Rows `[M, D]` times a matrix `[R, D]` that `in_integers` takes: `[M, R]`."""
    assert isinstance(weight, QArray)
    sums = jax.lax.dot_general(
        levels(rows, step).astype(jnp.int8),
        weight.data,
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.int32,
    )
    return _broken_as_nan(rows, sums.astype(jnp.float32) * (step * weight.scale[:, 0])).astype(rows.dtype)


def reduction_product(rows: jax.Array, weight: Weight, step: jax.Array) -> jax.Array:
    """Rows `[M, prod(U)]` times a weight `[*U, D]` that `in_integers` takes: `[M, D]`."""
    assert isinstance(weight, QArray)
    # One scale per output for each of the leading entries of a stack.
    data = weight.data.reshape(-1, *weight.data.shape[-2:])
    scale = weight.scale.reshape(-1, weight.scale.shape[-1])
    parts = levels(rows, step).astype(jnp.int8).reshape(len(rows), len(data), -1)
    sums = jax.lax.dot_general(
        parts, data, (((2,), (1,)), ((1,), (0,))), preferred_element_type=jnp.int32
    ).astype(jnp.float32)
    out = jnp.sum(sums * (step * scale)[:, None], axis=0)
    return _broken_as_nan(rows, out).astype(rows.dtype)


def _broken_as_nan(rows: jax.Array, out: jax.Array) -> jax.Array:
    """NaN for rows that hold NaN or infinity: no integer stands for these."""
    fine = jnp.all(jnp.isfinite(rows), axis=-1, keepdims=True)
    return jnp.where(fine, out, np.asarray(np.nan, out.dtype))
