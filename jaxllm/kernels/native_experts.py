"""Calls of the native kernels for mixtures of experts, for compiled steps (see `native`).

The result of each token is bit for bit what it is alone.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import Activation
from jaxllm.kernels.native import target
from jaxllm.kernels.native_call import call
from jaxllm.kernels.native_operands import ACTIVATIONS, arrays_of, nothing, optional
from jaxllm.kernels.weight_table import Operand
from jaxllm.quant import PANEL, BlockedArray
from jaxllm.quant.nested import NESTED_GROUP

# Gate, up and down of one expert.
ExpertBlocks = tuple[BlockedArray, BlockedArray, BlockedArray]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StoredExperts:
    """The experts of one layer in a weight table whose rows are layers.

    Attributes:
      table: `[2]` uint32, the handle.
      row: int32 scalar.
      experts: of the layer (E); the arrays of gate, up and down of each follow each other.
      units: of an expert (F).
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
    """The routing of tokens `x` `[M, D]` float32, after an RMS norm if given, by a router `[E, D]` float32
    and its bias `[E]`: logits `[M, E]` float32, weights `[M, k]` float32 and ids `[M, k]` int32 (see
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
    """The outputs of experts for tokens `x`, after an RMS norm if given.

    Args:
      x: `[M, D]` float32.
      tiles: the tokens `[n, tile]`, expert `[n]` and size `[n]` of each tile, and the number of tiles, all
        int32 (see `jaxllm.experts.mixture.Tiles`); in the result each tile begins where the one before ends.
      experts: all experts of a layer, weights `[F, D]`, each with a bitwidth of its own.
      adapters: of gate, up and down, `left` `[E, r, F]` and `right` `[E, r, D]`, or None.
      pairs: rows of the result.
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


# What `stored_visits` does with a tile: nothing; all; of one row of a nested expert what the high planes of
# gate and up give, while its low planes are not there; the rest of that.
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
    """The outputs of some tiles, by experts that are found by address.

    Args:
      x, tiles, activation, norm_scale, norm_eps: see `visits`. An expert's number plus E stands for its high
        plane alone.
      actions: `[n]` int32, of each tile.
      weights: of the layer.
      out: `[P, D]` float32, or more rows, the outputs so far; donated.
      begun: see `begun_shape`; of tiles that were begun, donated. Empty where none is.

    Returns:
      `out` and `begun`, changed at the tiles of these actions alone. To the bit as `visits` gives them, begun
      before or not.
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
    """The shape of what is kept of tiles that were begun, int32: of gate and up, a number for each output and
    group of inputs."""
    return (tiles, 2, -(-units // PANEL), -(-width // NESTED_GROUP), PANEL)


def sum_visits(
    visits: jax.Array, places: jax.Array, weights: jax.Array, residual: jax.Array | None
) -> jax.Array:
    """Each token's sum of its rows in `visits` `[P, D]` float32, at indices `places` `[M, k]` int32, by
    `weights` `[M, k]` float32, plus `residual` `[M, D]` float32 if given: `[M, D]` float32."""
    shape = jax.ShapeDtypeStruct((places.shape[0], visits.shape[-1]), jnp.float32)
    kernel = jax.ffi.ffi_call(target("sum_visits"), shape)
    return kernel(visits, places, weights, optional(residual))
