"""Rows of weights by the inputs that they are multiplied with, in every form."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.quant import Adapted, contracted_rows, dequantize, quantize
from tests.kernels.drawing import WIDTHS, weight_of
from tests.variants import every_variant

INDEX = np.array([0, 31, 32, 63, 64, 99, 5, 5], np.int32)


def expected(weight, *, last: bool) -> np.ndarray:
    dense = np.asarray(dequantize(weight, jnp.float32)).reshape(-1, weight.shape[-1])
    return (dense.T if last else dense)[INDEX]


@pytest.mark.slow
@every_variant
@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_blocks(width, variant):
    draw, rows = np.random.default_rng(0), variant(contracted_rows, static_argnames="last")
    for shape, axis in (((37, 100), -1), ((3, 11, 100), -1), ((100, 37), -2), ((4, 25, 37), -2)):
        weight, last = weight_of(draw, shape, width, axis), axis == -1
        got = rows(weight, INDEX, last=last)
        chex.assert_type(got, jnp.float32)
        np.testing.assert_array_equal(got, expected(weight, last=last))


@pytest.mark.parametrize("bits", [8, 4])
def test_other_forms(bits):
    draw = np.random.default_rng(0)
    out, back = draw.normal(size=(3, 11, 100)), draw.normal(size=(4, 25, 37))
    forms = [(jnp.asarray(out, jnp.float32), True), (jnp.asarray(back, jnp.float32), False)]
    forms += [(quantize(out, bits=bits, axis=-1), True), (quantize(back, bits=bits, axis=-2), False)]
    for weight, last in forms:
        np.testing.assert_array_equal(contracted_rows(weight, INDEX, last=last), expected(weight, last=last))
    # What an adapter changes is no business of the weight's rows.
    base, left, right = forms[0][0], jnp.ones((1, 3, 11)), jnp.ones((1, 100))
    np.testing.assert_array_equal(
        contracted_rows(Adapted(base, left, right), INDEX, last=True), expected(base, last=True)
    )
