"""Norms over the last axis; statistics are computed in float32, whatever the dtype of the activations."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxllm.kernels.native_call import value
from jaxllm.kernels.weight_table import Operand


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm over the last axis: layer norm where there is a `bias`, else root-mean-square norm."""

    scale: Operand
    bias: Operand | None
    eps: float = dataclasses.field(metadata={"static": True})


def normalize(x: jax.Array, norm: Norm) -> jax.Array:
    """`norm` of `x` `[..., D]`."""
    if norm.bias is None:
        return rms_norm(x, value(norm.scale), norm.eps)
    return layer_norm(x, value(norm.scale), value(norm.bias), norm.eps)


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
