"""Every product on every processor's kernels, and without any: what it must be, to the last rounding; of
activations with scales of their own and with a given one; and rows of an embedding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.kernels import native_products
from jaxllm.nn import linear
from jaxllm.nn.layers import Norm, activate
from jaxllm.nn.linear import FeedForward
from jaxllm.quant import dequantize, embedding_rows, quantize
from tests.kernels import oracle
from tests.kernels.drawing import WIDTHS, answers, every_width, floats, to_units, weight_of
from tests.kernels.switching import needs_native
from tests.quant.plain import levels_of

# Tile edges: 16 outputs, 64 of a task; 32 inputs, 256 of a span; 6, 12 and 16 rows, 256 of a task.
OUTPUTS = st.integers(1, 70)
INPUTS = st.integers(1, 600)
ROWS = st.sampled_from([1, 2, 3, 5, 6, 7, 11, 12, 13, 16, 17, 32, 33, 40])
widths = st.sampled_from(WIDTHS)
seeds = st.integers(0, 2**32 - 1)
fuzz = settings(max_examples=20)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
EPS = 1e-5


def judge(found, known_of, reads):
    """Each answer is what it must be; `known_of(kernels, widened)` of the native ones is worked out once."""
    native_knowns = [known_of("native", widened) for widened in reads]
    for kernels, got in found.items():
        oracle.accept(got, *([known_of("xla", False)] if kernels == "xla" else native_knowns))


def check_product(axis, shape, rows, width, seed, *, xla, add=False):
    """A product whose units are outputs (axis -1), or are summed, with a residual or without."""
    draw = np.random.default_rng(seed)
    weight = weight_of(draw, shape, width, axis)
    inputs, outputs = (shape[-1:], shape[:-1]) if axis == -1 else (shape[:-1], shape[-1:])
    x, residual = floats(draw, rows, *inputs), floats(draw, rows, *outputs) if add else None
    flat = x.reshape(rows, -1)
    segments = shape[0] if axis == -2 and len(shape) == 3 else 1

    def by_kernel(x, weight, add):
        if axis == -1:
            return to_units(x, weight)
        return native_products.from_units(x, weight, residual=add)

    def door(x, weight, add):
        return linear.to_units(x, weight) if axis == -1 else linear.from_units(x, weight, residual=add)

    found = answers(door if xla else by_kernel, x if xla else flat, weight, residual, xla=xla)
    if xla:
        assert {got.shape for got in found.values()} == {(rows, *outputs)}
    found = {kernels: got.reshape(rows, -1) for kernels, got in found.items()}

    def known(kernels, widened):
        sums = oracle.product(oracle.known(flat), weight, kernels=kernels, segments=segments, widened=widened)
        return oracle.plus(sums, residual) if add else sums

    judge(found, known, oracle.reads(weight))


@every_width
@pytest.mark.parametrize(
    ("axis", "rows", "shape"),
    [(-1, 1, (3, 5, 33)), (-1, 19, (70, 600)), (-2, 1, (600, 70)), (-2, 19, (3, 41, 9))],
    ids=str,
)
def test_products(axis, rows, shape, width):
    check_product(axis, shape, rows, width, 0, xla=rows > 1, add=axis == -2)


@needs_native
@settings(max_examples=40)
@given(
    axis=st.sampled_from([-1, -2]), stack=st.none() | st.integers(1, 4), outputs=OUTPUTS, inputs=INPUTS,
    rows=ROWS, width=widths, seed=seeds,
)  # fmt: skip
def test_products_of_any_shape(axis, stack, outputs, inputs, rows, width, seed):
    """Scales and steps of one kv head's inputs never cross into the next one's."""
    shape = (outputs, inputs) if axis == -1 else (inputs if stack is None else -(-inputs // stack), outputs)
    shape = shape if stack is None else (stack, *shape)
    check_product(axis, shape, rows, width, seed, xla=False, add=axis == -2 and seed % 2 == 0)


@pytest.mark.parametrize(("rows", "width"), [(1, (4, 32)), (19, (8, 0))], ids=str)
def test_normed_to_units(rows, width):
    """One norm and one rounding for several weights, each with its own outputs."""
    draw = np.random.default_rng(0)
    shapes = [(2, 12, 300), (2, 6, 300), (33, 300)]
    weights = [weight_of(draw, shape, width, -1) for shape in shapes]
    x, scale = floats(draw, rows, 300), floats(draw, 300)
    norm, known = Norm(scale=scale, bias=None, eps=EPS), oracle.normed(x, scale, EPS)

    def door(x, norm, weights):
        return linear.normed_to_units(x, norm, weights, [None] * 3)

    found = answers(door, x, norm, weights, xla=True)
    for i, weight in enumerate(weights):
        assert {outs[i].shape for outs in found.values()} == {(rows, *shapes[i][:-1])}

        def product(kernels, widened, weight=weight):
            return oracle.product(known, weight, kernels=kernels, widened=widened)

        outs = {kernels: outs[i].reshape(rows, -1) for kernels, outs in found.items()}
        judge(outs, product, oracle.reads(weight))


@pytest.mark.parametrize(("rows", "width"), [(1, 300), (35, 7)])
def test_add_normed(rows, width):
    draw = np.random.default_rng(0)
    x, more, scale = floats(draw, rows, width), floats(draw, rows, width), floats(draw, width)
    norm, known = Norm(scale=scale, bias=None, eps=EPS), oracle.normed(x, scale, EPS)

    expected = oracle.Known(known.value + more, known.error + 1e-7 * np.abs(more))
    for got in answers(linear.add_normed, more, x, norm, xla=True).values():
        oracle.accept(got, expected)


def check_feed_forward(width, neurons, rows, form, seed, *, activation, gated, norm, add, xla):
    draw = np.random.default_rng(seed)
    up, gate = (weight_of(draw, (neurons, width), form, -1) for _ in "ug")
    down = weight_of(draw, (neurons, width), form, -2)
    x, scale = floats(draw, rows, width), floats(draw, width)
    if not norm:
        # Products of the size that a norm's have.
        x = x / np.float32(np.abs(x).max())

    def by_kernel(x, scale, gate, up, down):
        return native_products.feed_forward(
            x, gate, up, down, activation=activation, norm_scale=scale, norm_eps=EPS, residual=add
        )

    def door(x, scale, gate, up, down):
        weights = linear.FeedForward(up=up, down=down, gate=gate, activation=activation)
        return linear.feed_forward(x, Norm(scale, None, EPS), weights, add_input=add)

    gate = gate if gated else None
    found = answers(door if xla else by_kernel, x, scale if norm else None, gate, up, down, xla=xla)
    source = oracle.normed(x, scale, EPS) if norm else oracle.known(x)

    def known(kernels, widened):
        out = oracle.feed_forward(
            source, gate, up, down, activation=activation, kernels=kernels, widened=widened
        )
        if neurons * width > 1000:
            # A bound that lets everything pass would be none.
            assert np.median(out.error) < 0.02 * np.std(out.value)
        return oracle.plus(out, x) if add else out

    judge(found, known, oracle.reads(up))


@pytest.mark.parametrize(
    ("form", "rows", "activation"),
    [((8, 0), 1, "silu"), ((8, 0), 19, "gelu"), ((4, 32), 1, "relu"), ((4, 64), 19, "gelu_tanh")],
    ids=str,
)
def test_feed_forward(form, rows, activation):
    options = dict(activation=activation, norm=True, xla=True)
    check_feed_forward(70, 300, rows, form, 0, gated=True, add=True, **options)
    check_feed_forward(70, 300, rows, form, 0, gated=False, add=False, **options)


@pytest.mark.slow
@needs_native
@fuzz
@given(
    width=st.integers(1, 300), neurons=st.integers(1, 300), rows=ROWS, form=widths, seed=seeds,
    activation=st.sampled_from(ACTIVATIONS), gated=st.booleans(), norm=st.booleans(), add=st.booleans(),
)  # fmt: skip
def test_feed_forward_of_any_shape(width, neurons, rows, form, seed, activation, gated, norm, add):
    options = dict(activation=activation, gated=gated, norm=norm, add=add)
    check_feed_forward(width, neurons, rows, form, seed, xla=False, **options)


@needs_native
@fuzz
@given(outputs=OUTPUTS, inputs=INPUTS, rows=ROWS, seed=seeds)
def test_integer_product_is_exact(outputs, inputs, rows, seed):
    draw = np.random.default_rng(seed)
    weight = weight_of(draw, (outputs, inputs), (8, 0), -1)
    x = draw.integers(-127, 128, (rows, inputs), dtype=np.int8)
    expected = x.astype(np.int64) @ levels_of(weight).T
    for kernels, got in answers(native_products.integer_product, x, weight).items():
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, expected, err_msg=kernels)


@needs_native
def test_many_rows_and_outputs():
    """More than one task has in either direction: 256 rows, 64 outputs."""
    check_product(-1, (130, 40), 513, (8, 0), 0, xla=False)
    check_product(-1, (130, 40), 300, (4, 32), 0, xla=False)
    check_product(-2, (40, 130), 300, (8, 32), 0, xla=False, add=True)
    options = dict(activation="silu", gated=True, norm=True, add=True)
    check_feed_forward(40, 130, 300, (4, 32), 0, xla=False, **options)


STEP_WIDTHS = ((8, 0), (8, 32), (4, 32))
STEP = np.float32(0.02)


def plain(weight) -> np.ndarray:
    return np.asarray(dequantize(weight, jnp.float32), np.float64)


def stepped(x: np.ndarray, step: float = STEP) -> np.ndarray:
    return np.clip(np.rint(x.astype(np.float32) / np.float32(step)), -127, 127).astype(np.float64) * step


def close(got, known) -> None:
    """One level of an activation may be rounded either way where it is half a step."""
    np.testing.assert_allclose(got, known, atol=2e-3 * np.abs(known).max())


@pytest.mark.parametrize(("rows", "width"), [*zip((19, 1, 19), STEP_WIDTHS, strict=True)], ids=str)
def test_to_units_by_a_step(rows, width):
    draw = np.random.default_rng(rows)
    weight, x = weight_of(draw, (3, 11, 300), width, -1), floats(draw, rows, 300)
    assert (np.abs(x) > 127 * STEP).any()
    known = stepped(x) @ plain(weight).reshape(-1, 300).T
    found = answers(
        lambda x, w, s: linear.to_units(x, w, step=s, batch_invariant=True), x, weight, STEP, xla=True
    )
    for got in found.values():
        close(got.reshape(rows, -1), known)


@pytest.mark.parametrize(
    ("shape", "width"), [((300, 70), (8, 0)), ((3, 41, 70), (8, 32)), ((3, 41, 70), (4, 32))], ids=str
)
def test_from_units_by_a_step(shape, width):
    draw = np.random.default_rng(0)
    weight, h = weight_of(draw, shape, width, -2), floats(draw, 19, *shape[:-1])
    residual = floats(draw, 19, 70)
    known = stepped(h).reshape(19, -1) @ plain(weight).reshape(-1, 70) + residual

    def door(h, w, r, s):
        return linear.from_units(h, w, residual=r, step=s, batch_invariant=True)

    for got in answers(door, h, weight, residual, STEP, xla=True).values():
        close(got, known)


@pytest.mark.parametrize("gated", [True, False])
def test_blocks_by_steps(gated):
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


@needs_native
@every_width
def test_rows_are_those_of_the_weight(width):
    """Also more rows than one task takes."""
    draw = np.random.default_rng(0)
    for shape, number in (((1, 1), 21), ((37, 70), 21), ((20, 33), 21), ((40, 64), 400)):
        weight = weight_of(draw, shape, width, -1)
        tokens = draw.integers(0, shape[0], (1, number), dtype=np.int32)
        # As in XLA's own gather, an index out of range counts as the nearest, and reads no other memory.
        tokens[0, :4] = -1, -(2**31), shape[0], 2**31 - 1
        inside = jnp.asarray(tokens.clip(0, shape[0] - 1))
        expected = np.asarray(embedding_rows(weight, inside, jnp.dtype("float32")))
        for kernels, got in answers(lambda w, t: native_products.unit_rows(w, t), weight, tokens).items():
            np.testing.assert_array_equal(got, expected, err_msg=kernels)
