"""Clipped part and shadow together are the product, whatever passes the step."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.int8_prefill.shadow import FloatRows, excess, rooms, shadow_products
from jaxllm.nn import linear
from jaxllm.quant import dequantize, quantize, to_blocks
from tests.variants import every_variant

WIDTH, STEP = 40, np.float32(0.01)


def no_rows(width: int, *outputs: int) -> FloatRows:
    """All channels use the quantized weights."""
    return FloatRows(np.full(width, -1, np.int32), tuple(np.zeros((0, each), np.float16) for each in outputs))


def drawn(tokens: int, outliers: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Activations of whole steps, of which some channels pass 127 of them; and those channels."""
    draw = np.random.default_rng(seed)
    x = draw.integers(-127, 128, (tokens, WIDTH)).astype(np.float32)
    channels = draw.permutation(WIDTH)[:outliers]
    x[draw.integers(0, tokens, outliers), channels] = draw.choice([-900, 901], outliers)
    return x * STEP, np.sort(channels)


def weights_of(seed: int = 0):
    draw = np.random.default_rng(seed)
    values = [draw.normal(size=shape).astype(np.float32) for shape in ((21, WIDTH), (2, 9, WIDTH))]
    return [jax.tree.map(jnp.asarray, to_blocks(quantize(each, bits=8, axis=-1))) for each in values]


@jax.jit
def both(x, weights, rows):
    products = [linear.to_units(x, each, step=STEP).reshape(len(x), -1) for each in weights]
    shadows, count = shadow_products(x, STEP, weights, rows, last=True)
    return [a + b for a, b in zip(products, shadows, strict=True)], count


@settings(max_examples=15)
@given(outliers=st.integers(0, WIDTH), seed=st.integers(0, 1000))
def test_the_sum_is_the_product(outliers, seed):
    """Of any number of outliers, those of all channels too: what one room does not hold the next one does."""
    x, channels = drawn(6, outliers, seed)
    weights = weights_of()
    out, count = both(x, weights, no_rows(WIDTH, 21, 18))
    assert int(count) == len(channels)
    for got, weight in zip(out, weights, strict=True):
        dense = np.asarray(dequantize(weight, jnp.float32), np.float64).reshape(-1, WIDTH)
        np.testing.assert_allclose(got, x.astype(np.float64) @ dense.T, rtol=1e-4, atol=1e-4)


@every_variant
@pytest.mark.parametrize("outliers", [16, 17, 129, 300])
def test_more_than_the_largest_room_holds(outliers, variant):
    draw = np.random.default_rng(outliers)
    x = np.zeros((3, 300), np.float32)
    x[draw.integers(0, 3, outliers), draw.permutation(300)[:outliers]] = 9 * 127 * STEP
    weight = draw.normal(size=(5, 300)).astype(np.float32)
    products = variant(shadow_products, static_argnames="last")
    (out,), count = products(x, STEP, [weight], no_rows(300, 5), last=True)
    chex.assert_shape([out, count], [(3, 5), ()])
    chex.assert_type([out, count], [jnp.float32, jnp.int32])
    assert int(count) == outliers
    np.testing.assert_allclose(out, np.asarray(excess(x, STEP)) @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("channels", [1, 8, 9, 40, 4096])
def test_rooms(channels):
    """They ascend from none, and are no larger than what there is."""
    sizes = rooms(channels)
    assert sizes[0] == 0
    assert len(sizes) > 1
    assert sizes[-1] == min(128, channels)
    assert list(sizes) == sorted(set(sizes))
