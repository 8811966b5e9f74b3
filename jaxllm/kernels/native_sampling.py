"""Calls of the native kernels that choose tokens, for compiled steps (see `jaxllm.sampling`).

All may be mapped over by `jax.vmap`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.kernels.native import target


def largest(x: jax.Array) -> jax.Array:
    """The index of each row's largest value or NaN, the first of equals, for `x` `[M, V]` float32: `[M]`
    int32."""
    return _call("largest", jax.ShapeDtypeStruct(x.shape[:1], jnp.int32), x)


def random_bits(seed: jax.Array, drawn: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Random bits of a shape, uint32: those of `jax.random.bits` with the threefry2x32 key `seed` `[2]`
    uint32 into which `drawn`, an int32 scalar, is folded."""
    return _call("random_bits", jax.ShapeDtypeStruct(shape, jnp.uint32), seed, drawn)


def kth_largest(x: jax.Array, k: jax.Array) -> jax.Array:
    """The `k`-th largest value (int32 scalar, from 0 up) of each row of `x` `[M, V]` float32, as keys `[M]`
    uint32 whose order is that of the floats (see `sampling.ordered_bits`); 0 where a row has fewer."""
    return _call("kth_largest", jax.ShapeDtypeStruct(x.shape[:1], jnp.uint32), x, k)


def _call(name: str, result: jax.ShapeDtypeStruct, *operands: jax.Array) -> Any:
    return jax.ffi.ffi_call(target(name), result, vmap_method="broadcast_all")(*operands)
