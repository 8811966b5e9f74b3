"""Calls of the native products with a static step that add their shadow themselves, for compiled steps.

The excess beyond 127 steps is found when activations are quantized, and multiplied in floats with the rows of
its channels while the product's results are in the processor's cache (mllm-NPU, arXiv 2407.05858, equation
1). Sizes are dynamic: nothing is padded, nothing is dropped. For everything else see
`native_products`.

The row of a channel is the entry of a weight's float rows `[R, outputs]` float16 at the channel's `place`
`[inputs]` int32; where that is negative, it is the 8-bit weight's own.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import Activation
from jaxllm.kernels.native_call import call
from jaxllm.kernels.native_operands import (
    Adaptable,
    block_of,
    count_operand,
    counts_operand,
    format_of,
    no_parts,
    nothing,
    optional,
    parts_of,
    segments_of,
    steps_operand,
    units_of,
)
from jaxllm.kernels.used_units import UsedUnits
from jaxllm.kernels.weight_table import Operand


def takes(weight: Adaptable) -> bool:
    """Whether these kernels take a weight in blocks: 8 bits with one scale per output."""
    return format_of(weight) == {"bits": 8, "group": 0}


def to_units(
    x: jax.Array,
    weights: Sequence[Adaptable],
    step: jax.Array,
    place: Operand,
    rows: Sequence[Operand],
    *,
    norm_scale: Operand | None = None,
    norm_eps: float = 0.0,
    used: UsedUnits | None = None,
    live: jax.Array | None = None,
) -> tuple[list[jax.Array], jax.Array]:
    """`native_products.to_units` with a step, and the number of channels with outliers, `[1]` int32; `rows`
    per weight."""
    outputs = [int(np.prod(weight.shape[:-1])) for weight in weights]
    results = [jax.ShapeDtypeStruct((x.shape[0], count), jnp.float32) for count in outputs]
    *found, channels = call(
        "to_units",
        [*results, _channels(1)],
        (x, count_operand(live)),
        (
            optional(norm_scale),
            counts_operand(used),
            steps_operand(step),
            *(part for weight in weights for part in parts_of(weight)),
            place,
            *rows,
        ),
        **format_of(weights[0]),
        **units_of(used, weights[0]),
        eps=np.float32(norm_eps),
        widen=True,
        shadowed=True,
    )
    return found, channels


def from_units(
    h: jax.Array,
    weight: Adaptable,
    step: jax.Array,
    place: Operand,
    rows: Operand,
    *,
    residual: jax.Array | None = None,
    used: UsedUnits | None = None,
    live: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`native_products.from_units` with a step, and the number of inputs with outliers, `[1]` int32."""
    out, channels = call(
        "from_units",
        [jax.ShapeDtypeStruct((h.shape[0], weight.shape[-1]), jnp.float32), _channels(1)],
        (h, count_operand(live), optional(residual)),
        (*parts_of(weight), counts_operand(used), steps_operand(step), place, rows),
        **format_of(weight),
        **segments_of(used, weight),
        widen=True,
    )
    return out, channels


def feed_forward(
    x: jax.Array,
    gate: Adaptable | None,
    up: Adaptable,
    down: Adaptable,
    steps: tuple[jax.Array, jax.Array],
    places: tuple[Operand, Operand],
    rows: tuple[Sequence[Operand], Operand],
    *,
    activation: Activation,
    norm_scale: Operand | None,
    norm_eps: float,
    residual: bool,
    used: UsedUnits | None = None,
    live: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`native_products.feed_forward` with steps, and the numbers of channels of x and of units with outliers,
    `[2]` int32; places and rows are those of x's channels (for gate, if there is one, and up) and of units
    (for down)."""
    first = [*rows[0]] if gate is not None else [nothing(), *rows[0]]
    out, channels = call(
        "feed_forward",
        [jax.ShapeDtypeStruct(x.shape, jnp.float32), _channels(2)],
        (x, count_operand(live)),
        (
            optional(norm_scale),
            counts_operand(used),
            steps_operand(*steps),
            *(no_parts() if gate is None else parts_of(gate)),
            *parts_of(up),
            *parts_of(down),
            places[0],
            *first,
            places[1],
            rows[1],
        ),
        **format_of(up),
        **block_of(used, up, activation),
        residual=residual,
        eps=np.float32(norm_eps),
        widen=True,
    )
    return out, channels


def _channels(count: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count,), jnp.int32)
