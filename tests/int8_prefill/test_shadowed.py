"""Products with their shadow inside are the clipped part and the excess, with every kernel and without; and
layers in subgraphs are layers, of every kind of decoder, with and without a shadow, whatever the chunks."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.bundle.layout import contracted_axis
from jaxllm.config import RopeConfig
from jaxllm.int8_prefill import shadow
from jaxllm.int8_prefill.calibration import channel_tops, largest_of, whole_steps
from jaxllm.int8_prefill.reference import forward_by_rule, integer_rule
from jaxllm.int8_prefill.shadow import FloatRows, product_sizes
from jaxllm.int8_prefill.subgraphs import IntegerLayer, LayerCalibration
from jaxllm.kernels.native_call import UsedUnits
from jaxllm.kv.cache import TokenPositions, new_cache
from jaxllm.models.decoder import embed_tokens
from jaxllm.models.layer_stack import LayerParams
from jaxllm.models.parameters import param_specs
from jaxllm.nn.layers import Norm, normalize
from jaxllm.nn.linear import FeedForward
from jaxllm.quant import Adapted, quantize, to_blocks
from tests.kernels.drawing import answers, floats, jit, weight_of
from tests.kernels.test_products import plain, stepped
from tests.tiny import TINY, random_params

STEP = np.float32(0.02)


def excess(x: np.ndarray, step: float = STEP) -> np.ndarray:
    top = 127 * np.float32(step)
    return x.astype(np.float64) - np.clip(x, -top, top)


def drawn(draw: np.random.Generator, rows: int, width: int, outliers: int) -> np.ndarray:
    """Activations below 127 steps, but in so many channels, where some rows are far beyond."""
    x = draw.uniform(-120, 120, (rows, width)) * STEP
    channels = draw.permutation(width)[:outliers]
    x[draw.integers(0, rows, outliers), channels] = draw.choice([-9.5, 31.25], outliers)
    return x.astype(np.float32)


def float_rows(draw: np.random.Generator, inputs: int, outputs: list[int], known: np.ndarray) -> FloatRows:
    """Rows of the channels that are known, in another order, and of none of the others."""
    place = np.full(inputs, -1, np.int32)
    place[known] = draw.permutation(len(known))
    rows = tuple(draw.normal(size=(len(known), each)).astype(np.float16) for each in outputs)
    return FloatRows(place, rows)


def exactly(dense: np.ndarray, rows: FloatRows, number: int = 0) -> np.ndarray:
    """A weight `[inputs, outputs]` with its float rows in place of its own."""
    dense, known = dense.copy(), np.asarray(rows.place) >= 0
    dense[known] = np.asarray(rows.rows[number], np.float64)[rows.place[known], : dense.shape[1]]
    return dense


def close(got: np.ndarray, known: np.ndarray, level: float) -> None:
    """Two levels of activations may be rounded either way, where they are half a step."""
    np.testing.assert_allclose(got, known, atol=2 * level + 1e-5 * np.abs(known).max())


@pytest.mark.parametrize(("rows", "outliers"), [(1, 1), (1, 0), (19, 7), (5, 40), (3, 300), (260, 5)])
def test_normed_products(rows, outliers):
    """From no outlier to outliers everywhere; half of the channels have rows in floats."""
    draw = np.random.default_rng(outliers)
    weights = [weight_of(draw, shape, (8, 0), -1) for shape in ((3, 11, 300), (40, 300))]
    x, scale = floats(draw, rows, 300), np.abs(floats(draw, 300))
    seen = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5) * scale
    # The step that so many channels pass, by a thousandth and more.
    tops = np.sort(np.abs(seen).max(axis=0))
    step = np.float32((tops[-outliers] * 0.999 if outliers else tops[-1] * 1.001) / 127)
    known = float_rows(draw, 300, [33, 40], np.arange(0, 300, 2))
    found = answers(
        lambda x, scale, weights, step, known: shadow.normed_to_units(
            x, Norm(scale=scale, bias=None, eps=1e-5), weights, [None, None], step, known
        ),
        x,
        scale,
        weights,
        step,
        known,
        xla=True,
    )
    beyond = excess(seen, step)
    for got, count in found.values():
        assert count == np.any(beyond, axis=0).sum()
        assert count >= outliers
        assert bool(count) == bool(outliers)
        for number, (out, weight) in enumerate(zip(got, weights, strict=True)):
            dense = plain(weight).reshape(-1, 300).T
            wanted = stepped(seen, step) @ dense + beyond @ exactly(dense, known, number)
            close(out.reshape(rows, -1), wanted, step * np.abs(dense).max())


@pytest.mark.parametrize("shape", [(300, 70), (3, 41, 70)], ids=str)
def test_reductions(shape):
    """Of one segment and of several, with a residual; rows in floats have outputs that are not used."""
    draw = np.random.default_rng(0)
    inputs = int(np.prod(shape[:-1]))
    weight, h, residual = (
        weight_of(draw, shape, (8, 0), -2),
        drawn(draw, 19, inputs, 11),
        floats(draw, 19, 70),
    )
    known = float_rows(draw, inputs, [90], np.arange(0, inputs, 3))
    dense = plain(weight).reshape(inputs, 70)
    wanted = stepped(h) @ dense + excess(h) @ exactly(dense, known) + residual
    found = answers(
        lambda h, *rest: shadow.from_units(h, rest[0], None, STEP, rest[1], residual=rest[2]),
        h.reshape(19, *shape[:-1]),
        weight,
        known,
        residual,
        xla=True,
    )
    for got, count in found.values():
        assert count == 11
        close(got, wanted, STEP * np.abs(dense).max())


@pytest.mark.parametrize("gated", [True, False])
def test_blocks(gated):
    draw = np.random.default_rng(1)
    gate, up = (weight_of(draw, (70, 300), (8, 0), -1) for _ in range(2))
    down = weight_of(draw, (70, 300), (8, 0), -2)
    x, scale = floats(draw, 19, 300), np.abs(floats(draw, 300))
    steps = np.float32(0.05), np.float32(4.0 if gated else 0.1)
    outer = float_rows(draw, 300, [70] * (1 + gated), np.arange(0, 300, 2))
    inner = float_rows(draw, 70, [300], np.arange(1, 70, 2))
    block = FeedForward(up=up, down=down, gate=gate if gated else None, activation="relu")
    seen = x.astype(np.float64) / np.sqrt(np.square(x.astype(np.float64)).mean(-1, keepdims=True) + 1e-5)
    seen *= scale
    products = []
    for number, each in enumerate((gate, up) if gated else (up,)):
        dense = plain(each).T
        products.append(
            stepped(seen, steps[0]) @ dense + excess(seen, steps[0]) @ exactly(dense, outer, number)
        )
    hidden = np.maximum(products[0], 0) * (products[1] if gated else 1)
    beyond, dense = excess(hidden, steps[1]), plain(down)
    wanted = stepped(hidden, steps[1]) @ dense + beyond @ exactly(dense, inner) + x
    counts = [np.any(excess(seen, steps[0]), axis=0).sum(), np.any(beyond, axis=0).sum()]
    assert min(counts) > 0
    found = answers(
        lambda x, scale, block, steps, rows: shadow.feed_forward(
            x, Norm(scale=scale, bias=None, eps=1e-5), block, steps, rows, add_input=True
        ),
        x,
        scale,
        block,
        steps,
        (outer, inner),
        xla=True,
    )
    for got, count in found.values():
        assert np.abs(count - counts).max() <= 1
        np.testing.assert_allclose(got, wanted, atol=1e-2 * np.abs(wanted).max())


def test_units_that_are_not_used_have_no_outliers():
    """Of a graph that serves all levels; and adapters are computed of what was not clipped."""
    draw = np.random.default_rng(2)
    weight, h = weight_of(draw, (70, 40), (8, 0), -2), drawn(draw, 5, 70, 9)
    left, right = floats(draw, 2, 70), floats(draw, 2, 40)
    known = float_rows(draw, 70, [40], np.arange(10))
    used = UsedUnits(np.array([1, 50, 2], np.int32), 1)
    dense, seen = plain(weight), np.where(np.arange(70) < 50, h, 0).astype(np.float64)
    wanted = stepped(seen) @ dense + excess(seen) @ exactly(dense, known) + seen @ left.T @ right
    found = answers(
        lambda h, weight, known, used: shadow.from_units(h, weight, None, STEP, known, used=used),
        h,
        Adapted(weight, left, right),
        known,
        used,
        xla=True,
    )
    for got, count in found.values():
        assert count == np.any(excess(seen), axis=0).sum() < 9
        close(got, wanted, STEP * np.abs(dense).max())


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_what_is_not_finite_is_not_hidden(broken):
    draw = np.random.default_rng(0)
    weight, h = weight_of(draw, (300, 40), (8, 0), -2), drawn(draw, 3, 300, 4)
    h[1, 7] = broken
    known = float_rows(draw, 300, [40], np.arange(20))
    found = answers(lambda *a: shadow.from_units(a[0], a[1], None, STEP, a[2])[0], h, weight, known, xla=True)
    for got in found.values():
        assert np.isnan(got[1]).all()
        assert np.isfinite(got[[0, 2]]).all()


BIASED = dataclasses.replace(
    TINY, norm="layer", qkv_bias=True, o_bias=True, ffn_bias=True, gated_ffn=False, activation="gelu"
)
NORMED = dataclasses.replace(
    TINY, post_norms=True, qk_norm=True, activation="gelu_tanh", attention_softcap=20.0,
    attention_windows=(0, 8), rope=RopeConfig(dim=16, original_window_tokens=4, query_growth=0.5),
    rope_layers=(True, False), logit_scale=0.5,
)  # fmt: skip
DECODERS = {"gated": TINY, "biased": BIASED, "normed": NORMED}
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab_size, 40).astype(np.int32)


@functools.cache
def model(name: str):
    """A decoder's parameters at 8 bits, and a calibration that clips a good part, by turns with shadow and
    without."""
    cfg = DECODERS[name]
    params = {}
    for each, value in random_params(cfg).items():
        spec = param_specs(cfg)[each]
        value = value if spec.role == "vector" else value / np.sqrt(spec.shape[-1])
        kept = value
        if spec.role not in ("vector", "embed"):
            kept = to_blocks(quantize(value, bits=8, axis=contracted_axis(spec)))
        params[each] = jax.tree.map(jnp.asarray, kept)
    tops = jit(functools.partial(channel_tops, cfg=cfg))(params, TOKENS)
    steps = whole_steps(largest_of([jax.device_get(tops)])) / 2
    none = [FloatRows(np.full(product_sizes(cfg, 0, product)[0], -1, np.int32), ()) for product in range(4)]
    rows = [
        dataclasses.replace(
            each, rows=tuple(np.zeros((0, size), np.float16) for size in product_sizes(cfg, 0, product)[1])
        )
        for product, each in enumerate(none)
    ]
    layers = [
        LayerCalibration(steps[layer], tuple(rows) if layer % 2 == 0 else None) for layer in range(cfg.layers)
    ]
    return cfg, params, layers


def chunk_through(cfg, params, layers, x, at, cache):
    """All layers of one chunk, subgraph by subgraph."""
    counts = []
    for layer, known in enumerate(layers):
        run = IntegerLayer(params, known, cfg, layer)
        past = cache.past(layer)
        heads = run.project(x)
        shadows = None
        if known.shadowed:
            shadows, count = run.project_shadow(x)
            chex.assert_trees_all_equal_shapes_and_dtypes(shadows, heads)
            counts.append(count)
        out, added, past, _, count = run.attend(heads, shadows, at, past, None)
        cache = cache.with_past(layer, past)
        if not known.shadowed:
            x = run.finish(x, out)
            continue
        x, products = run.widen(x, out, added)
        more, widened = run.widen_shadow(x)
        mixed, hidden = run.narrow(x, products, more)
        x, narrowed = run.narrow_shadow(x, mixed, hidden)
        counts += [count, widened, narrowed]
    return x, cache, jnp.stack(counts)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("gated", marks=pytest.mark.campaign), "biased", "normed"])
def test_subgraphs_are_the_layers(name):
    """Two chunks of different lengths, the second padded, give what one pass over the text gives."""
    cfg, params, layers = model(name)

    @jit
    def known(params, layers):
        return forward_by_rule(params, TOKENS, integer_rule(params, layers, cfg), cfg=cfg)

    @functools.partial(jit, static_argnames="length")
    def chunk(params, layers, row, start, valid, cache, length):
        at = TokenPositions.after(start, length, valid)
        x = embed_tokens(params, row[None], at.positions, cfg=cfg)
        x, cache, counts = chunk_through(cfg, params, layers, x, at, cache)
        return normalize(x, LayerParams(params, "").norm("final_norm", cfg))[0], cache, counts

    whole = np.asarray(known(params, layers))
    cache = new_cache(cfg, batch=1, tokens=64, dtype=jnp.dtype(jnp.float32))
    first, cache, counts = chunk(params, layers, TOKENS[:16], np.int32(0), np.int32(16), cache, 16)
    assert (np.asarray(counts) > 0).all()
    padded = np.concatenate([TOKENS[16:], np.zeros(8, np.int32)])
    second, cache, _ = chunk(params, layers, padded, np.int32(16), np.int32(24), cache, 32)
    tolerance = dict(atol=2e-2 * np.abs(whole).max())
    np.testing.assert_allclose(first, whole[:16], **tolerance)
    np.testing.assert_allclose(second[:24], whole[16:], **tolerance)
