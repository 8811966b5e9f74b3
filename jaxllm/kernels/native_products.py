"""Calls of the native products, for compiled steps: plain, of experts, with a static scale and its shadow.

Activations are quantized on the fly to 8 bits, with one scale per token and 256 inputs, or with a given
static `step` in [1e-30, 1e30], at which values beyond ±127 steps are clipped. With scales of their own the
two largest of 256 have 7 bits more, so that they do not make the steps of the others coarse (outliers apart,
as in LLM.int8(), arXiv 2208.07339, but in integers). A token with NaN or infinity among its activations gives
NaN; magnitudes under 1e-30 count as zero.

With a step a product may add its shadow itself: the excess beyond 127 steps is found when activations are
quantized, and multiplied in floats with the rows of its channels while the product's results are in the
processor's cache (mllm-NPU, arXiv 2407.05858, equation 1). Sizes are dynamic: nothing is padded or dropped.
The row of a channel is the entry of a weight's float rows `[R, outputs]` float16 at the channel's `place`
`[inputs]` int32; where that is negative, it is the 8-bit weight's own.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.config import Activation
from jaxllm.kernels.native import Operand, target
from jaxllm.kernels.native_call import (
    ACTIVATIONS,
    Adaptable,
    UsedUnits,
    arrays_of,
    block_of,
    call,
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
from jaxllm.quant import PANEL, BlockedArray, QArray, Weight
from jaxllm.quant.nested import NESTED_GROUP


def to_units(
    x: jax.Array,
    weights: Sequence[Adaptable],
    *,
    norm_scale: Operand | None = None,
    norm_eps: float = 0.0,
    used: UsedUnits | None = None,
    batch_invariant: bool = False,
    step: jax.Array | None = None,
    valid_rows: jax.Array | None = None,
    shadow: Sequence[Operand] = (),
) -> list[jax.Array]:
    """Products of `x` `[M, D]` float32, after an RMS norm if given, with weights `[*U, D]` of one format,
    contracted along their last axis: `[M, prod(U)]` float32 each; with a step and a shadow (a place, and rows
    for each weight) last the number of channels with outliers, `[1]` int32.

    For `used`, `batch_invariant`, `step` and `valid_rows` see `jaxllm.nn.linear`: outputs of unused units,
    and of rows after the first `valid_rows`, are undefined.
    """
    outputs = [int(np.prod(weight.shape[:-1])) for weight in weights]
    results = [jax.ShapeDtypeStruct((x.shape[0], count), jnp.float32) for count in outputs]
    return list(
        call(
            "to_units",
            [*results, *_channels(shadow, 1)],
            (x, count_operand(valid_rows)),
            (
                optional(norm_scale),
                counts_operand(used),
                steps_operand(step),
                *(part for weight in weights for part in parts_of(weight)),
                *shadow,
            ),
            **format_of(weights[0]),
            **units_of(used, weights[0]),
            eps=np.float32(norm_eps),
            widen=not batch_invariant,
            shadowed=bool(shadow),
        )
    )


def from_units(h: jax.Array, weight: Adaptable, **options: Any) -> jax.Array:
    """Product of `h` `[M, prod(U)]` float32 with a weight `[*U, D]`, contracted over its used units, plus
    `residual` `[M, D]` if given: `[M, D]` float32. For the other options see `to_units`."""
    return from_units_with_shadow(h, weight, **options)[0]


def from_units_with_shadow(
    h: jax.Array,
    weight: Adaptable,
    *,
    residual: jax.Array | None = None,
    used: UsedUnits | None = None,
    batch_invariant: bool = False,
    step: jax.Array | None = None,
    valid_rows: jax.Array | None = None,
    shadow: Sequence[Operand] = (),
) -> list[jax.Array]:
    """`from_units` with a step and a shadow (a place and rows), and the number of inputs with outliers, `[1]`
    int32."""
    return call(
        "from_units",
        [jax.ShapeDtypeStruct((h.shape[0], weight.shape[-1]), jnp.float32), *_channels(shadow, 1)],
        (h, count_operand(valid_rows), optional(residual)),
        (*parts_of(weight), counts_operand(used), steps_operand(step), *shadow),
        **format_of(weight),
        **segments_of(used, weight),
        widen=not batch_invariant,
    )


def feed_forward(
    x: jax.Array, gate: Adaptable | None, up: Adaptable, down: Adaptable, **options: Any
) -> jax.Array:
    """`down(activation(gate(x)) · up(x))` of `x` `[M, D]` float32 over the used units of weights `[F, D]` of
    one format. x is RMS-normalized first if a norm is given, and added to the result if `residual`. `steps`
    are those of x and of the input of `down`. For the other options see `to_units`."""
    return feed_forward_with_shadow(x, gate, up, down, **options)[0]


def feed_forward_with_shadow(
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
    batch_invariant: bool = False,
    steps: tuple[jax.Array, jax.Array] | None = None,
    valid_rows: jax.Array | None = None,
    shadow: Sequence[Operand] = (),
) -> list[jax.Array]:
    """`feed_forward` with steps and a shadow, and the numbers of channels of x and of units with outliers,
    `[2]` int32. The shadow is a place of x's channels and rows (for gate, if there is one, and up), then a
    place of units and rows (for down)."""
    if shadow and gate is None:
        shadow = (shadow[0], nothing(), *shadow[1:])
    return call(
        "feed_forward",
        [jax.ShapeDtypeStruct(x.shape, jnp.float32), *_channels(shadow, 2)],
        (x, count_operand(valid_rows)),
        (
            optional(norm_scale),
            counts_operand(used),
            steps_operand(*(steps or ())),
            *(no_parts() if gate is None else parts_of(gate)),
            *parts_of(up),
            *parts_of(down),
            *shadow,
        ),
        **format_of(up),
        **block_of(used, up, activation),
        residual=residual,
        eps=np.float32(norm_eps),
        widen=not batch_invariant,
    )


def _channels(shadow: Sequence[Operand], count: int) -> list[jax.ShapeDtypeStruct]:
    """The result with the numbers of channels with outliers, if there is a shadow."""
    return [jax.ShapeDtypeStruct((count,), jnp.int32)] if shadow else []


def add_normed(
    residual: jax.Array, x: jax.Array, scale: Operand, eps: float, valid_rows: jax.Array | None = None
) -> jax.Array:
    """`residual` and the RMS norm of rows `x`, both `[M, D]` float32: `[M, D]`. For `valid_rows` see
    `to_units`."""
    result = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return call("add_normed", result, (x, residual, count_operand(valid_rows)), (scale,), eps=np.float32(eps))


def integer_product(x: jax.Array, weight: BlockedArray) -> jax.Array:
    """`x` `[M, D]` int8 in [-127, 127] times the levels of a weight `[R, D]` of 8 bits, without scales: `[M,
    R]` int32, exact. -128 counts as -127."""
    call = jax.ffi.ffi_call(
        target("integer_product"), jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.int32)
    )
    return call(x, weight.data)


def unit_rows(weight: BlockedArray, index: jax.Array, valid_rows: jax.Array | None = None) -> jax.Array:
    """Rows of a weight `[R, C]`, contracted along its last axis, at `index` (any shape, int32; out of range
    counts as the last): `[*index.shape, C]` float32. For `valid_rows` see `to_units`."""
    result = jax.ShapeDtypeStruct((*index.shape, weight.shape[-1]), jnp.float32)
    buffers, operands = (index, count_operand(valid_rows)), arrays_of(weight)
    outputs = np.int64(weight.shape[0])
    return call("unit_rows", result, buffers, operands, **format_of(weight), outputs=outputs)


def zeros(shapes: Sequence[tuple[int, ...]], dtype: DTypeLike) -> list[jax.Array]:
    """Returns arrays of zeros that are allocated on first use, if the system supports that."""
    return list(jax.ffi.ffi_call(target("zeros"), [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes])())


# The result of a token in a mixture of experts is bit for bit its result without others.
# Gate, up and down of one expert.
ExpertBlocks = tuple[BlockedArray, BlockedArray, BlockedArray]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StoredExperts:
    """Experts of one layer in a weight table whose rows are layers.

    Attributes:
      table: `[2]` uint32, the handle.
      row: int32 scalar, the row of the layer.
      experts: number of experts of the layer (E); the arrays of gate, up and down of each are adjacent.
      units: number of units of an expert (F).
    """

    table: jax.Array
    row: jax.Array
    experts: int = dataclasses.field(metadata={"static": True})
    units: int = dataclasses.field(metadata={"static": True})


def route(
    x: jax.Array,
    router: Operand,
    *,
    experts_per_token: int,
    normalize: bool,
    norm_scale: Operand | None = None,
    norm_eps: float = 0.0,
    bias: Operand | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Routes tokens `x` `[M, D]` float32, after an RMS norm if given, by a router `[E, D]` float32 and its
    bias `[E]`: logits `[M, E]` float32, weights `[M, k]` float32 and ids `[M, k]` int32 (see
    `jaxllm.experts.routing.route`)."""
    chosen = (x.shape[0], experts_per_token)
    logits, weights, ids = call(
        "route",
        [
            jax.ShapeDtypeStruct((x.shape[0], router.shape[0]), jnp.float32),
            jax.ShapeDtypeStruct(chosen, jnp.float32),
            jax.ShapeDtypeStruct(chosen, jnp.int32),
        ],
        (x,),
        (optional(norm_scale), router, optional(bias)),
        eps=np.float32(norm_eps),
        normalized=normalize,
    )
    return logits, weights, ids


def visits(
    x: jax.Array,
    tiles: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    experts: Sequence[ExpertBlocks],
    adapters: Sequence[tuple[Operand, Operand] | None],
    pairs: int,
    *,
    activation: Activation,
    norm_scale: Operand | None,
    norm_eps: float,
) -> jax.Array:
    """Returns the outputs of experts for tokens `x`, after an RMS norm if given.

    Args:
      x: `[M, D]` float32.
      tiles: the tokens `[n, tile]`, expert `[n]` and size `[n]` of each tile, and the number of tiles, all
        int32 (see `jaxllm.experts.mixture.Tiles`); in the result each tile begins at the end of the
        previous one.
      experts: all experts of a layer, weights `[F, D]`, each with its own bitwidth.
      adapters: adapters of gate, up and down, `left` `[E, r, F]` and `right` `[E, r, D]`, or None.
      pairs: number of rows of the result.
      activation, norm_scale, norm_eps: see `native.feed_forward`.
    """
    sides = [each or (nothing(), nothing()) for each in adapters]
    return call(
        "experts",
        jax.ShapeDtypeStruct((pairs, x.shape[-1]), jnp.float32),
        (x, *tiles),
        (
            optional(norm_scale),
            *(side for both in sides for side in both),
            *(part for expert in experts for weight in expert for part in arrays_of(weight)),
        ),
        bits=np.array([expert[0].bits for expert in experts], np.int64),
        groups=np.array([expert[0].group for expert in experts], np.int64),
        units=np.int64(experts[0][1].shape[0]),
        activation=np.int64(ACTIVATIONS.index(activation)),
        eps=np.float32(norm_eps),
    )


# Action of `stored_visits` on a tile: nothing; all; for one row of a nested expert the results of the high
# planes of gate and up, while its low planes are missing; the rest of that.
LEAVE, RUN, BEGIN, FINISH = range(4)


def stored_visits(
    x: jax.Array,
    tiles: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    actions: jax.Array,
    weights: StoredExperts,
    out: jax.Array,
    begun: jax.Array,
    *,
    activation: Activation,
    norm_scale: Operand | None,
    norm_eps: float,
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs of some tiles, by experts that are found by address.

    Args:
      x, tiles, activation, norm_scale, norm_eps: see `visits`. An expert's number plus E denotes only its
        high plane.
      actions: `[n]` int32, action of each tile.
      out: `[P, D]` float32, or more rows, the outputs so far; donated.
      begun: results of tiles that were begun (see `begun_shape`); donated. Empty for none.

    Returns:
      `out` and `begun`, changed only at the tiles of these actions. Bit for bit the results of `visits`,
      begun before or not.
    """
    results = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (out, begun))
    kernel = jax.ffi.ffi_call(target("stored_experts"), results, input_output_aliases={9: 0, 10: 1})
    found, begun = kernel(
        x,
        *tiles,
        actions,
        optional(norm_scale),
        weights.table,
        weights.row,
        out,
        begun,
        units=np.int64(weights.units),
        experts=np.int64(weights.experts),
        activation=np.int64(ACTIVATIONS.index(activation)),
        eps=np.float32(norm_eps),
    )
    return found, begun


def begun_shape(tiles: int, units: int, width: int) -> tuple[int, ...]:
    """Returns the shape of the results of tiles that were begun, int32: for gate and up, a number for each
    output and group of inputs."""
    return (tiles, 2, -(-units // PANEL), -(-width // NESTED_GROUP), PANEL)


def sum_visits(
    visits: jax.Array, places: jax.Array, weights: jax.Array, residual: jax.Array | None
) -> jax.Array:
    """Returns each token's sum of its rows in `visits` `[P, D]` float32, at indices `places` `[M, k]`
    int32, by `weights` `[M, k]` float32, plus `residual` `[M, D]` float32 if given: `[M, D]` float32."""
    shape = jax.ShapeDtypeStruct((places.shape[0], visits.shape[-1]), jnp.float32)
    kernel = jax.ffi.ffi_call(target("sum_visits"), shape)
    return kernel(visits, places, weights, optional(residual))


def takes(weight: Adaptable) -> bool:
    """Whether these kernels support a weight in blocks: 8 bits with one scale per output."""
    return format_of(weight) == {"bits": 8, "group": 0}


# Without native kernels XLA multiplies activations that are quantized with a static step. Weights of 8 bits
# with one scale per output are multiplied in integers, exactly, which is faster on accelerators than floats.
# With other weights, activations are rounded to steps and the product is in floats.

# Largest number of steps, of a symmetric 8-bit range.
TOP_LEVEL = 127


def in_integers(weight: Weight) -> bool:
    """Whether the weight is multiplied in integers."""
    return isinstance(weight, QArray) and weight.bits == 8 and not weight.group


def levels(x: jax.Array, step: jax.Array) -> jax.Array:
    """Returns `x` in steps, as floats: integers in [-127, 127], and NaN if x is NaN."""
    top = np.float32(TOP_LEVEL)
    return jnp.clip(jnp.round(x.astype(jnp.float32) / step), -top, top)


def rounded(x: jax.Array, step: jax.Array) -> jax.Array:
    """`x` `[M, D]` rounded to whole steps and clipped; rows with an infinity become NaN."""
    return _broken_as_nan(x, levels(x, step) * step).astype(x.dtype)


def rows_product(rows: jax.Array, weight: Weight, step: jax.Array) -> jax.Array:
    """Multiplies activations `[M, D]` by a matrix `[R, D]` that `in_integers` accepts: `[M, R]`."""
    assert isinstance(weight, QArray)
    sums = jax.lax.dot_general(
        levels(rows, step).astype(jnp.int8),
        weight.data,
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.int32,
    )
    return _broken_as_nan(rows, sums.astype(jnp.float32) * (step * weight.scale[:, 0])).astype(rows.dtype)


def reduction_product(rows: jax.Array, weight: Weight, step: jax.Array) -> jax.Array:
    """Multiplies activations `[M, prod(U)]` by a weight `[*U, D]` that `in_integers` accepts: `[M, D]`."""
    assert isinstance(weight, QArray)
    # Each entry of a stack has its own scale per output.
    data = weight.data.reshape(-1, *weight.data.shape[-2:])
    scale = weight.scale.reshape(-1, weight.scale.shape[-1])
    parts = levels(rows, step).astype(jnp.int8).reshape(len(rows), len(data), -1)
    sums = jax.lax.dot_general(
        parts, data, (((2,), (1,)), ((1,), (0,))), preferred_element_type=jnp.int32
    ).astype(jnp.float32)
    out = jnp.sum(sums * (step * scale)[:, None], axis=0)
    return _broken_as_nan(rows, out).astype(rows.dtype)


def _broken_as_nan(rows: jax.Array, out: jax.Array) -> jax.Array:
    """Sets rows of the result to NaN where the activations have NaN or infinity, which integers cannot
    represent."""
    fine = jnp.all(jnp.isfinite(rows), axis=-1, keepdims=True)
    return jnp.where(fine, out, np.asarray(np.nan, out.dtype))
