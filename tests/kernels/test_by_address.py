"""Kernels that read their weights by address give what they give of operands, to the last bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels import native_attention, native_products
from jaxllm.kernels.native import TableArray, WeightTable
from jaxllm.kernels.native_call import UsedUnits, value
from jaxllm.quant import Adapted
from tests.kernels.drawing import WIDTHS, answers, every_width, floats, weight_of
from tests.kernels.switching import needs_native

pytestmark = needs_native
EPS = 1e-5


def entries(weights: Any, handle: Any, row: Any) -> Any:
    """The weights with their arrays by address, in the order of their leaves."""
    leaves, structure = jax.tree.flatten(weights)
    return structure.unflatten(
        TableArray(handle, row, column, np.shape(leaf), leaf.dtype) for column, leaf in enumerate(leaves)
    )


def table_of(weights: Any) -> WeightTable:
    """A table whose second row are the weights, between rows of other numbers."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(weights)]
    others = [np.roll(leaf, 1) for leaf in leaves]
    return WeightTable([others, leaves, others])


def same(door: Any, x: Any, weights: Any) -> None:
    """What a function of activations and weights gives is the same by address, on all kernels."""
    table = table_of(weights)

    def addressed(x, handle, row):
        return door(x, entries(weights, handle, row))

    expected = answers(door, x, weights)
    found = answers(addressed, x, table.operand, np.int32(1))
    others = answers(addressed, x, table.operand, np.int32(2))
    for kernels, got in found.items():
        jax.tree.map(np.testing.assert_array_equal, got, expected[kernels])
        differ = jax.tree.map(lambda a, b: not np.array_equal(a, b), others[kernels], got)
        assert any(jax.tree.leaves(differ)), "another row gives the same"
    table.close()


def adapted(draw, weight):
    left = floats(draw, 3, *weight.shape[:-1])
    return Adapted(weight, left, floats(draw, 3, weight.shape[-1]))


@pytest.mark.parametrize(
    ("rows", "width"), [((1, 19)[at % 2], each) for at, each in enumerate(WIDTHS)], ids=str
)
def test_products(rows, width):
    """With norms, adapters of which two ranks are used, and counts of units."""
    draw = np.random.default_rng(rows)
    weights = {
        "q": adapted(draw, weight_of(draw, (4, 12, 300), width, -1)),
        "k": weight_of(draw, (4, 6, 300), width, -1),
        "o": adapted(draw, weight_of(draw, (4, 41, 50), width, -2)),
        "gate": weight_of(draw, (90, 300), width, -1),
        "up": adapted(draw, weight_of(draw, (90, 300), width, -1)),
        "down": adapted(draw, weight_of(draw, (90, 300), width, -2)),
        "scale": floats(draw, 300),
        "counts": np.array([3, 57, 2], np.int32),
    }

    def door(x, weights):
        groups, neurons = (UsedUnits(weights["counts"], column) for column in range(2))
        norm = dict(norm_scale=weights["scale"], norm_eps=EPS)
        q, k = native_products.to_units(x, [weights["q"], weights["k"]], used=groups, **norm)
        return (
            q[:, : 3 * 12],
            k[:, : 3 * 6],
            native_products.from_units(x[:, :164], weights["o"], residual=x[:, :50], used=groups),
            native_products.feed_forward(
                x, weights["gate"], weights["up"], weights["down"], activation="silu", residual=True,
                used=neurons, **norm,
            ),
            native_products.add_normed(x, 2 * x, weights["scale"], EPS),
        )  # fmt: skip

    same(door, floats(draw, rows, 300), weights)


def test_products_with_shadows():
    draw = np.random.default_rng(0)
    weights = {
        "up": weight_of(draw, (70, 300), (8, 0), -1),
        "down": weight_of(draw, (70, 300), (8, 0), -2),
        "outer": draw.integers(-1, 5, 300, dtype=np.int32),
        "inner": draw.integers(-1, 5, 70, dtype=np.int32),
        "up_rows": draw.normal(size=(5, 70)).astype(np.float16),
        "down_rows": draw.normal(size=(5, 300)).astype(np.float16),
    }

    def door(x, weights):
        up, down, outer, inner, up_rows, down_rows = (
            weights[name] for name in ("up", "down", "outer", "inner", "up_rows", "down_rows")
        )
        step = np.float32(0.01)
        return (
            native_products.to_units_with_shadow(x, [up], step=step, shadow=(outer, up_rows)),
            native_products.from_units_with_shadow(x[:, :70], down, step=step, shadow=(inner, down_rows)),
            native_products.feed_forward_with_shadow(
                x, None, up, down, steps=(step, step), shadow=(outer, up_rows, inner, down_rows),
                activation="relu", norm_scale=None, norm_eps=0.0, residual=False,
            ),
        )  # fmt: skip

    same(door, floats(draw, 5, 300), weights)


@every_width
def test_rows_of_an_embedding(width):
    draw = np.random.default_rng(0)
    index = np.array([[0, 36, 5], [-1, 40, 7]], np.int32)
    weights = weight_of(draw, (37, 70), width, -1)
    same(lambda index, weight: native_products.unit_rows(weight, index), index, weights)


def test_mixtures_of_experts():
    draw = np.random.default_rng(0)
    widths = ((8, 0), (4, 32), (2, 64))
    weights = {
        "experts": [
            tuple(weight_of(draw, (20, 70), width, axis) for axis in (-1, -1, -2)) for width in widths
        ],
        "up": (floats(draw, 3, 2, 20), floats(draw, 3, 2, 70)),
        "router": floats(draw, 3, 70),
        "scale": floats(draw, 70),
    }
    tiles = (
        np.array([[0, 1], [3, 2], [1, 0]], np.int32), np.array([0, 1, 2], np.int32),
        np.array([2, 2, 1], np.int32), np.int32(3),
    )  # fmt: skip

    def door(x, weights):
        scale, router, experts, up = (weights[name] for name in ("scale", "router", "experts", "up"))
        return (
            native_products.route(
                x, router, experts_per_token=2, normalize=True, norm_scale=scale, norm_eps=EPS
            ),
            native_products.visits(
                x, tiles, experts, [None, up, None], 5, activation="silu", norm_scale=scale, norm_eps=EPS
            ),
        )

    same(door, floats(draw, 4, 70), weights)


def test_heads_of_attention():
    draw = np.random.default_rng(0)
    q, k, v = floats(draw, 1, 1, 3, 2, 16), floats(draw, 1, 1, 3, 16), floats(draw, 1, 1, 3, 16)
    keys, values = floats(draw, 1, 3, 32, 16), floats(draw, 1, 3, 32, 16)

    def door(keys, counts):
        at, used = np.array([9], np.int32), UsedUnits(counts, 1)
        out, keys, *_ = native_attention.attention(
            q, k, v, None, keys, values, at, np.int32(1), scale=0.25, used=used
        )
        return out[:, :, :1], keys

    same(door, keys, np.array([3, 2, 1], np.int32))


DTYPES = ["bool", "int8", "uint8", "int32", "uint16", "float16", "bfloat16", "float32"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_comes_out_as_it_is(dtype):
    arrays, kind = [], jnp.dtype(dtype)
    for shape in ((7,), (2, 3), (1, 2, 3, 2, 2), (0, 4)):
        raw = np.random.default_rng(0).integers(0, 256, (*shape, kind.itemsize), dtype=np.uint8)
        arrays.append(np.ascontiguousarray((raw.view(kind) if dtype != "bool" else raw > 100)[..., 0]))
    table = WeightTable([[None, *arrays]])

    @jax.jit
    def door(handle):
        places = [
            TableArray(handle, jnp.int32(0), 1 + at, each.shape, kind) for at, each in enumerate(arrays)
        ]
        return [value(each) for each in places]

    for got, array in zip(map(np.asarray, door(table.operand)), arrays, strict=True):
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got.view(np.uint8), array.view(np.uint8))
    table.close()
