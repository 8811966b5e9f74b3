"""The encoder's laws: padding, parts, stored forms, and its initial parameters."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.models.encoder.mobilebert import embed_tokens, encode_layers, encoder_shapes, init_values
from jaxllm.quant import dequantize, quantize, to_blocks
from tests.kernels.switching import fall_back
from tests.models.encoder.tiny import CONFIGS, MOBILE, encode, front_mask, params_of, tokens_of
from tests.quick_jit import jit

COUNT = 7
TOKENS, ALL_REAL = tokens_of(MOBILE, 3, COUNT), np.ones((3, COUNT), bool)
widened = jit(lambda weight: dequantize(weight, jnp.dtype(jnp.float32)))


@pytest.fixture(params=CONFIGS)
def cfg(request):
    return CONFIGS[request.param]


def test_shapes_of_mobilebert():
    """google/mobilebert-uncased has 24.6 million parameters without heads and pooler."""
    cfg = dataclasses.replace(
        MOBILE, vocab_size=30522, embedding_size=128, hidden_size=512, layers=24, heads=4, ffn_size=512,
        window_tokens=512, bottleneck_size=128, ffn_blocks=4,
    )  # fmt: skip
    shapes = encoder_shapes(cfg)
    some = ("embed.projection", "layers.23.attn.narrow", "layers.0.attn.v", "layers.0.ffn.3.up")
    assert [shapes[name] for name in some] == [(512, 384), (128, 512), (128, 512), (512, 128)]
    assert sum(map(math.prod, shapes.values())) == 24_581_888


def test_initial_values():
    shapes = encoder_shapes(dataclasses.replace(MOBILE, layers=1, ffn_blocks=1))
    params = jit(lambda key: init_values(shapes, key, jnp.float16))(jax.random.key(0))
    expected = {name: jax.ShapeDtypeStruct(shape, jnp.float16) for name, shape in shapes.items()}
    chex.assert_trees_all_equal_shapes_and_dtypes(params, expected)
    vectors = {name for name, value in params.items() if value.ndim == 1}
    for name in vectors:
        assert np.all(params[name] == (1 if name.endswith("norm.scale") else 0)), name
    drawn = np.concatenate([np.ravel(params[name]) for name in params.keys() - vectors])
    assert np.abs(drawn).max() < 0.0401
    # A normal distribution cut at two deviations has 0.88 of its deviation left.
    np.testing.assert_allclose(drawn.std(), 0.88 * 0.02, rtol=0.05)


def test_padding_changes_nothing(cfg):
    """Neither its ids nor its number; also where all is padding."""
    mask, run = front_mask([0, 3, 5], COUNT), jit(functools.partial(encode, cfg=cfg))
    others = np.where(mask, TOKENS, (TOKENS + 5) % MOBILE.vocab_size)
    first, second = (np.asarray(run(params_of(cfg), each, mask)) for each in (TOKENS, others))
    np.testing.assert_array_equal(first[mask], second[mask])
    chex.assert_tree_all_finite(first)
    # The last row is whole here.
    shorter = run(params_of(cfg), TOKENS[:, :5], mask[:, :5])
    np.testing.assert_allclose(first[mask], shorter[mask[:, :5]], atol=2e-5, rtol=1e-5)


def test_the_first_tokens_alone(cfg):
    """What is computed for them is what they have among all."""
    params, mask = params_of(cfg), front_mask([COUNT, 3, 1], COUNT)

    @jit
    def both(params):
        hidden = embed_tokens(params, TOKENS, mask, cfg=cfg)
        some = functools.partial(encode_layers, params, hidden, mask, cfg=cfg, layers=range(cfg.layers))
        return some(), some(first=1), encode_layers(params, hidden, mask, cfg=cfg, layers=range(0), first=2)

    whole, first, untouched = both(params)
    chex.assert_shape([whole, first, untouched], [(3, count, cfg.hidden_size) for count in (COUNT, 1, 2)])
    np.testing.assert_allclose(first, whole[:, :1], atol=1e-4)


def test_bfloat16_activations():
    narrow, wide = (
        np.asarray(
            jit(functools.partial(encode, cfg=MOBILE, dtype=dtype))(params_of(MOBILE), TOKENS, ALL_REAL)
        )
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    assert narrow.dtype == jnp.bfloat16
    assert np.abs(narrow.astype(np.float32) - wide).mean() < 0.05 * wide.std()


@pytest.mark.parametrize(("bits", "form"), [(8, "columns"), (4, "blocks")])
def test_quantized_matrices_compute_what_they_stand_for(bits, form, monkeypatch):
    """Without native kernels, which round activations too (`tests/kernels` knows by how much)."""
    fall_back(monkeypatch)
    quantized, meant = dict(params_of(MOBILE)), dict(params_of(MOBILE))
    for name, value in params_of(MOBILE).items():
        if value.ndim == 2:
            columns = quantize(value, bits=bits, axis=-1)
            quantized[name] = columns if form == "columns" else to_blocks(columns)
            meant[name] = widened(columns)
    run = jit(functools.partial(encode, cfg=MOBILE))
    got, expected, dense = (run(each, TOKENS, ALL_REAL) for each in (quantized, meant, params_of(MOBILE)))
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert np.abs(np.asarray(got - dense)).max() > 1e-2


def test_too_many_tokens_and_other_shapes():
    tokens = tokens_of(MOBILE, 2, MOBILE.window_tokens + 1)
    with pytest.raises(ConfigError, match="12 tokens do not fit the encoder's window of 11"):
        encode(params_of(MOBILE), tokens, np.ones(tokens.shape, bool), cfg=MOBILE)
    with pytest.raises(ConfigError, match=r"takes mask as \[B, T\] bool"):
        encode(params_of(MOBILE), tokens[:, :4], front_mask([3, 2], 3), cfg=MOBILE)
