"""Products of activations with matrices of their dtype; those in bfloat16 are summed in float32.

XLA's CPU backend computes a product of two bfloat16 matrices at the processor's bfloat16 speed only where the
result is asked for in float32; otherwise it converts both to float32 first. Gradients keep to that: without a
rule of its own, the gradient of a product with a float32 result would be one of mixed types.
"""

import functools

import jax
import jax.numpy as jnp


def dense_product(rows: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
    """Activations `[M, K]` times a matrix of their dtype, over the matrix's axis `axis` (0 or 1), which has K
    entries: `[M, N]` in the same dtype."""
    if rows.dtype == jnp.bfloat16:
        return _half_product(rows, matrix, axis)
    return jax.lax.dot_general(rows, matrix, (((1,), (axis,)), ((), ())))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _half_product(rows: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
    return _summed(rows, matrix, 1, axis)


def _forward(rows: jax.Array, matrix: jax.Array, axis: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _half_product(rows, matrix, axis), (rows, matrix)


def _backward(
    axis: int, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    rows, matrix = saved
    of_rows = _summed(gradient, matrix, 1, 1 - axis)
    sides = (gradient, rows) if axis else (rows, gradient)
    return of_rows, _summed(*sides, 0, 0)


def _summed(left: jax.Array, right: jax.Array, left_axis: int, right_axis: int) -> jax.Array:
    """The product over one axis of each matrix, rounded to bfloat16."""
    dims = (((left_axis,), (right_axis,)), ((), ()))
    return jax.lax.dot_general(left, right, dims, preferred_element_type=jnp.float32).astype(left.dtype)


_half_product.defvjp(_forward, _backward)
