"""Activations and weights that nobody wishes for: NaN, infinity, zeros, the least, the largest, -128."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels import native_products
from jaxllm.quant import QArray, to_blocks
from tests.kernels import oracle
from tests.kernels.drawing import answers, compiled, every_width, floats, placed, to_units, weight_of
from tests.kernels.switching import needs_native
from tests.quant.plain import levels_of

pytestmark = needs_native


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


@pytest.mark.parametrize("rows", [1, 20])
def test_a_bad_value_passes_a_feed_forward_block(rows):
    """Through norm, activation and both products; without a norm too."""
    draw = np.random.default_rng(0)
    up, gate, down = (weight_of(draw, (90, 300), (8, 0), axis) for axis in (-1, -1, -2))
    x, scale = floats(draw, rows, 300), floats(draw, 300)
    for activation, norm in itertools.product(("silu", "gelu", "gelu_tanh"), (scale, None)):
        options = dict(activation=activation, norm_eps=1e-5, residual=False)

        def door(x, norm, gate, up, down, options=options):
            return native_products.feed_forward(x, gate, up, down, norm_scale=norm, **options)

        run = compiled(door, x, norm, gate, up, down)
        clean = run(x, norm, gate, up, down)
        for value in (np.nan, np.inf, -np.inf):
            spoilt = x.copy()
            spoilt[0, 123] = value
            for kernels, got in run(spoilt, norm, gate, up, down).items():
                assert np.isnan(got[0]).all(), (kernels, activation)
                np.testing.assert_array_equal(got[1:], clean[kernels][1:])


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


def test_spans_do_not_share_their_scales():
    """A huge value hides small ones of its own 256 inputs, and no others."""
    weight = placed(to_blocks(QArray(np.ones((3, 600), np.int8), np.ones((3, 1), np.float32), 8, 0, -1, 600)))
    x = np.full((1, 600), 1e-3, np.float32)
    x[0, 300] = 1e6
    for got in answers(to_units, x, weight).values():
        np.testing.assert_allclose(got - np.float32(1e6), 0.344, atol=0.07)
    x[0, 300] = 0
    for got in answers(to_units, x, weight).values():
        np.testing.assert_allclose(got, 0.599, rtol=1e-6)


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


def test_extreme_integers_are_exact():
    """All bytes; an activation of -128 counts as -127."""
    draw = np.random.default_rng(0)
    weight = weight_of(draw, (40, 256), (8, 0), -1)
    weight = dataclasses.replace(weight, data=jnp.full_like(weight.data, -128).at[1].set(127))
    for x in (np.full((3, 256), -128, np.int8), np.arange(-128, 128, dtype=np.int8)[None].repeat(3, 0)):
        expected = np.maximum(x, -127).astype(np.int64) @ levels_of(weight).T
        for kernels, got in answers(native_products.integer_product, x, weight).items():
            np.testing.assert_array_equal(got, expected, err_msg=kernels)


@every_width
def test_buffers_anywhere(width):
    """Activations that begin in the middle of a cache line, as a view of others' do."""
    doors, x = both(3, width)
    whole = floats(np.random.default_rng(1), 4 * 600 + 8)
    for door, weight in doors:
        run = compiled(door, x, weight)
        for offset in (1, 3):
            view = whole[offset : offset + x.size].reshape(x.shape)
            found, plain = (run(each, weight) for each in (jnp.asarray(view), view.copy()))
            for kernels, got in found.items():
                np.testing.assert_array_equal(got, plain[kernels])
