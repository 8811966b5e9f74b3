"""Tests that kernels give the same answers with any threads, batch, processor and time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.kernels import native_products
from jaxllm.nn import linear
from jaxllm.quant import take_units
from tests.kernels import oracle
from tests.kernels.drawing import (
    WIDTHS,
    afresh,
    answers,
    compiled,
    every_width,
    floats,
    placed,
    same,
    same_on_threads,
    to_units,
    weight_of,
)
from tests.kernels.refusing import COUNTS, NOTHING, STEPS, UNITS, formats
from tests.kernels.switching import NATIVE, needs_native

pytestmark = needs_native
EPS = 1e-5


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


@pytest.mark.parametrize(
    ("rows", "width"), [((1, 35)[at % 2], each) for at, each in enumerate(WIDTHS)], ids=str
)
def test_threads_change_nothing(rows, width):
    door, args = products_of(rows, width)
    same_on_threads(compiled(door, *args), *args)


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


# The first rows of some


@every_width
def test_the_first_rows_are_what_they_are_among_all(width):
    """Bit for bit what a call of all rows gives, whatever is behind them: a token is the same however
    full its chunk is. Where weights are not widened, also what these rows give alone."""
    draw = np.random.default_rng(0)
    up, gate = (weight_of(draw, (90, 300), width, -1) for _ in "ug")
    down, stack = weight_of(draw, (90, 300), width, -2), weight_of(draw, (3, 41, 50), width, -2)
    rows, scale = floats(draw, 19, 300), floats(draw, 300)

    def door(x, live, up, gate, down, stack, scale):
        norm = dict(norm_scale=scale, norm_eps=EPS)
        return [
            *native_products.to_units(x, [up, gate], **norm, live=live),
            native_products.from_units(x[:, :123], stack, residual=x[:, :50], live=live),
            native_products.feed_forward(
                x, gate, up, down, activation="gelu", residual=True, **norm, live=live
            ),
            native_products.add_normed(x, x, scale, EPS, live),
        ]

    weights = up, gate, down, stack, scale
    run = compiled(door, rows, np.int32(1), *weights)
    among = answers(lambda x, *weights: door(x, None, *weights), rows, *weights)
    for live in (1, 2, 7, 19):
        x = np.where(np.arange(19)[:, None] < live, rows, np.nan).astype(np.float32)
        found, first = jax.tree.map(
            lambda each, live=live: each[:live], (run(x, np.int32(live), *weights), among)
        )
        same(found, first)
        if width in ((8, 0), (8, 32), (8, 64)):
            same(found, answers(lambda x, *weights: door(x, None, *weights), rows[:live], *weights))


def test_rows_behind_them_are_not_touched():
    """Results in the memory of an operand keep what is there."""
    draw = np.random.default_rng(0)
    up, down = weight_of(draw, (300, 300), (8, 0), -1), weight_of(draw, (300, 300), (8, 0), -2)
    x, more, scale = floats(draw, 19, 300), floats(draw, 19, 300), floats(draw, 300)
    nothing = np.zeros(0, np.uint32), np.zeros(0, np.int32)
    live, plain = np.int32(7), [up.data, up.scale, NOTHING, NOTHING, NOTHING]
    block = [NOTHING, COUNTS, STEPS, *[NOTHING] * 5, *plain, down.data, down.scale, *[NOTHING] * 3]
    calls = {
        "to_units": ([x, live], [NOTHING, COUNTS, STEPS, *plain], UNITS),
        "from_units": (
            [x, live, more], [down.data, down.scale, *[NOTHING] * 3, COUNTS, STEPS],
            dict(segments=np.int64(1), stacked=False, units_at=np.int64(-1)),
        ),
        "feed_forward": (
            [x, live], block,
            dict(
                units=np.int64(300), activation=np.int64(3), residual=False, eps=np.float32(0),
                units_at=np.int64(-1),
            ),
        ),
        "add_normed": ([x, more, live], [scale], dict(eps=np.float32(EPS))),
    }  # fmt: skip
    for name, (buffers, operands, options) in calls.items():
        options = dict(options, columns=np.full(len(operands), -1, np.int64))
        if name != "add_normed":
            options |= formats()
        shape = jax.ShapeDtypeStruct((19, 300), np.float32)
        result = [shape] if name == "to_units" else shape
        # The residual, where there is one, is the memory of the result.
        at = {"from_units": 2, "add_normed": 1}.get(name, 0)
        kernel = jax.ffi.ffi_call(f"jaxllm_{name}", result, input_output_aliases={at: 0})

        def door(*args, kernel=kernel, options=options):
            return kernel(*args, **options)

        args = [jnp.array(each) for each in (*buffers, *nothing, *operands)]
        before = np.array(args[at])
        (found,) = jax.tree.leaves(jax.jit(door, donate_argnums=at)(*args))
        np.testing.assert_array_equal(found[7:], before[7:], err_msg=name)
        assert not np.any(np.all(np.asarray(found[:7]) == before[:7], axis=1)), name
