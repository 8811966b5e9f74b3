"""Random weights in blocks, of any level and scale that a file may hold."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels import native, native_products
from jaxllm.quant import BlockedArray, QArray, from_blocks, to_blocks
from jaxllm.quant.blocks import levels_in_blocks
from jaxllm.quant.formats import pack
from jaxllm.quant.nested import FACTORS, HIGHEST, LOWEST, NestedLevels
from tests.kernels.switching import NATIVE, fall_back, kernels_of, threads_of
from tests.quant.plain import levels_of, nested_scales
from tests.quick_jit import jit

# bits, group; or a nested weight, the high plane of one, and 4 bits with a minimum per group.
Width = tuple[int, int] | tuple[str]
NESTED, HIGH, MINIMA = ("nested",), ("high",), ("minima",)
WIDTHS: tuple[Width, ...] = (
    (8, 0), (8, 32), (8, 64), (4, 32), (4, 64), (2, 32), (2, 64), NESTED, HIGH, MINIMA,
)  # fmt: skip
every_width = pytest.mark.parametrize("width", WIDTHS, ids=str)


def weight_of(
    draw: np.random.Generator, shape: tuple[int, ...], width: Width, axis: Literal[-1, -2]
) -> BlockedArray:
    """Levels over the whole range, -128 and -8 too, and scales of either sign; placed on the device."""
    if width in (NESTED, HIGH):
        weight = _nested(draw, shape, axis)
        return weight if width == NESTED else dataclasses.replace(weight, low=None)
    bits, group = (4, 32) if width == MINIMA else width
    high = 1 << (bits - 1)
    levels = draw.integers(-high, high, shape, dtype=np.int8)
    if bits == 2:
        levels = 2 * levels + np.int8(1)
    scales = list(shape)
    scales[axis] = -(-shape[axis] // group) if group else 1
    scale = draw.normal(size=scales) / high
    minimum = draw.normal(size=scales).astype(np.float16) if width == MINIMA else None
    weight = QArray(
        data=pack(levels, bits),
        scale=scale.astype(np.float16 if group else np.float32),
        bits=bits,
        group=group,
        axis=axis,
        columns=shape[-1],
        minimum=minimum,
    )
    return placed(to_blocks(weight))


def _nested(draw: np.random.Generator, shape: tuple[int, ...], axis: Literal[-1, -2]) -> BlockedArray:
    inputs = shape[axis]
    lead = (shape[0] if len(shape) == 3 else 1, shape[-1]) if axis == -2 else (1, int(np.prod(shape[:-1])))
    found = NestedLevels(
        levels=draw.integers(LOWEST, HIGHEST + 1, (*lead, inputs), dtype=np.int8),
        channel=(draw.normal(size=(*lead, 1)) / 2048).astype(np.float32),
        factor=draw.choice(FACTORS, (*lead, -(-inputs // 64))),
    )
    return placed(levels_in_blocks(found, shape, axis))


def afresh(weight: BlockedArray) -> BlockedArray:
    """The same weight, put into blocks again from its numbers."""
    if not weight.nested:
        return to_blocks(from_blocks(weight))
    levels, (channel, factor) = levels_of(weight), nested_scales(weight)
    lead = (weight.shape[0] if weight.ndim == 3 else 1, weight.shape[-1]) if weight.axis == -2 else (1, -1)
    moved = [np.moveaxis(each, weight.axis, -1) for each in (levels, channel, factor)]
    levels, channel, factor = (each.reshape(*lead, weight.shape[weight.axis]) for each in moved)
    found = NestedLevels(
        levels=(levels if weight.low is not None else 16 * levels).astype(np.int8),
        channel=channel[..., :1],
        factor=factor[..., ::64].astype(np.int8),
    )
    blocks = levels_in_blocks(found, weight.shape, weight.axis)  # pyright: ignore[reportArgumentType]
    return blocks if weight.low is not None else dataclasses.replace(blocks, low=None)


def floats(draw: np.random.Generator, *shape: int) -> np.ndarray:
    """Activations whose rows and columns differ in size, as those of a model do."""
    spread = np.exp2(draw.integers(-3, 4, (*shape[:-1], 1))) * np.exp(draw.normal(size=shape[-1:]))
    return (draw.normal(size=shape) * spread).astype(np.float32)


def placed(weight: Any) -> Any:
    """A weight's arrays on the device."""
    return jax.tree.map(jnp.asarray, weight)


def to_units(x: Any, weight: BlockedArray) -> jax.Array:
    """The product with one weight."""
    return native_products.to_units(x, [weight])[0]


def same(first: Any, second: Any) -> None:
    """Equal to the last bit."""
    for (path, a), b in zip(jax.tree.leaves_with_path(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


def same_on_threads(run: Callable[..., Any], *args: Any) -> None:
    """To the last bit on any threads, and again: sums are taken in one order, whoever takes them."""
    found = []
    for count in (1, 2, 3, 1):
        with threads_of(count):
            assert native.threads() == count
            found.append(run(*args))
    for other in found[1:]:
        same(found[0], other)


def compiled(door: Callable[..., Any], *args: Any) -> Callable[..., dict[str, Any]]:
    """One graph for all arguments of the shapes of these, which gives what each set of native kernels gives,
    by name."""
    graph = jit(lambda *args: door(*args)).lower(*args).compile() if NATIVE else None

    def run(*args: Any) -> dict[str, Any]:
        found = {}
        for name in NATIVE:
            with kernels_of(name):
                found[name] = jax.tree.map(np.array, graph(*args))
        return found

    return run


def answers(door: Callable[..., Any], *args: Any, xla: bool = False) -> dict[str, Any]:
    """What each set of native kernels gives, by name; and with `xla`, what a process without them gives."""
    found = compiled(door, *args)(*args)
    if xla:
        with pytest.MonkeyPatch.context() as patch:
            fall_back(patch)
            found["xla"] = jax.tree.map(np.array, jit(lambda *args: door(*args))(*args))
    return found
