"""The Flax front has the decoder's parameters, computes what the decoder computes, and trains."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.kv.cache import new_cache
from jaxllm.models import decoder, parameters
from jaxllm.models.flax_front import DecoderLM

CFG = ModelConfig(
    model_type="llama", vocab_size=17, hidden_size=16, layers=2, heads=4, kv_heads=2, head_dim=4,
    ffn_size=24, window_tokens=32, rope=RopeConfig(dim=4), qkv_bias=True,
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 17, (2, 9), dtype=np.int32)


@pytest.fixture(scope="module")
def params():
    return jax.jit(DecoderLM(CFG).init)(jax.random.key(0), TOKENS)["params"]


def test_parameters_are_the_decoders(params):
    expected = jax.eval_shape(functools.partial(parameters.init_params, CFG), jax.random.key(0))
    assert type(params) is dict
    assert set(params) == set(expected)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
    assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), expected)
    for name, value in params.items():
        if not name.endswith("bias"):
            assert np.std(value) > 0 or name.endswith("norm.scale"), name
    assert not np.array_equal(params["layers.0.attn.q"], params["layers.1.attn.q"])


def test_param_dtype():
    model = DecoderLM(CFG, param_dtype=jnp.bfloat16)
    made = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    assert {leaf.dtype for leaf in made.values()} == {jnp.dtype(jnp.bfloat16)}


def test_logits_are_the_decoders(params):
    @jax.jit
    def expected(params):
        hidden, _ = decoder.forward(params, TOKENS, cfg=CFG)
        return decoder.logits(params, hidden, cfg=CFG)

    got = jax.jit(DecoderLM(CFG).apply)({"params": params}, TOKENS)
    np.testing.assert_array_equal(got, expected(params))
    assert got.shape == (2, 9, 17)


def test_cache_continues_the_sequence(params):
    apply = jax.jit(DecoderLM(CFG).apply)
    whole = apply({"params": params}, TOKENS)
    cache = new_cache(CFG, batch=2, tokens=12, dtype=jnp.float32)
    first, cache = apply({"params": params}, TOKENS[:, :6], cache, valid=jnp.int32(4))
    rest, cache = apply({"params": params}, TOKENS[:, 4:], cache)
    assert int(cache.length) == 9
    got = np.concatenate([first[:, :4], rest], axis=1)
    np.testing.assert_allclose(got, whole, atol=1e-5, rtol=0)


def test_training_reduces_the_loss(params):
    model, optimizer = DecoderLM(CFG), optax.adam(1e-2)

    def loss_of(params):
        logits = model.apply({"params": params}, TOKENS[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]).mean()

    @jax.jit
    def step(params, state):
        loss, gradients = jax.value_and_grad(loss_of)(params)
        # Optax mixes integers and floats.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss, gradients

    state = optimizer.init(params)
    params, state, before, gradients = step(params, state)
    assert all(np.isfinite(each).all() and np.any(each) for each in gradients.values())
    for _ in range(20):
        params, state, after, _ = step(params, state)
    assert before == pytest.approx(np.log(17), rel=0.1)
    assert after < 0.3 * before


def test_missing_parameter_is_named(params):
    rest = {name: value for name, value in params.items() if name != "layers.1.ffn.up"}
    with pytest.raises(KeyError, match=r"layers\.1\.ffn\.up"):
        DecoderLM(CFG).apply({"params": rest}, TOKENS)
