"""Products of activations in whole numbers of a given step: exact up to the order of float sums, on every
processor's kernels and without any."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels import native_products
from jaxllm.nn import linear
from jaxllm.nn.layers import Norm, activate
from jaxllm.nn.linear import FeedForward
from jaxllm.quant import Adapted, dequantize, quantize
from tests.kernels.drawing import answers, floats, weight_of

WIDTHS = ((8, 0), (8, 32), (4, 32))
STEP = np.float32(0.02)


def plain(weight) -> np.ndarray:
    return np.asarray(dequantize(weight, jnp.float32), np.float64)


def stepped(x: np.ndarray, step: float = STEP) -> np.ndarray:
    return np.clip(np.rint(x.astype(np.float32) / np.float32(step)), -127, 127).astype(np.float64) * step


def close(got, known) -> None:
    """One level of an activation may be rounded either way where it is half a step."""
    np.testing.assert_allclose(got, known, atol=2e-3 * np.abs(known).max())


@pytest.mark.parametrize(("rows", "width"), [*zip((19, 1, 19), WIDTHS, strict=True)], ids=str)
def test_to_units(rows, width):
    draw = np.random.default_rng(rows)
    weight, x = weight_of(draw, (3, 11, 300), width, -1), floats(draw, rows, 300)
    assert (np.abs(x) > 127 * STEP).any()
    known = stepped(x) @ plain(weight).reshape(-1, 300).T
    found = answers(lambda x, w, s: linear.to_units(x, w, step=s, rowwise=True), x, weight, STEP, xla=True)
    for got in found.values():
        close(got.reshape(rows, -1), known)


@pytest.mark.parametrize(
    ("shape", "width"), [((300, 70), (8, 0)), ((3, 41, 70), (8, 32)), ((3, 41, 70), (4, 32))], ids=str
)
def test_from_units(shape, width):
    draw = np.random.default_rng(0)
    weight, h = weight_of(draw, shape, width, -2), floats(draw, 19, *shape[:-1])
    residual = floats(draw, 19, 70)
    known = stepped(h).reshape(19, -1) @ plain(weight).reshape(-1, 70) + residual

    def door(h, w, r, s):
        return linear.from_units(h, w, residual=r, step=s, rowwise=True)

    for got in answers(door, h, weight, residual, STEP, xla=True).values():
        close(got, known)


@pytest.mark.parametrize("gated", [True, False])
def test_blocks(gated):
    """The norm, both products of a block and what lies between, with a step for each product's input."""
    draw = np.random.default_rng(0)
    gate, up = (weight_of(draw, (70, 300), (8, 0), -1) for _ in range(2))
    down = weight_of(draw, (70, 300), (8, 0), -2)
    x, scale = floats(draw, 19, 300), np.abs(floats(draw, 300))
    block = FeedForward(up=up, down=down, gate=gate if gated else None, activation="relu")
    norm = Norm(scale=scale, bias=None, eps=1e-5)
    steps = np.float32(0.03), np.float32(2.0 if gated else 0.1)

    def door(x, norm, block, steps):
        return linear.feed_forward(x, norm, block, add_input=True, steps=steps)

    wide = x.astype(np.float64)
    normed = wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + 1e-5) * scale
    products = [stepped(normed, steps[0]) @ plain(each).T for each in (gate, up)]
    hidden = np.maximum(products[0], 0) * products[1] if gated else np.maximum(products[1], 0)
    assert (np.abs(hidden) > 127 * steps[1]).any()
    known = stepped(hidden, steps[1]) @ plain(down) + x
    for got in answers(door, x, norm, block, steps, xla=True).values():
        np.testing.assert_allclose(got, known, atol=1e-2 * np.abs(known).max())
    assert activate(jnp.float32(-1), "relu") == 0


def test_adapters_stay_exact():
    """A low-rank change is made of what the activations were before they were clipped."""
    draw = np.random.default_rng(0)
    weight, x = weight_of(draw, (40, 300), (8, 0), -1), floats(draw, 5, 300)
    left, right = floats(draw, 2, 40), floats(draw, 2, 300)
    known = stepped(x) @ plain(weight).T + x.astype(np.float64) @ right.T @ left
    adapted = Adapted(weight, jnp.asarray(left), jnp.asarray(right))
    for got in answers(lambda x, w, s: linear.to_units(x, w, step=s), x, adapted, STEP, xla=True).values():
        close(got, known)


def test_what_is_not_finite_is_not_hidden():
    """A row that holds NaN or infinity gives NaN, and no other row does."""
    draw = np.random.default_rng(0)
    out, back = weight_of(draw, (40, 300), (8, 0), -1), weight_of(draw, (300, 40), (8, 0), -2)
    x = floats(draw, 5, 300)
    x[1:4, 7] = np.nan, np.inf, -np.inf

    def door(x, out, back, s):
        return linear.to_units(x, out, step=s), linear.from_units(x, back, step=s)

    for got in answers(door, x, out, back, STEP, xla=True).values():
        for each in got:
            assert np.isnan(each[1:4]).all()
            assert np.isfinite(each[[0, 4]]).all()


@pytest.mark.parametrize("shape", [(40, 30), (3, 10, 40)], ids=str)
def test_integers_elsewhere(shape):
    """Where there are no blocks, 8-bit weights are multiplied in integers, which the graph shows."""
    draw = np.random.default_rng(0)
    x = floats(draw, 4, 30)
    axis = -2 if shape[-1] == 40 else -1
    weight = jax.tree.map(jnp.asarray, quantize(draw.normal(size=shape), bits=8, axis=axis))
    assert native_products.in_integers(weight)
    door = linear.from_units if axis == -2 else linear.to_units
    rows = x.reshape(4, *shape[:-1]) if axis == -2 else x
    graph = jax.jit(lambda x, w, s: door(x, w, step=s)).lower(rows, weight, STEP)
    assert "xi8>" in graph.as_text()
    known = stepped(x) @ (plain(weight).reshape(30, 40) if axis == -2 else plain(weight).T)
    close(graph.compile()(rows, weight, STEP), known)
