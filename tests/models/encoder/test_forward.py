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
from jaxllm.models.encoder.forward import embed_tokens, encode, encode_layers
from jaxllm.models.encoder.parameters import encoder_shapes, init_values
from jaxllm.models.lora import adapt, merge
from jaxllm.quant import dequantize, quantize, to_blocks
from tests.kernels.switching import fall_back
from tests.models.encoder.tiny import CONFIGS, MOBILE, front_mask, params_of, tokens_of
from tests.quick_jit import jit

V, COUNT = MOBILE.vocab_size, 7
TOKENS = tokens_of(MOBILE, 3, COUNT)


widened = jit(lambda weight: dequantize(weight, jnp.dtype(jnp.float32)))


@functools.cache
def encoder_of(cfg):
    return jit(functools.partial(encode, cfg=cfg))


@pytest.fixture(params=CONFIGS)
def cfg(request):
    return CONFIGS[request.param]


# Parameters


def test_shapes_of_mobilebert():
    """google/mobilebert-uncased has 24.6 million parameters without heads and pooler."""
    cfg = dataclasses.replace(
        MOBILE, vocab_size=30522, embedding_size=128, hidden_size=512, layers=24, heads=4, ffn_size=512,
        window_tokens=512, bottleneck_size=128, ffn_blocks=4,
    )  # fmt: skip
    shapes = encoder_shapes(cfg)
    assert shapes["embed.projection"] == (512, 384)
    assert shapes["layers.23.attn.narrow"] == (128, 512)
    assert shapes["layers.0.attn.q"] == (128, 128)
    assert shapes["layers.0.attn.v"] == (128, 512)
    assert shapes["layers.0.ffn.3.up"] == (512, 128)
    assert shapes["layers.0.widen"] == (512, 128)
    assert sum(map(math.prod, encoder_shapes(cfg).values())) == 24_581_888


def test_initial_values():
    cfg = dataclasses.replace(MOBILE, layers=1, ffn_blocks=1)
    params = jit(lambda key: init_values(encoder_shapes(cfg), key, jnp.float16))(jax.random.key(0))
    expected = {name: jax.ShapeDtypeStruct(shape, jnp.float16) for name, shape in encoder_shapes(cfg).items()}
    chex.assert_trees_all_equal_shapes_and_dtypes(params, expected)
    vectors = {name for name, value in params.items() if value.ndim == 1}
    for name in vectors:
        assert np.all(params[name] == (1 if name.endswith("norm.scale") else 0)), name
    drawn = np.concatenate([np.ravel(params[name]) for name in params.keys() - vectors])
    assert np.abs(drawn).max() < 0.0401
    # A normal distribution cut at two deviations has 0.88 of its deviation left.
    np.testing.assert_allclose(drawn.std(), 0.88 * 0.02, rtol=0.05)


# Laws


def test_padding_changes_nothing(cfg):
    """Neither its ids nor its number."""
    mask = front_mask([1, 3, 5], COUNT)
    others = np.where(mask, TOKENS, (TOKENS + 5) % V)
    first, second = (encoder_of(cfg)(params_of(cfg), each, mask) for each in (TOKENS, others))
    np.testing.assert_array_equal(np.asarray(first)[mask], np.asarray(second)[mask])
    # The last row is whole here.
    shorter = encoder_of(cfg)(params_of(cfg), TOKENS[:, :5], mask[:, :5])
    np.testing.assert_allclose(first[mask], shorter[mask[:, :5]], atol=2e-5, rtol=1e-5)


def test_every_real_token_is_seen(cfg):
    """The last by the first, and padding by nobody."""
    mask = front_mask([COUNT, COUNT - 1, 0], COUNT)
    changed = TOKENS.copy()
    changed[:, -1] = (changed[:, -1] + 1) % V
    before, after = (np.asarray(encoder_of(cfg)(params_of(cfg), each, mask)) for each in (TOKENS, changed))
    assert np.abs(after[0] - before[0]).max(axis=-1).min() > 1e-4
    np.testing.assert_array_equal(after[1, :-1], before[1, :-1])
    chex.assert_tree_all_finite(before)


def test_no_mask_means_all_are_real():
    everyone = np.ones(TOKENS.shape, bool)
    expected = encoder_of(MOBILE)(params_of(MOBILE), TOKENS, everyone)
    got = encoder_of(MOBILE)(params_of(MOBILE), TOKENS)
    np.testing.assert_array_equal(got, expected)


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
    narrow = jit(functools.partial(encode, cfg=MOBILE, dtype=jnp.bfloat16))(params_of(MOBILE), TOKENS)
    chex.assert_shape(narrow, (*TOKENS.shape, MOBILE.hidden_size))
    chex.assert_type(narrow, jnp.bfloat16)
    wide = np.asarray(encoder_of(MOBILE)(params_of(MOBILE), TOKENS))
    assert np.abs(narrow.astype(np.float32) - wide).mean() < 0.05 * wide.std()


# Stored forms


@pytest.mark.parametrize(("bits", "form"), [(8, "columns"), (4, "blocks")])
def test_quantized_matrices_compute_what_they_stand_for(bits, form, monkeypatch):
    """Without native kernels, which round activations too (`tests/kernels` knows by how much)."""
    fall_back(monkeypatch)
    cfg, tokens = MOBILE, TOKENS
    quantized, meant = dict(params_of(cfg)), dict(params_of(cfg))
    for name, value in params_of(cfg).items():
        if value.ndim == 2:
            columns = quantize(value, bits=bits, axis=-1)
            quantized[name] = columns if form == "columns" else to_blocks(columns)
            meant[name] = widened(columns)
    # Compiled anew, for these kernels.
    run = jit(functools.partial(encode, cfg=cfg))
    got, expected, dense = (run(each, tokens) for each in (quantized, meant, params_of(cfg)))
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert np.abs(np.asarray(got - dense)).max() > 1e-2


def test_native_kernels_come_close():
    cfg, tokens = MOBILE, TOKENS
    blocked = {
        name: to_blocks(quantize(value, bits=8, axis=-1)) if value.ndim == 2 else value
        for name, value in params_of(cfg).items()
    }
    got, expected = encoder_of(cfg)(blocked, tokens), encoder_of(cfg)(params_of(cfg), tokens)
    assert np.abs(np.asarray(got - expected)).mean() < 0.05 * np.std(expected)


def test_adapted_matrices():
    cfg, tokens = MOBILE, TOKENS
    draw = np.random.default_rng(2)
    adapter = {}
    for name in ("layers.0.attn.q", "layers.1.attn.v", "layers.0.ffn.1.down", "layers.1.widen"):
        outputs, inputs = encoder_shapes(cfg)[name]
        adapter[f"{name}.left"] = draw.standard_normal((outputs, 2)).astype(np.float32)
        adapter[f"{name}.right"] = draw.standard_normal((2, inputs)).astype(np.float32)
    params = {name: jnp.asarray(value) for name, value in params_of(cfg).items()}
    beside, within = adapt(params, adapter, 0.3), merge(params, adapter, 0.3)
    got, expected = encoder_of(cfg)(beside, tokens), encoder_of(cfg)(within, tokens)
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-5)
    assert np.abs(np.asarray(got - encoder_of(cfg)(params, tokens))).mean() > 0.01


# What is refused


def test_too_many_tokens_and_other_shapes():
    tokens = tokens_of(MOBILE, 2, MOBILE.window_tokens + 1)
    with pytest.raises(ConfigError, match="12 tokens do not fit the encoder's window of 11"):
        encode(params_of(MOBILE), tokens, cfg=MOBILE)
    with pytest.raises(ConfigError, match=r"takes mask as \[B, T\] bool"):
        encode(params_of(MOBILE), tokens[:, :4], front_mask([3, 2], 3), cfg=MOBILE)
    with pytest.raises(ConfigError, match=r"takes types as \[B, T\] int32"):
        encode(params_of(MOBILE), tokens[:, :4], types=tokens[:1, :4], cfg=MOBILE)
