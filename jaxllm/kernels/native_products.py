"""Calls of the native products, and of what begins a step, for compiled steps.

Activations are quantized on the fly to 8 bits, with one scale per token and 256 inputs, or with a given
static `step` in [1e-30, 1e30], at which values beyond ±127 steps are clipped. A token whose activations hold
NaN or
infinity gives NaN; magnitudes under 1e-30 count as zero.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import Activation
from jaxllm.kernels.native import target
from jaxllm.kernels.native_call import call
from jaxllm.kernels.native_operands import (
    Adaptable,
    arrays_of,
    block_of,
    count_operand,
    counts_operand,
    format_of,
    no_parts,
    optional,
    parts_of,
    segments_of,
    steps_operand,
    units_of,
)
from jaxllm.kernels.used_units import UsedUnits
from jaxllm.kernels.weight_table import Operand
from jaxllm.quant import BlockedArray


def to_units(
    x: jax.Array,
    weights: Sequence[Adaptable],
    *,
    norm_scale: Operand | None = None,
    norm_eps: float = 0.0,
    used: UsedUnits | None = None,
    rowwise: bool = False,
    step: jax.Array | None = None,
    live: jax.Array | None = None,
) -> list[jax.Array]:
    """Products of `x` `[M, D]` float32, after an RMS norm if given, with weights `[*U, D]` of one format,
    contracted along their last axis: `[M, prod(U)]` float32 each. Outputs of unused units, and of rows after
    the first `live` (int32 scalar), are undefined. For `rowwise` see `linear.py`."""
    outputs = [int(np.prod(weight.shape[:-1])) for weight in weights]
    return list(
        call(
            "to_units",
            [jax.ShapeDtypeStruct((x.shape[0], count), jnp.float32) for count in outputs],
            (x, count_operand(live)),
            (
                optional(norm_scale),
                counts_operand(used),
                steps_operand(step),
                *(part for weight in weights for part in parts_of(weight)),
            ),
            **format_of(weights[0]),
            **units_of(used, weights[0]),
            eps=np.float32(norm_eps),
            widen=not rowwise,
            shadowed=False,
        )
    )


def from_units(
    h: jax.Array,
    weight: Adaptable,
    *,
    residual: jax.Array | None = None,
    used: UsedUnits | None = None,
    rowwise: bool = False,
    step: jax.Array | None = None,
    live: jax.Array | None = None,
) -> jax.Array:
    """Product of `h` `[M, prod(U)]` float32 with a weight `[*U, D]`, contracted over its used units, plus
    `residual` `[M, D]` if given: `[M, D]` float32. For `live` see `to_units`."""
    return call(
        "from_units",
        jax.ShapeDtypeStruct((h.shape[0], weight.shape[-1]), jnp.float32),
        (h, count_operand(live), optional(residual)),
        (*parts_of(weight), counts_operand(used), steps_operand(step)),
        **format_of(weight),
        **segments_of(used, weight),
        widen=not rowwise,
    )


def feed_forward(
    x: jax.Array,
    gate: Adaptable | None,
    up: Adaptable,
    down: Adaptable,
    *,
    activation: Activation,
    norm_scale: Operand | None,
    norm_eps: float,
    residual: bool,
    used: UsedUnits | None = None,
    rowwise: bool = False,
    steps: tuple[jax.Array, jax.Array] | None = None,
    live: jax.Array | None = None,
) -> jax.Array:
    """`down(activation(gate(x)) · up(x))` of `x` `[M, D]` float32 over the used units of weights `[F, D]` of
    one format. x is RMS-normalized first if a norm is given, and added to the result if `residual`. `steps`
    are those of x and of the input of `down`. For `live` see `to_units`."""
    return call(
        "feed_forward",
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
        (x, count_operand(live)),
        (
            optional(norm_scale),
            counts_operand(used),
            steps_operand(*(steps or ())),
            *(no_parts() if gate is None else parts_of(gate)),
            *parts_of(up),
            *parts_of(down),
        ),
        **format_of(up),
        **block_of(used, up, activation),
        residual=residual,
        eps=np.float32(norm_eps),
        widen=not rowwise,
    )


def add_normed(
    residual: jax.Array, x: jax.Array, scale: Operand, eps: float, live: jax.Array | None = None
) -> jax.Array:
    """`residual` and the RMS norm of rows `x`, both `[M, D]` float32: `[M, D]`. For `live` see
    `to_units`."""
    result = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return call("add_normed", result, (x, residual, count_operand(live)), (scale,), eps=np.float32(eps))


def integer_product(x: jax.Array, weight: BlockedArray) -> jax.Array:
    """`x` `[M, D]` int8 in [-127, 127] times the levels of a weight `[R, D]` of 8 bits, without scales: `[M,
    R]` int32, exact. -128 counts as -127."""
    call = jax.ffi.ffi_call(
        target("integer_product"), jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.int32)
    )
    return call(x, weight.data)


def unit_rows(weight: BlockedArray, index: jax.Array, live: jax.Array | None = None) -> jax.Array:
    """Rows of a weight `[R, C]`, contracted along its last axis, at `index` (any shape, int32; out of range
    counts as the last): `[*index.shape, C]` float32. For `live` see `to_units`."""
    result = jax.ShapeDtypeStruct((*index.shape, weight.shape[-1]), jnp.float32)
    buffers, operands = (index, count_operand(live)), arrays_of(weight)
    outputs = np.int64(weight.shape[0])
    return call("unit_rows", result, buffers, operands, **format_of(weight), outputs=outputs)


def zeros(shapes: Sequence[tuple[int, ...]], dtype: jnp.dtype) -> list[jax.Array]:
    """Arrays of zeros that take memory when they are used, where the system can do so."""
    return list(jax.ffi.ffi_call(target("zeros"), [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes])())
