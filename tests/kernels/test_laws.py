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
from tests.kernels.drawing import WIDTHS, afresh, answers, compiled, floats, placed, weight_of
from tests.kernels.switching import NATIVE, needs_native, threads_of

pytestmark = needs_native
every_width = pytest.mark.parametrize("width", WIDTHS, ids=str)


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


@pytest.mark.parametrize(
    ("rows", "width"), [((1, 35)[at % 2], each) for at, each in enumerate(WIDTHS)], ids=str
)
def test_threads_change_nothing(rows, width):
    """To the last bit: sums are taken in one order, whoever takes them."""
    door, args = products_of(rows, width)
    run, found = compiled(door, *args), []
    for count in (1, 2, 3, 1):
        with threads_of(count):
            assert native.threads() == count
            found.append(run(*args))
    for other in found[1:]:
        same(found[0], other)


def test_the_same_again():
    """However often, with other shapes in between, whose scratch is larger or smaller."""
    door, args = products_of(17, (8, 0))
    other, more = products_of(3, (4, 32))
    run, between = compiled(door, *args), compiled(other, *more)
    first = run(*args)
    for _ in range(5):
        between(*more)
        same(first, run(*args))


@every_width
def test_a_row_is_the_same_in_any_company(width):
    """Alone (a decode step) or among others (a drafted tree), to the last bit; of prompts at fewer than 8
    bits but for what widening the weights costs."""
    draw = np.random.default_rng(0)
    out, stack = weight_of(draw, (70, 300), width, -1), weight_of(draw, (3, 100, 70), width, -2)
    x = floats(draw, 33, 300)

    def rowwise(x, weight):
        if weight.axis == -1:
            return native_products.to_units(x, [weight], rowwise=True)[0]
        return native_products.from_units(x, weight, residual=x[:, :70], rowwise=True)

    for weight, segments in ((out, 1), (stack, 3)):
        door = to_units if weight.axis == -1 else native_products.from_units
        together, prompt = (answers(each, x, weight) for each in (rowwise, door))
        alone, decoded = (compiled(each, x[:1], weight) for each in (rowwise, door))
        seen = oracle.rounded(oracle.known(x), segments).value
        room = oracle.product(oracle.known(x), weight, kernels="native", segments=segments).error
        if width[0] != 8:
            dense = [oracle.matrix(weight, widened=widened) for widened in (False, True)]
            room = room + np.abs(seen @ (dense[1] - dense[0]))
        for row in (0, 5, 32):
            one, step = (run(x[row : row + 1], weight) for run in (alone, decoded))
            for kernels in NATIVE:
                np.testing.assert_array_equal(one[kernels][0], together[kernels][row], err_msg=kernels)
                off = np.abs(step[kernels][0] - prompt[kernels][row].astype(np.float64))
                assert np.all(off <= room[row]), (kernels, door.__name__)


# Smaller models


def assert_prefix(weight, x, units, fresh):
    """The first units through the same buffer are those of a weight that never had the others."""
    part = take_units(weight, units)
    assert part.data is weight.data
    assert part.scale is weight.scale
    door = to_units if weight.axis == -1 else native_products.from_units
    same(answers(door, x, part), answers(door, x, fresh))


@pytest.mark.slow
@settings(max_examples=12)
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


@every_width
def test_a_prefix_of_kv_heads_is_a_smaller_weight(width):
    draw = np.random.default_rng(0)
    for axis, units in ((-1, 1), (-2, 3)):
        weight = weight_of(draw, (4, 41, 50), width, axis)
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


def test_weights_and_their_prefixes_are_read_in_place():
    """No copy in the graph either: nothing of the weights' size is held while it runs."""
    draw = np.random.default_rng(0)
    norm = linear.Norm(scale=floats(draw, 512), bias=None, eps=1e-5)
    up, down = (weight_of(draw, (1024, 512), (8, 0), axis) for axis in (-1, -2))
    block = linear.FeedForward(up=up, down=down, activation="relu")

    def door(x, norm, weights):
        return linear.feed_forward(x, norm, weights, add_input=True)

    for step, *weights in (
        (to_units, take_units(up, 512)),
        (native_products.from_units, take_units(down, 512)),
        (door, norm, block),
    ):
        graph = jax.jit(step).lower(floats(draw, 1, 512), *weights).compile()
        assert graph.memory_analysis().temp_size_in_bytes < 16 << 10
