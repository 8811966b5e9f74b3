"""Tests that kernels give the same answers with any threads, batch, processor and time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.kernels import native, native_products
from jaxllm.nn import linear
from jaxllm.quant import take_units
from tests.kernels import oracle
from tests.kernels.drawing import WIDTHS, afresh, answers, floats, jit, placed, weight_of
from tests.kernels.switching import NATIVE, kernels_of, needs_native, threads_of

pytestmark = needs_native
every_width = pytest.mark.parametrize("width", WIDTHS, ids=str)
every_kernels = pytest.mark.parametrize("kernels", NATIVE)


def to_units(x, weight):
    return native_products.to_units(x, [weight])[0]


def products_of(rows, width, seed=0):
    """Every kind of product at once, with more outputs than one task has, of `rows` rows."""
    draw = np.random.default_rng(seed)
    up, gate, out = (weight_of(draw, (160, 300), width, axis) for axis in (-1, -1, -2))
    stack, x = weight_of(draw, (2, 150, 90), width, -2), floats(draw, rows, 300)
    scale, small = floats(draw, 300), np.float32(1 / 64) * floats(draw, rows, 160)

    def door(x, small, up, gate, out, stack, scale):
        normed = native_products.to_units(x, [up, gate], norm_scale=scale, norm_eps=1e-5)
        options = dict(activation="silu", norm_scale=scale, norm_eps=1e-5, residual=True)
        return {
            "normed": normed,
            "to_units": to_units(x, up),
            "from_units": native_products.from_units(small, out),
            "stacked": native_products.from_units(x, stack, residual=x[:, :90]),
            "feed_forward": native_products.feed_forward(x, gate, up, out, **options),
        }

    return door, (x, small, up, gate, out, stack, scale)


def same(first, second):
    for (path, a), b in zip(jax.tree.leaves_with_path(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


@every_width
@pytest.mark.parametrize("rows", [1, 35])
def test_threads_change_nothing(rows, width):
    """To the last bit: sums are taken in one order, whoever takes them."""
    door, args = products_of(rows, width)
    graph = jit(door).lower(*args).compile()
    for kernels in NATIVE:
        with kernels_of(kernels):
            found = []
            for count in (1, 2, 3, 1):
                with threads_of(count):
                    assert native.threads() == count
                    found.append(jax.tree.map(np.array, graph(*args)))
        for other in found[1:]:
            same(found[0], other)


@every_kernels
def test_the_same_again(kernels):
    """However often, with other shapes in between, whose scratch is larger or smaller."""
    door, args = products_of(17, (8, 0))
    other, more = products_of(3, (4, 32))
    graph, between = jit(door).lower(*args).compile(), jit(other).lower(*more).compile()
    with kernels_of(kernels):
        first = jax.tree.map(np.array, graph(*args))
        for _ in range(5):
            between(*more)
            same(first, graph(*args))


@every_width
def test_a_row_is_the_same_in_any_company(width):
    """Alone (a decode step) or among others (a drafted tree), to the last bit; of prompts at fewer than 8
    bits but for what widening the weights costs."""
    draw = np.random.default_rng(0)
    rows = 33
    out, stack = weight_of(draw, (70, 300), width, -1), weight_of(draw, (3, 100, 70), width, -2)
    x = floats(draw, rows, 300)

    def rowwise(x, weight):
        if weight.axis == -1:
            return native_products.to_units(x, [weight], rowwise=True)[0]
        return native_products.from_units(x, weight, residual=x[:, :70], rowwise=True)

    for weight, segments in ((out, 1), (stack, 3)):
        together = answers(rowwise, x, weight)
        door = to_units if weight.axis == -1 else native_products.from_units
        prompt = answers(door, x, weight)
        for row in (0, 5, 32):
            alone, decoded = (answers(each, x[row : row + 1], weight) for each in (rowwise, door))
            known = oracle.product(oracle.known(x), weight, kernels="native", segments=segments)
            room = known.error[row]
            if width[0] != 8:
                dense = [oracle.matrix(weight, widened=widened) for widened in (False, True)]
                seen = oracle.rounded(oracle.known(x), segments).value
                room = room + np.abs(seen[row] @ (dense[1] - dense[0]))
            for kernels in NATIVE:
                np.testing.assert_array_equal(alone[kernels][0], together[kernels][row], err_msg=kernels)
                off = np.abs(decoded[kernels][0] - prompt[kernels][row].astype(np.float64))
                assert np.all(off <= room), (kernels, door.__name__)


@pytest.mark.parametrize("rows", [1, 15])
@every_width
def test_processors_agree(width, rows):
    """Whole numbers are summed exactly everywhere; floats round by some 1e-7."""
    draw = np.random.default_rng(1)
    for shape, axis, segments in (((70, 600), -1, 1), ((3, 200, 70), -2, 3)):
        weight, x = weight_of(draw, shape, width, axis), floats(draw, rows, 600)
        found = answers(to_units if axis == -1 else native_products.from_units, x, weight)
        room = oracle.product(oracle.known(x), weight, kernels="native", segments=segments).error
        for kernels in NATIVE[1:]:
            assert np.all(np.abs(found[kernels].astype(np.float64) - found[NATIVE[0]]) <= room)


# Smaller models


def assert_prefix(weight, x, units, fresh):
    """The first units through the same buffer are those of a weight that never had the others."""
    part = take_units(weight, units)
    assert part.data is weight.data
    assert part.scale is weight.scale
    door = to_units if weight.axis == -1 else native_products.from_units
    same(answers(door, x, part), answers(door, x, fresh))


@pytest.mark.slow
@settings(deadline=None, max_examples=12)
@given(
    width=st.sampled_from(WIDTHS), axis=st.sampled_from([-1, -2]), units=st.integers(1, 130),
    more=st.integers(0, 70), other=st.integers(1, 70), rows=st.sampled_from([1, 2, 15]),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_a_prefix_of_units_is_a_smaller_weight(width, axis, units, more, other, rows, seed):
    """In the middle of a panel, a block or a group too; to the last bit."""
    draw = np.random.default_rng(seed)
    weight = weight_of(draw, (units + more, other), width, axis)
    fresh = placed(afresh(take_units(weight, units)))
    assert fresh.data.size <= weight.data.size
    x = floats(draw, rows, other if axis == -1 else units)
    assert_prefix(weight, x, units, fresh)


@pytest.mark.parametrize("axis", [-1, -2])
@every_width
def test_a_prefix_of_kv_heads_is_a_smaller_weight(width, axis):
    draw = np.random.default_rng(0)
    weight = weight_of(draw, (4, 41, 50), width, axis)
    for units in (1, 3):
        fresh = placed(afresh(take_units(weight, units)))
        assert_prefix(weight, floats(draw, 3, 50 if axis == -1 else units * 41), units, fresh)


def test_a_prefix_reads_nothing_else():
    """What lies behind the units in use is not even looked at: NaN scales there change nothing."""
    draw = np.random.default_rng(0)
    for width in ((8, 0), (4, 32)):
        weight = weight_of(draw, (128, 64), width, -1)
        scale = np.array(weight.scale)
        scale[4 if width[1] else 64 :] = np.nan
        poisoned = dataclasses.replace(weight, scale=jnp.asarray(scale))
        for rows in (1, 20):
            x = floats(draw, rows, 64)
            clean, got = (answers(to_units, x, take_units(each, 64)) for each in (weight, poisoned))
            same(clean, got)


def test_a_prefix_is_read_in_place():
    """No copy in the graph either: nothing of the weights' size is held while it runs."""
    draw = np.random.default_rng(0)
    for axis in (-1, -2):
        weight = take_units(weight_of(draw, (1024, 512), (8, 0), axis), 512)
        x = floats(draw, 1, 512)
        graph = jax.jit(to_units if axis == -1 else native_products.from_units).lower(x, weight).compile()
        assert graph.memory_analysis().temp_size_in_bytes < 16 << 10


def test_doors_of_a_graph_read_in_place():
    draw = np.random.default_rng(0)
    weights = linear.FeedForward(
        up=weight_of(draw, (512, 256), (8, 0), -1),
        down=weight_of(draw, (512, 256), (8, 0), -2),
        activation="relu",
    )
    norm = linear.Norm(scale=floats(draw, 256), bias=None, eps=1e-5)

    def door(x, norm, weights):
        return linear.feed_forward(x, norm, weights, add_input=True)

    graph = jax.jit(door).lower(floats(draw, 1, 256), norm, weights).compile()
    assert graph.memory_analysis().temp_size_in_bytes < 16 << 10
