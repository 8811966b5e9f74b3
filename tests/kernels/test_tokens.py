"""Tests the first kernels of a step, rows of an embedding, and zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels import native_products
from jaxllm.nn.linear import embed
from jaxllm.quant import embedding_rows
from tests.kernels.drawing import answers, every_width, weight_of
from tests.kernels.switching import fall_back, needs_native


@needs_native
@every_width
def test_rows_are_those_of_the_weight(width):
    """Also more rows than one task takes."""
    draw = np.random.default_rng(0)
    for shape, number in (((1, 1), 21), ((37, 70), 21), ((20, 33), 21), ((40, 64), 400)):
        weight = weight_of(draw, shape, width, -1)
        tokens = draw.integers(0, shape[0], (1, number), dtype=np.int32)
        expected = np.asarray(embedding_rows(weight, jnp.asarray(tokens), jnp.dtype("float32")))
        for kernels, got in answers(lambda w, t: native_products.unit_rows(w, t), weight, tokens).items():
            np.testing.assert_array_equal(got, expected, err_msg=kernels)


@needs_native
def test_an_index_out_of_range_reads_no_other_memory():
    """As XLA's own gather: it counts as the nearest."""
    weight = weight_of(np.random.default_rng(0), (20, 64), (8, 0), -1)
    tokens = np.array([-1, -(2**31), 20, 2**31 - 1], np.int32)
    for got in answers(lambda w, t: native_products.unit_rows(w, t), weight, tokens).values():
        first, last = np.asarray(
            embedding_rows(weight, jnp.asarray([0, 19], jnp.int32), jnp.dtype("float32"))
        )
        np.testing.assert_array_equal(got, [first, first, last, last])


@every_width
def test_embedding_is_the_same_without_kernels(width, monkeypatch):
    weight, tokens = weight_of(np.random.default_rng(0), (37, 70), width, -1), jnp.arange(12).reshape(3, 4)
    # Without kernels scales are rounded to the narrower type before they multiply.
    for dtype, room in ((jnp.dtype("float32"), 0), (jnp.dtype("bfloat16"), 2**-7)):
        got = jax.jit(lambda w, t, dtype=dtype: embed(t, w, dtype))(weight, tokens)
        assert got.dtype == dtype
        with monkeypatch.context() as patch:
            fall_back(patch)
            plain = np.asarray(embed(tokens, weight, dtype), np.float32)
        np.testing.assert_allclose(np.asarray(got, np.float32), plain, rtol=room, atol=0)


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_zeros_are_zero_wherever_they_begin_and_end(dtype):
    """Several pages, parts of one, and nothing; whatever was in their memory before."""
    shapes = [(3, 5000), (1,), (0, 4), (4096 // 4,), (2, 2, 300)]

    @jax.jit
    def door(x):
        # Memory that was full of something else is free when the zeros are made.
        full = jnp.cumsum(jnp.ones((3, 20_000)) * x)
        with_it = jnp.minimum(full[-1], 0).astype(jnp.float32)
        return [each + with_it.astype(each.dtype) for each in native_products.zeros(shapes, jnp.dtype(dtype))]

    for _ in range(3):
        plain = native_products.zeros(shapes, jnp.dtype(dtype))
        for found in (plain, door(np.float32(1))):
            for each, shape in zip(found, shapes, strict=True):
                assert each.shape == shape
                assert each.dtype == dtype
                assert not np.asarray(each, np.float32).any()
