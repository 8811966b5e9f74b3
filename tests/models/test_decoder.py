"""The shared decoder: chunks, padding, batches and windows keep their laws."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.experts.routing import load_balancing_loss, router_z_loss
from jaxllm.kv.cache import new_cache, stack_places
from jaxllm.models import decoder
from jaxllm.models.parameters import param_specs
from jaxllm.quant import dequantize, quantize, to_blocks
from tests.kernels.switching import fall_back
from tests.models.configs import BATCH, CAPACITY, CHUNK, CONFIGS, PLAIN, PROMPT, TOKENS, V, jit, params_of


@functools.cache
def whole_of(cfg):
    @jit
    def whole(params, tokens):
        hidden, cache = decoder.forward(params, tokens, cfg=cfg)
        assert cache is None
        return hidden

    return whole


@functools.cache
def routed_of(cfg):
    return jit(functools.partial(decoder.forward_documents_with_routing, cfg=cfg))


@functools.cache
def step_of(cfg):
    @jit
    def step(params, tokens, cache, valid):
        return decoder.forward(params, tokens, cache, cfg=cfg, valid=valid)

    return step


def empty_cache(cfg):
    return new_cache(cfg, batch=BATCH, tokens=CAPACITY, dtype=jnp.float32)


def compositions(total, largest):
    if total == 0:
        yield ()
    for first in range(1, min(total, largest) + 1):
        for rest in compositions(total - first, largest):
            yield (first, *rest)


@pytest.mark.slow
@pytest.mark.parametrize("cfg", ["everything", "growing", "sinks"], indirect=True)
def test_whole_is_the_same_in_every_division_into_chunks(cfg):
    expected = np.asarray(whole_of(cfg)(params_of(cfg), TOKENS))
    assert expected.std() > 0.3
    # Padding holds real ids, so that reading it by mistake changes the answer.
    padded = np.concatenate([TOKENS, TOKENS[:, ::-1]], axis=1)
    step, params = step_of(cfg), params_of(cfg)
    divisions = list(compositions(PROMPT, CHUNK))
    assert len(divisions) > 150
    for division in divisions[::11]:
        cache, at, parts = empty_cache(cfg), 0, []
        for valid in division:
            hidden, cache = step(params, padded[:, at : at + CHUNK], cache, np.int32(valid))
            parts.append(np.asarray(hidden[:, :valid]))
            at += valid
        assert int(cache.length) == PROMPT
        got = np.concatenate(parts, axis=1)
        np.testing.assert_allclose(got, expected, atol=2e-5, rtol=0, err_msg=str(division))


@pytest.mark.parametrize("garbage", [0, V - 1, V, 2**31 - 1, -1, -(2**31)])
def test_padding_changes_nothing(cfg, garbage):
    """Whatever its ids are, in the vocabulary or not, also where its places lie past window and cache."""
    step, params = step_of(cfg), params_of(cfg)
    cache = empty_cache(cfg)
    reference = empty_cache(cfg)
    for at, valid in ((0, 4), (4, 3), (7, 2)):
        tokens = np.zeros((BATCH, CHUNK), np.int32)
        tokens[:, :valid] = TOKENS[:, at : at + valid]
        clean, reference = step(params, tokens, reference, np.int32(valid))
        tokens[:, valid:] = garbage
        hidden, cache = step(params, tokens, cache, np.int32(valid))
        np.testing.assert_array_equal(hidden[:, :valid], clean[:, :valid])
        chex.assert_tree_all_finite(hidden)
    chex.assert_trees_all_equal(cache, reference, strict=True)
    for rows in (*cache.keys, *cache.values):
        assert not np.any(rows[..., PROMPT:, :])
        assert np.all(np.any(rows[..., :PROMPT, :] != 0, axis=(-3, -1)))


@pytest.mark.parametrize("cfg", ["everything"], indirect=True)
def test_one_trace_serves_every_count_and_place(cfg):
    """How many tokens of a chunk are real, and how many came before, are arguments."""
    chex.clear_trace_counter()

    @jit
    @chex.assert_max_traces(n=1)
    def step(params, tokens, cache, valid):
        return decoder.forward(params, tokens, cache, cfg=cfg, valid=valid)

    cache = empty_cache(cfg)
    for at, valid in ((0, 4), (4, 1), (5, 3)):
        tokens = TOKENS[:, at : at + CHUNK]
        hidden, after = step(params_of(cfg), tokens, cache, np.int32(valid))
        chex.assert_shape(hidden, (BATCH, CHUNK, cfg.hidden_size))
        chex.assert_trees_all_equal_shapes_and_dtypes(after, cache)
        cache = after
    assert int(cache.length) == 8


@pytest.mark.parametrize("name", ["experts", "some-experts"])
def test_forward_gives_back_the_routing(name):
    cfg, params = CONFIGS[name], params_of(CONFIGS[name])
    hidden, routing = routed_of(cfg)(params, TOKENS)
    np.testing.assert_allclose(hidden, whole_of(cfg)(params, TOKENS), atol=2e-5)
    k = cfg.experts_per_token
    dims = chex.Dimensions(L=sum(cfg.sparse_layers), B=BATCH, T=PROMPT, D=cfg.hidden_size, E=cfg.experts, k=k)
    chex.assert_shape(hidden, dims["BTD"])
    chex.assert_shape([routing.probs, routing.logits], dims["LBTE"])
    chex.assert_shape([routing.ids, routing.weights], dims["LBTk"])
    top = np.argsort(-routing.logits, axis=-1)[..., :k]
    np.testing.assert_array_equal(np.sort(routing.ids, axis=-1), np.sort(top, axis=-1))
    assert len(np.unique(routing.ids)) > 1


def test_a_dense_model_has_no_routing():
    with pytest.raises(ConfigError, match="without experts"):
        decoder.forward_documents_with_routing(params_of(PLAIN), TOKENS, cfg=PLAIN)


def test_training_reaches_every_parameter():
    """Through the loss and the routers' own, in one backward pass."""
    cfg = CONFIGS["experts"]

    def loss(params):
        hidden, routing = decoder.forward_documents_with_routing(params, TOKENS, cfg=cfg)
        scores = jax.nn.log_softmax(decoder.logits(params, hidden, cfg=cfg))
        nats = -jnp.mean(jnp.take_along_axis(scores[:, :-1], TOKENS[:, 1:, None], axis=-1))
        return nats + load_balancing_loss(routing.probs, routing.ids) + router_z_loss(routing.logits)

    gradients = jit(jax.grad(loss))(params_of(cfg))
    _, routing = routed_of(cfg)(params_of(cfg), TOKENS)
    chex.assert_trees_all_equal_shapes_and_dtypes(gradients, params_of(cfg))
    chex.assert_tree_all_finite(gradients)
    for name, gradient in gradients.items():
        assert np.abs(gradient).max() > 0, name
        if ".experts." in name:
            # Nothing is asked of the last token.
            chosen = np.unique(routing.ids[int(name.split(".")[1]), :, :-1])
            np.testing.assert_array_equal(np.flatnonzero(np.abs(gradient).max(axis=(1, 2))), chosen)


widened = jit(lambda weight: dequantize(weight, jnp.dtype(jnp.float32)))


@pytest.mark.parametrize(("name", "bits", "form"), [("everything", 8, "blocks"), ("experts", 4, "columns")])
def test_quantized_parameters_compute_what_they_stand_for(name, bits, form, monkeypatch):
    """Without native kernels, which round activations too (`tests/kernels` knows by how much)."""
    fall_back(monkeypatch)
    cfg = CONFIGS[name]
    specs, params = param_specs(cfg), params_of(cfg)
    quantized, meant = {}, {}
    for name, value in params.items():
        quantized[name] = meant[name] = value
        if specs[name].role != "vector":
            axis = -2 if specs[name].role == "from_units" else -1
            columns = quantize(value, bits=bits, axis=axis)
            quantized[name] = columns if form == "columns" else to_blocks(columns)
            meant[name] = widened(columns)
    got, expected, dense = (whole_of(cfg)(each, TOKENS) for each in (quantized, meant, params))
    np.testing.assert_allclose(got, expected, atol=2e-5)
    assert np.abs(got - dense).max() > 1e-3


def test_dtypes():
    """Activations and cache have their dtypes, whatever the parameters'."""
    cfg = CONFIGS["everything"]

    def run(params, tokens):
        cache = new_cache(cfg, batch=BATCH, tokens=CAPACITY, dtype=jnp.bfloat16)
        hidden, cache = decoder.forward(params, tokens, cache, cfg=cfg, dtype=jnp.bfloat16)
        return hidden, cache, decoder.logits(params, hidden, cfg=cfg)

    hidden, cache, logits = jax.eval_shape(run, params_of(cfg), TOKENS)
    dims = chex.Dimensions(
        B=BATCH, T=PROMPT, S=CAPACITY, D=cfg.hidden_size, K=cfg.kv_heads, H=cfg.head_dim, V=V
    )
    chex.assert_shape([hidden, logits], [dims["BTD"], dims["BTV"]])
    chex.assert_type([hidden, logits], [jnp.bfloat16, jnp.float32])
    assert cache.places == stack_places(cfg)
    for rows in (*cache.keys, *cache.values):
        chex.assert_shape(rows, (None, *dims["BKSH"]))
    chex.assert_type([*cache.keys, *cache.values], jnp.bfloat16)
    chex.assert_shape(cache.length, ())
    chex.assert_type(cache.length, jnp.int32)
