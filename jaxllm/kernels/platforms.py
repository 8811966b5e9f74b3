"""Chooses the implementation of a function for the platform that a step is compiled for."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxllm.kernels import native
from jaxllm.kernels.weight_table import TableArray

Out = TypeVar("Out")


def natively(by_kernel: Callable[..., Out], by_xla: Callable[..., Out], x: jax.Array, *operands: Any) -> Out:
    """`by_kernel` with x in float32 if the step is compiled for a CPU with native kernels, else `by_xla`.
    Floats of the result have the dtype of x. Operands in a weight table take `by_kernel`, which alone reads
    them."""
    in_table = any(map(_in_table, jax.tree.leaves(operands, is_leaf=_in_table)))
    # XLA cannot partition an FFI call over the devices of a mesh.
    elsewhere = not native.kernels().native or jax.sharding.get_abstract_mesh().size > 1
    if elsewhere and not in_table:
        return by_xla(x, *operands)
    dtype = x.dtype

    def typed(out: jax.Array) -> jax.Array:
        return out.astype(dtype) if jnp.issubdtype(out.dtype, jnp.floating) else out

    def widened(x: jax.Array, *operands: Any) -> Out:
        return jax.tree.map(typed, by_kernel(x.astype(jnp.float32), *operands))

    return widened(x, *operands) if in_table else on_platform(widened, by_xla, (x, *operands))


def _in_table(operand: Any) -> bool:
    return isinstance(operand, TableArray)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def on_platform(on_cpu: Callable[..., Out], elsewhere: Callable[..., Out], operands: tuple[Any, ...]) -> Out:
    """`on_cpu` if the step is compiled for a CPU, else `elsewhere`; both must compute the same function.

    The gradient is that of `elsewhere`, because a kernel has none. Neither function may close over arrays.
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
