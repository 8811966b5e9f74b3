"""Kernels give the same answers with any threads, batch, processor and time, of any numbers: NaN, infinity,
zeros, the smallest, the largest, -128."""

import dataclasses
import itertools

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


@every_width
def test_a_row_is_the_same_in_any_company(width):
    """Alone (a decode step) or among others (a drafted tree), to the last bit; of prompts at fewer than 8
    bits but for what widening the weights costs."""
    draw = np.random.default_rng(0)
    out, stack = weight_of(draw, (70, 300), width, -1), weight_of(draw, (3, 100, 70), width, -2)
    x = floats(draw, 33, 300)

    def batch_invariant(x, weight):
        if weight.axis == -1:
            return native_products.to_units(x, [weight], batch_invariant=True)[0]
        return native_products.from_units(x, weight, residual=x[:, :70], batch_invariant=True)

    for weight, segments in ((out, 1), (stack, 3)):
        door = to_units if weight.axis == -1 else native_products.from_units
        together, prompt = (answers(each, x, weight) for each in (batch_invariant, door))
        alone, decoded = (compiled(each, x[:1], weight) for each in (batch_invariant, door))
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

    def door(x, valid_rows, up, gate, down, stack, scale):
        norm = dict(norm_scale=scale, norm_eps=EPS)
        return [
            *native_products.to_units(x, [up, gate], **norm, valid_rows=valid_rows),
            native_products.from_units(x[:, :123], stack, residual=x[:, :50], valid_rows=valid_rows),
            native_products.feed_forward(
                x, gate, up, down, activation="gelu", residual=True, **norm, valid_rows=valid_rows
            ),
            native_products.add_normed(x, x, scale, EPS, valid_rows),
        ]

    weights = up, gate, down, stack, scale
    run = compiled(door, rows, np.int32(1), *weights)
    among = answers(lambda x, *weights: door(x, None, *weights), rows, *weights)
    for valid_rows in (1, 2, 7, 19):
        x = np.where(np.arange(19)[:, None] < valid_rows, rows, np.nan).astype(np.float32)
        found, first = jax.tree.map(
            lambda each, valid_rows=valid_rows: each[:valid_rows],
            (run(x, np.int32(valid_rows), *weights), among),
        )
        same(found, first)
        if width in ((8, 0), (8, 32), (8, 64)):
            same(found, answers(lambda x, *weights: door(x, None, *weights), rows[:valid_rows], *weights))


def both(rows, width, seed=0):
    """(door, weight) of both orientations, 600 inputs and 70 outputs each, and activations."""
    draw = np.random.default_rng(seed)
    out, back = weight_of(draw, (70, 600), width, -1), weight_of(draw, (2, 300, 70), width, -2)
    return ((to_units, out), (native_products.from_units, back)), floats(draw, rows, 600)


@every_width
def test_a_bad_value_spoils_its_row_and_no_other(width):
    """Every output of the row is NaN, whichever span the value is in; other rows do not change a bit."""
    for rows, bad in ((1, 0), (20, 7)):
        doors, x = both(rows, width)
        for door, weight in doors:
            run = compiled(door, x, weight)
            clean = run(x, weight)
            for value, column in itertools.product((np.nan, np.inf, -np.inf), (0, 299, 599)):
                spoilt = x.copy()
                spoilt[bad, column] = value
                for kernels, got in run(spoilt, weight).items():
                    assert np.isnan(got[bad]).all(), kernels
                    others = np.arange(rows) != bad
                    np.testing.assert_array_equal(got[others], clean[kernels][others])


@every_width
def test_what_is_too_small_counts_as_zero(width):
    """Subnormal steps would be too coarse; exactly zero comes out, with a residual exactly that."""
    for rows in (1, 20):
        doors, x = both(rows, width)
        for door, weight in doors:
            run = compiled(door, x, weight)
            for value in (0.0, -0.0, 1e-45, 1e-40, 9e-31):
                for got in run(np.full_like(x, value), weight).values():
                    assert not got.any()
        residual = floats(np.random.default_rng(1), rows, 70)
        sums = answers(
            lambda x, w, add: native_products.from_units(x, w, residual=add),
            *(np.zeros_like(x), doors[1][1], residual),
        )
        for got in sums.values():
            np.testing.assert_array_equal(got, residual)


@every_width
def test_any_magnitude_is_as_exact(width):
    """Powers of two change no rounding; others only that of the scales."""
    for rows in (1, 20):
        doors, x = both(rows, width)
        for (door, weight), segments in zip(doors, (1, 2), strict=True):
            run = compiled(door, x, weight)
            for magnitude in (1e-29, 1e-20, 1e20, 1e30):
                scaled = (x / np.abs(x).max() * magnitude).astype(np.float32)
                # Steps of spans whose own largest value is under 1e-30 are zero, here as there.
                how = dict(kernels="native", segments=segments)
                knowns = [
                    oracle.product(oracle.known(scaled), weight, **how, widened=widened)
                    for widened in oracle.reads(weight)
                ]
                for got in run(scaled, weight).values():
                    assert np.isfinite(got).all()
                    oracle.accept(got, *knowns)


@pytest.mark.parametrize("bits", [8, 4])
def test_extreme_levels_do_not_overflow(bits):
    """-128 is a level that `quantize` never makes but a stranger's bundle may hold; with the largest
    activations of either sign, sums of pairs in 16 bits are at their limit."""
    shapes = ((-1, (20, 520)), (-2, (520, 20)))
    for rows, group, (axis, shape) in itertools.product((1, 20), (0, 32, 64)[bits != 8 :], shapes):
        drawn = weight_of(np.random.default_rng(0), shape, (bits, group), axis)
        door = native_products.from_units if axis == -2 else to_units
        run = compiled(door, np.zeros((rows, 520), np.float32), drawn)
        for level, sign in itertools.product((-128, 127) if bits == 8 else (-8, 7), (1, -1)):
            byte = np.int8(level) if bits == 8 else np.uint8((level + 8) * 17)
            ones = jnp.ones_like(drawn.scale)
            weight = dataclasses.replace(drawn, data=jnp.full_like(drawn.data, byte), scale=ones)
            x = np.full((rows, 520), sign * 3.0, np.float32)
            # Widened weights are rounded to one part in 127 of the largest.
            rtol = 4e-3 if bits == 4 and group and rows > 1 else 1e-6
            for kernels, got in run(x, weight).items():
                np.testing.assert_allclose(got, 520 * 3.0 * sign * level, rtol=rtol, err_msg=kernels)
