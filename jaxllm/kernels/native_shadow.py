"""Calls of the native products with a static step that add their shadow themselves, for compiled steps.

The excess beyond 127 steps is found when activations are quantized, and multiplied in floats with the rows of
its channels while the product's results are in the processor's cache (mllm-NPU, arXiv 2407.05858, equation
1). Sizes are dynamic: nothing is padded, nothing is dropped. For everything else see `native`.

The row of a channel is the entry of a weight's float rows `[R, outputs]` float16 at the channel's `place`
`[inputs]` int32; where that is negative, it is the 8-bit weight's own.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import Activation
from jaxllm.kernels import native
from jaxllm.kernels.native import Adaptable
from jaxllm.kernels.used_units import UsedUnits


def takes(weight: Adaptable) -> bool:
    """Whether these kernels take a weight in blocks: 8 bits with one scale per output."""
    return native.format_of(weight) == {"bits": 8, "group": 0}


def to_units(
    x: jax.Array,
    weights: Sequence[Adaptable],
    step: jax.Array,
    place: jax.Array,
    rows: Sequence[jax.Array],
    *,
    norm_scale: jax.Array | None = None,
    norm_eps: float = 0.0,
    used: UsedUnits | None = None,
) -> tuple[list[jax.Array], jax.Array]:
    """`native.to_units` with a step, and the number of channels with outliers, `[1]` int32; `rows` per
    weight."""
    outputs = [int(np.prod(weight.shape[:-1])) for weight in weights]
    results = [jax.ShapeDtypeStruct((x.shape[0], count), jnp.float32) for count in outputs]
    call = jax.ffi.ffi_call(native.target("to_units"), [*results, _channels(1)])
    counts, indices = native.unit_counts(used)
    attributes = {**native.format_of(weights[0]), **indices, **native.adapter_offsets(*weights)}
    *found, channels = call(
        x,
        native.optional(norm_scale),
        counts,
        native.steps_operand(step),
        *(part for weight in weights for part in native.parts_of(weight)),
        place,
        *rows,
        **attributes,
        eps=np.float32(norm_eps),
        widen=True,
        units=np.int64(1 if used is None else weights[0].shape[0]),
    )
    return found, channels


def from_units(
    h: jax.Array,
    weight: Adaptable,
    step: jax.Array,
    place: jax.Array,
    rows: jax.Array,
    *,
    residual: jax.Array | None = None,
    used: UsedUnits | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`native.from_units` with a step, and the number of inputs with outliers, `[1]` int32."""
    result = jax.ShapeDtypeStruct((h.shape[0], weight.shape[-1]), jnp.float32)
    call = jax.ffi.ffi_call(native.target("from_units"), [result, _channels(1)])
    stacked = weight.ndim == 3
    counts, indices = native.unit_counts(used)
    out, channels = call(
        h,
        *native.parts_of(weight),
        native.optional(residual),
        counts,
        native.steps_operand(step),
        place,
        rows,
        **native.format_of(weight),
        **indices,
        **native.adapter_offsets(weight),
        stacked=stacked,
        widen=True,
        segments=np.int64(weight.shape[0] if stacked else 1),
    )
    return out, channels


def feed_forward(
    x: jax.Array,
    gate: Adaptable | None,
    up: Adaptable,
    down: Adaptable,
    steps: tuple[jax.Array, jax.Array],
    places: tuple[jax.Array, jax.Array],
    rows: tuple[Sequence[jax.Array], jax.Array],
    *,
    activation: Activation,
    norm_scale: jax.Array | None,
    norm_eps: float,
    residual: bool,
    used: UsedUnits | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`native.feed_forward` with steps, and the numbers of channels of x and of units with outliers, `[2]`
    int32; places and rows are those of x's channels (for gate, if there is one, and up) and of units (for
    down)."""
    result = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    call = jax.ffi.ffi_call(native.target("feed_forward"), [result, _channels(2)])
    nothing = jnp.zeros((0,), jnp.float32)
    first = [*rows[0]] if gate is not None else [nothing, *rows[0]]
    counts, unit_places = native.unit_counts(used)
    out, channels = call(
        x,
        native.optional(norm_scale),
        counts,
        native.steps_operand(*steps),
        *((nothing,) * 4 if gate is None else native.parts_of(gate)),
        *native.parts_of(up),
        *native.parts_of(down),
        places[0],
        *first,
        places[1],
        rows[1],
        **native.format_of(up),
        **unit_places,
        **native.adapter_offsets(gate, up, down),
        units=np.int64(up.shape[0]),
        activation=np.int64(native.ACTIVATIONS.index(activation)),
        residual=residual,
        eps=np.float32(norm_eps),
        widen=True,
    )
    return out, channels


def _channels(count: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count,), jnp.int32)
