"""Every product, with every kind of weight, is numpy's on the weight it stands for, in little memory."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm.kernels import converted
from jaxllm.nn.linear import dense_product, from_units, normed_to_units, to_units
from jaxllm.quant import Bfloat16Bits, quantize, to_blocks
from tests.quant.plain import wide
from tests.quick_jit import jit

KINDS = ("f32", "bf16", "bits", "int8", "int4")
CONVERTED = ("bits", "int8", "int4")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def stored(kind, weight, axis):
    if kind == "f32":
        return jnp.asarray(weight)
    if kind == "bf16":
        return jnp.asarray(weight, jnp.bfloat16)
    if kind == "bits":
        return Bfloat16Bits(bits=jnp.asarray(weight.astype(ml_dtypes.bfloat16).view(np.uint16)))
    return jax.tree.map(jnp.asarray, quantize(weight, bits=int(kind[-1]), axis=axis))


def assert_product(got, left, right, *, step=2e-6):
    """`got` is the matrix product `left @ right`, but for rounding: `step` of the sum of magnitudes."""
    expected = left @ right
    room = np.abs(left) @ np.abs(right)
    np.testing.assert_array_less(np.abs(np.asarray(got, np.float64) - expected), step * room + 1e-30)
    # A product of zeros would agree with anything.
    assert np.std(expected) > 0


# Tiny weights take either path: converted whole, or by blocks of some rows, fewer than a group's or more.
PATHS = [*(("whole", kind) for kind in KINDS), *(("blocks", kind) for kind in KINDS if kind != "f32")]


def take(path, weight, dtype, monkeypatch, rows=4):
    if path == "blocks":
        monkeypatch.setattr(converted, "BLOCK_BYTES", rows * weight.shape[-1] * np.dtype(dtype).itemsize)
    assert converted.fits_one_block(weight, dtype) == (path == "whole")


def plain_and_biased(door):
    """Both in one graph, to compile once."""
    return jit(lambda x, weight, bias: (door(x, weight), door(x, weight, bias)))


@pytest.mark.parametrize(
    ("door", "shape"),
    [
        (to_units, (9, 70)), (to_units, (3, 5, 33)),
        # Rows per unit beyond a group of 32 and a block of 40: blocks overlap, and cut groups.
        (from_units, (70, 9)), (from_units, (3, 41, 5)),
    ],
    ids=["to-2d", "to-3d", "from-2d", "from-3d"],
)  # fmt: skip
@pytest.mark.parametrize(("path", "kind"), PATHS)
def test_products(path, kind, door, shape, monkeypatch):
    axis, rows = (-1, {}) if door is to_units else (-2, {"rows": 40})
    weight = stored(kind, normal(*shape), axis)
    take(path, weight, np.float32, monkeypatch, **rows)
    inputs, outputs = (shape[-1:], shape[:-1]) if door is to_units else (shape[:-1], shape[-1:])
    x, bias = normal(2, 3, *inputs, seed=1), normal(*outputs, seed=2)
    got, biased = plain_and_biased(door)(x, weight, bias)
    chex.assert_shape([got, biased], (2, 3, *outputs))
    chex.assert_type([got, biased], jnp.float32)
    matrix = wide(weight).reshape(-1, shape[-1])
    matrix = matrix.T if door is to_units else matrix
    assert_product(got.reshape(6, -1), x.reshape(6, -1).astype(np.float64), matrix)
    np.testing.assert_allclose(biased, got + bias, rtol=1e-6)


@pytest.mark.parametrize(("path", "kind"), [("whole", "f32"), ("whole", "int4"), ("blocks", "int4")])
@pytest.mark.parametrize("door", [to_units, from_units])
def test_bfloat16_activations(path, kind, door, monkeypatch):
    """Activations decide the dtype of the product, whatever the weight's and the bias's."""
    weight = stored(kind, normal(9, 33), -1 if door is to_units else -2)
    take(path, weight, ml_dtypes.bfloat16, monkeypatch)
    width, out = (33, 9) if door is to_units else (9, 33)
    x = normal(4, width, seed=1).astype(ml_dtypes.bfloat16)
    got, biased = plain_and_biased(door)(x, weight, normal(out, seed=2))
    chex.assert_type([got, biased], jnp.bfloat16)
    matrix = wide(weight).T if door is to_units else wide(weight)
    assert_product(got, x.astype(np.float64), matrix, step=2**-6)


WIDTH = converted.BLOCK_BYTES // (4 * 256)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_one_bad_row_stays_one_bad_row(value):
    """A loop's carry begins as a value of the activations, which must leave no trace."""
    x, h = normal(2, WIDTH, seed=1), normal(2, 257, seed=1)
    x[0, 0] = h[0, 0] = value
    rows, weight = stored("int8", normal(257, WIDTH), -1), stored("int8", normal(257, WIDTH), -2)
    got, reduced = jit(converted.rows_product)(x, rows), jit(converted.reduction_product)(h, weight)
    assert_product(got[1:], x[1:].astype(np.float64), wide(rows).T)
    assert_product(reduced[1:], h[1:].astype(np.float64), wide(weight))


ROWS, COLUMNS = 4096, 512
# XLA fuses a conversion into the product with a single row.
TOKENS = 3
DENSE_BYTES = ROWS * COLUMNS * 4


def temporary_bytes(function, *args):
    return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.fixture(scope="module")
def big():
    return normal(ROWS, COLUMNS)


@pytest.mark.parametrize(("door", "units"), [(to_units, "2d"), (from_units, "2d"), (from_units, "3d")])
@pytest.mark.parametrize("kind", CONVERTED)
def test_converted_weight_is_never_whole_in_memory(kind, door, units, big):
    """The reason for the blocks: with all layers' weights converted at once, a float32 model's worth."""
    axis = -1 if door is to_units else -2
    weight = stored(kind, big if units == "2d" else big.reshape(4, ROWS // 4, COLUMNS), axis)
    x = np.zeros((TOKENS, COLUMNS) if door is to_units else (TOKENS, *weight.shape[:-1]), np.float32)
    assert temporary_bytes(door, x, weight) < DENSE_BYTES / 4


def test_layers_share_their_temporary_memory():
    """Or a step's outputs of all products would be held from its beginning to its end."""
    tokens, width, units = 64, 128, 4096
    up, down = (stored("int8", normal(units, width), axis) for axis in (-1, -2))

    def chain(layers):
        def run(x, weights):
            for up, down in weights:
                x = x + from_units(jnp.tanh(to_units(x, up)), down)
            return x

        return temporary_bytes(run, normal(tokens, width), [(up, down)] * layers)

    # One layer's inner activations more would be too many.
    assert chain(5) < chain(1) + tokens * units * 4


# In bfloat16, products and their gradients round once, and ask for float32 sums


@pytest.fixture(scope="module", params=[0, 1], ids=["first axis", "last axis"])
def half_case(request):
    """An axis; activations, a matrix and a gradient in bfloat16."""
    sizes = (80, 64), (64, 48) if request.param == 0 else (48, 64), (80, 48)
    return request.param, *(jnp.asarray(normal(*size, seed=i), jnp.bfloat16) for i, size in enumerate(sizes))


def test_a_half_product_is_that_of_float32_rounded_once(half_case):
    axis, *sides = half_case

    def with_gradients(rows, matrix, gradient):
        out, back = jax.vjp(lambda rows, matrix: dense_product(rows, matrix, axis), rows, matrix)
        return (out, *back(gradient))

    wide = with_gradients(*(side.astype(jnp.float32) for side in sides))
    for found, wanted in zip(with_gradients(*sides), wide, strict=True):
        assert found.dtype == jnp.bfloat16
        # A sum in another order may round to the neighbour.
        np.testing.assert_allclose(found.astype(jnp.float32), wanted, rtol=2**-7, atol=1e-2)


def test_weights_of_several_formats_in_one_call():
    """Those of each format together, in the order given."""
    x = jnp.asarray(normal(3, 64))
    forms = ({"bits": 4, "minima": True}, {"bits": 8}, {"bits": 4, "minima": True}, {"bits": 8})
    weights = [
        jax.tree.map(jnp.asarray, to_blocks(quantize(normal(16 + seed, 64, seed=seed), axis=-1, **form)))
        for seed, form in enumerate(forms)
    ]
    biases = [jnp.asarray(normal(16)), None, None, None]
    got = jit(lambda x: normed_to_units(x, None, weights, biases))(x)
    for each, weight, bias in zip(got, weights, biases, strict=True):
        alone = jit(lambda x, weight=weight, bias=bias: to_units(x, weight, bias))(x)
        np.testing.assert_allclose(each, alone, rtol=1e-5, atol=1e-5)
