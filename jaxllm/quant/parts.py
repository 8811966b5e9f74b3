"""Takes parts of weights of every storage type: the first units, the first rows, one matrix of a stack."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.quant.blocks import (
    PANEL,
    BlockedArray,
    take_blocked_rows,
)
from jaxllm.quant.formats import QArray, scaled
from jaxllm.quant.stacked import map_parts, part_entry, part_first, taken
from jaxllm.quant.weights import (
    Adapted,
    ByForm,
    FirstUnits,
    Narrowed,
    Weight,
)


def take_units(weight: Weight, count: int) -> Weight:
    """The first `count` units (entries of the leading axis): the weight of a sub-model.

    A weight in blocks keeps its buffer under a smaller shape, and nothing is copied. Other types are sliced.

    Raises:
      ConfigError: the weight has fewer units.
    """
    if not 1 <= count <= weight.shape[0]:
        raise ConfigError(f"a weight of {weight.shape[0]} units has no first {count}")
    if isinstance(weight, Adapted):
        return Adapted(take_units(weight.base, count), taken(weight.left)[:, :count], weight.right)
    if isinstance(weight, Narrowed):
        return Narrowed(take_units(weight.stack, count), weight.rows)
    if isinstance(weight, FirstUnits):
        return FirstUnits(weight.base, count)
    if isinstance(weight, BlockedArray):
        return dataclasses.replace(weight, shape=(count, *weight.shape[1:]))
    if isinstance(weight, QArray):
        units_contracted = weight.axis == -2 and weight.ndim == 2
        scales = count
        if units_contracted:
            scales = -(-count // weight.group) if weight.group else 1
        data, scale = part_first(weight.data, count), part_first(weight.scale, scales)
        minimum = None if weight.minimum is None else part_first(weight.minimum, scales)
        return dataclasses.replace(weight, data=data, scale=scale, minimum=minimum)
    return map_parts(lambda part: part_first(part, count), weight)


def first_units(weight: Weight, count: int) -> Weight:
    """`take_units` with all slicing left to the compiled step (see `FirstUnits` and `sliced`)."""
    if isinstance(weight, Adapted):
        return Adapted(first_units(weight.base, count), weight.left[:, :count], weight.right)
    if isinstance(weight, BlockedArray | FirstUnits):
        return take_units(weight, count)
    return FirstUnits(weight, count)


def sliced(weight: Weight) -> Weight:
    """The weight with every `FirstUnits` replaced by its slice."""
    if isinstance(weight, FirstUnits):
        return take_units(weight.base, weight.units)
    if isinstance(weight, Adapted):
        return Adapted(sliced(weight.base), weight.left, weight.right)
    return weight


def narrow(weight: Weight, rows: int) -> Weight:
    """A stack of matrices `[E, R, C]` cut to the first `rows` rows of each.

    Raises:
      ConfigError: the matrices have fewer rows.
    """
    if rows == weight.shape[1]:
        return weight
    if not 1 <= rows <= weight.shape[1]:
        raise ConfigError(f"matrices of {weight.shape[1]} rows have no first {rows}")
    if isinstance(weight, Adapted):
        return Adapted(narrow(weight.base, rows), weight.left[..., :rows], weight.right)
    return Narrowed(weight.stack if isinstance(weight, Narrowed) else weight, rows)


def by_form(matrices: Sequence[Weight], stack: Callable[..., Any] = jnp.stack) -> ByForm:
    """Matrices `[R, C]` as one weight, grouped by form (type, shapes and dtypes).

    Args:
      matrices: in order.
      stack: stacks arrays along a new leading axis.
    """
    forms: dict[Any, list[Weight]] = {}
    form, at = [], []
    for each in matrices:
        leaves, kind = jax.tree.flatten(each)
        key = kind, tuple((leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves)
        members = forms.setdefault(key, [])
        form.append(list(forms).index(key))
        at.append(len(members))
        members.append(each)
    stacks = tuple(jax.tree.map(lambda *parts: stack(parts), *members) for members in forms.values())
    return ByForm(stacks, tuple(form), tuple(at), (len(matrices), *matrices[0].shape))


def entry_of_form(weight: ByForm, form: int, index: jax.Array | int) -> Weight:
    """Matrix number `index` `[R, C]` of those of one form."""
    return map_parts(lambda part: part_entry(part, index), weight.stacks[form])


def unit_at(weight: Weight, index: jax.Array) -> Weight:
    """One unit of a stack of matrices: `[R, C]` of a weight `[U, R, C]`, at `index` (int32 scalar, in range).

    No other unit is read. A weight in blocks gives a unit in blocks, with one exception: where R is the
    output axis and no multiple of a panel, units share panels, and the result is a `QArray` of 8 bits, or
    with minima an array of floats.
    """

    def entry(part: Any) -> Any:
        return part_entry(part, index)

    if isinstance(weight, Adapted):
        return Adapted(unit_at(weight.base, index), entry(weight.left), entry(weight.right))
    if isinstance(weight, Narrowed):
        return take_units(unit_at(weight.stack, index), weight.rows)
    if not isinstance(weight, BlockedArray):
        return map_parts(entry, weight)
    weight = taken(weight)
    units, rows, columns = weight.shape
    if weight.axis == -2:
        # `BlockedArray` has a matrix as a stack of one.
        matrix = jax.tree.map(lambda part: entry(part)[None], weight)
        return dataclasses.replace(matrix, shape=(rows, columns))
    if rows % PANEL == 0:
        matrix = jax.tree.map(lambda part: entry(part.reshape(units, -1, *part.shape[1:])), weight)
        return dataclasses.replace(matrix, shape=(rows, columns))
    flat = dataclasses.replace(weight, shape=(units * rows, columns))
    found = index * rows + jnp.arange(rows, dtype=jnp.int32)
    levels, scale, minimum = take_blocked_rows(flat, found)
    if minimum is not None:
        return scaled(levels.astype(jnp.float32), scale, minimum, weight.group, -1)
    return QArray(levels, scale, bits=8, group=weight.group, axis=-1, columns=columns)
