"""Layers in subgraphs are layers: of every kind of decoder, with and without shadow, whatever the chunks."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.bundle.layout import contracted_axis
from jaxllm.config import RopeConfig
from jaxllm.int8_prefill.calibration import channel_tops, largest_of, whole_steps
from jaxllm.int8_prefill.reference import forward_by_rule, integer_rule
from jaxllm.int8_prefill.shadow import PRODUCTS, FloatRows, product_sizes
from jaxllm.int8_prefill.subgraphs import IntegerLayer, LayerCalibration
from jaxllm.kv.cache import TokenPositions, new_cache
from jaxllm.models.decoder import embed_tokens
from jaxllm.models.layer_stack import LayerParams
from jaxllm.models.parameters import param_specs
from jaxllm.nn.layers import normalize
from jaxllm.quant import quantize, to_blocks
from tests.kernels.drawing import jit
from tests.tiny import TINY, random_params

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
    dims = chex.Dimensions(B=1, T=x.shape[1], D=cfg.hidden_size, K=cfg.kv_heads, H=cfg.head_dim)
    dims["F"] = (cfg.ffn_size,)
    dims["Q"] = (cfg.group * cfg.head_dim,)
    counts = []
    for layer, known in enumerate(layers):
        run = IntegerLayer(params, known, cfg, layer)
        past = cache.past(layer)
        heads = run.project(x)
        chex.assert_shape(heads, [dims["BTKQ"], dims["BTKH"], dims["BTKH"]])
        shadows = None
        if known.shadowed:
            shadows, count = run.project_shadow(x)
            chex.assert_trees_all_equal_shapes_and_dtypes(shadows, heads)
            counts.append(count)
        out, added, past, _, count = run.attend(heads, shadows, at, past, None)
        chex.assert_shape(out, dims["BTKQ"])
        cache = cache.with_past(layer, past)
        if not known.shadowed:
            assert added is None
            assert count is None
            x = run.finish(x, out)
            continue
        x, products = run.widen(x, out, added)
        more, widened = run.widen_shadow(x)
        chex.assert_shape([*products, *more], dims["BTF"])
        mixed, hidden = run.narrow(x, products, more)
        x, narrowed = run.narrow_shadow(x, mixed, hidden)
        chex.assert_shape([x, mixed, added], dims["BTD"])
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


def test_products():
    """By hand: the inputs and outputs of a grouped-query layer's products."""
    assert [product_sizes(TINY, 0, product) for product in range(len(PRODUCTS))] == [
        (64, [64, 32, 32]),
        (64, [64]),
        (64, [80, 80]),
        (80, [64]),
    ]
    assert product_sizes(BIASED, 1, 2) == (64, [80])
