"""One function by several codes: that for the platform which a graph is compiled for."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxllm.kernels import native

Out = TypeVar("Out")


def natively(by_kernel: Callable[..., Out], by_xla: Callable[..., Out], x: jax.Array, *operands: Any) -> Out:
    """`by_kernel` of x in float32 where the graph is for a CPU with native kernels, else `by_xla`;
    what is floats of the result is of the type of x."""
    # A foreign call cannot be divided over the devices of a mesh.
    if not native.kernels().native or jax.sharding.get_abstract_mesh().size > 1:
        return by_xla(x, *operands)
    dtype = x.dtype

    def typed(out: jax.Array) -> jax.Array:
        return out.astype(dtype) if jnp.issubdtype(out.dtype, jnp.floating) else out

    def widened(x: jax.Array, *operands: Any) -> Out:
        return jax.tree.map(typed, by_kernel(x.astype(jnp.float32), *operands))

    return on_platform(widened, by_xla, (x, *operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def on_platform(on_cpu: Callable[..., Out], elsewhere: Callable[..., Out], operands: tuple[Any, ...]) -> Out:
    """The same function by the code for the platform that the graph is compiled for.

    Its gradient is `elsewhere`'s: a kernel has none of its own. Neither may close over arrays.
    """
    return jax.lax.platform_dependent(*operands, cpu=on_cpu, default=elsewhere)


def _forward(
    on_cpu: Callable[..., Out], elsewhere: Callable[..., Out], operands: tuple[Any, ...]
) -> tuple[Out, tuple[Any, ...]]:
    return on_platform(on_cpu, elsewhere, operands), operands


def _backward(
    on_cpu: Callable[..., Any], elsewhere: Callable[..., Any], operands: tuple[Any, ...], cotangent: Any
) -> tuple[Any]:
    del on_cpu
    return (jax.vjp(elsewhere, *operands)[1](cotangent),)


on_platform.defvjp(_forward, _backward)
