"""Norms over the last axis; statistics are computed in float32, whatever the dtype of the activations."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxllm.kernels.native_call import value
from jaxllm.kernels.weight_table import Operand

# More sequences by themselves are a loop: each of them in the program takes seconds to compile.
_MOST_UNROLLED = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm over the last axis: layer norm where there is a `bias`, else root-mean-square norm."""

    scale: Operand
    bias: Operand | None
    eps: float = dataclasses.field(metadata={"static": True})


def normalize(x: jax.Array, norm: Norm, *, apart: bool = False) -> jax.Array:
    """`norm` of `x` `[..., D]`; for `apart` see `by_sequence`."""
    scale, bias = value(norm.scale), None if norm.bias is None else value(norm.bias)

    def normed(x: jax.Array) -> jax.Array:
        return rms_norm(x, scale, norm.eps) if bias is None else layer_norm(x, scale, bias, norm.eps)

    return by_sequence(normed, x, apart=apart)


def by_sequence(function: Callable[..., jax.Array], *arrays: jax.Array, apart: bool) -> jax.Array:
    """`function` of arrays `[B, ...]`; if `apart`, of each of the B sequences by itself.

    XLA orders sums, and approximates functions, by the shape of their operands: by itself a sequence gets bit
    for bit what it gets alone.
    """
    batch = arrays[0].shape[0]
    if not apart or batch == 1:
        return function(*arrays)
    if batch > _MOST_UNROLLED:
        return jax.lax.map(lambda each: function(*(array[None] for array in each))[0], arrays)
    each = [function(*(array[row : row + 1] for array in arrays)) for row in range(batch)]
    return jnp.concatenate(each, axis=0)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis; `scale` `[D]`."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale.astype(jnp.float32)).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Layer norm over the last axis; `scale`, `bias` `[D]`."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
