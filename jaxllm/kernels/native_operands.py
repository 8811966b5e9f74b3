"""Operands and attributes that calls of several native kernels have: weights, counts, steps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import Activation
from jaxllm.kernels.used_units import UsedUnits
from jaxllm.kernels.weight_table import Operand
from jaxllm.quant import Adapted, BlockedArray

Adaptable = BlockedArray | Adapted
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "relu")


def format_of(weight: Adaptable) -> dict[str, np.int64]:
    """Attributes of an FFI call that describe a weight's format."""
    stored = _stored(weight)
    return {"bits": np.int64(stored.bits), "group": np.int64(stored.group)}


def units_of(used: UsedUnits | None, weight: Adaptable) -> dict[str, np.int64]:
    """Attributes: the units of weights whose units are outputs, and the index of their used number."""
    # Weights that are used in part have the same number of units; their rows per unit differ.
    return {
        "units": np.int64(1 if used is None else weight.shape[0]),
        "units_at": np.int64(-1 if used is None else used.column),
    }


def segments_of(used: UsedUnits | None, weight: Adaptable) -> dict[str, Any]:
    """`units_of` of a weight whose units are inputs."""
    stacked = weight.ndim == 3
    return {
        "stacked": stacked,
        "segments": np.int64(weight.shape[0] if stacked else 1),
        "units_at": np.int64(-1 if used is None else used.column),
    }


def block_of(used: UsedUnits | None, up: Adaptable, activation: Activation) -> dict[str, np.int64]:
    """`units_of` of a feed-forward block, and its activation."""
    return {
        "units": np.int64(up.shape[0]),
        "units_at": np.int64(-1 if used is None else used.column),
        "activation": np.int64(ACTIVATIONS.index(activation)),
    }


def parts_of(weight: Adaptable) -> tuple[Operand, ...]:
    """Operands of a weight: its arrays, and its adapter's factors, empty without one."""
    sides = (nothing(), nothing())
    if isinstance(weight, Adapted):
        sides = (_wide(weight.left), _wide(weight.right))
    return *arrays_of(_stored(weight)), *sides


def arrays_of(weight: BlockedArray) -> tuple[Operand, ...]:
    """Operands of a weight without its adapter: data, scales, and the low plane, empty for none."""
    return weight.data, weight.scale, nothing() if weight.low is None else weight.low


def no_parts() -> tuple[Operand, ...]:
    """The operands of a weight that is not there."""
    return (nothing(),) * 5


def _stored(weight: Adaptable) -> BlockedArray:
    """A weight without its adapter."""
    stored = weight if isinstance(weight, BlockedArray) else weight.base
    assert isinstance(stored, BlockedArray)
    return stored


def _wide(side: Operand) -> Operand:
    return side.astype(jnp.float32) if isinstance(side, jax.Array) else side


def counts_operand(used: UsedUnits | None) -> Operand:
    """The operand with the counts of used units, empty for all."""
    return jnp.zeros((0,), jnp.int32) if used is None else used.counts


def count_operand(count: jax.Array | np.integer | None) -> jax.Array:
    """A number, or numbers, as an operand, empty for none."""
    return jnp.zeros((0,), jnp.int32) if count is None else jnp.asarray(count, jnp.int32)


def steps_operand(*steps: jax.Array | None) -> jax.Array:
    """Static steps as an operand, empty for none."""
    given = [each for each in steps if each is not None]
    return jnp.stack([jnp.asarray(each, jnp.float32) for each in given]) if given else nothing()


def nothing() -> jax.Array:
    """The operand of floats that are not there."""
    return jnp.zeros((0,), jnp.float32)


def optional(value: Operand | None) -> Operand:
    """An optional operand, empty for none."""
    return nothing() if value is None else value
