"""The shared decoder: its parameters; padding, routing and quantized weights keep their laws."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Var

from jaxllm.bundle import segment_of
from jaxllm.experts.routing import load_balancing_loss, router_z_loss
from jaxllm.kv.cache import new_cache
from jaxllm.models import decoder
from jaxllm.models.parameters import (
    init_params,
    param_specs,
)
from tests.models.configs import BATCH, CAPACITY, CHUNK, CONFIGS, PROMPT, TOKENS, V, jit, params_of


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


def test_specs_are_in_the_order_in_which_a_step_reads_them(cfg):
    """Weights are stored and streamed in this order, layer by layer; vectors anywhere in their layer."""

    def run(params, tokens):
        hidden, _ = decoder.forward(params, tokens, cfg=cfg)
        return decoder.logits(params, hidden, cfg=cfg)

    params = params_of(cfg)
    jaxpr = jax.make_jaxpr(run)(params, TOKENS).jaxpr
    # A dict's leaves are in the order of its sorted keys.
    names = dict(zip(jaxpr.invars[: len(params)], sorted(params), strict=True))
    uses = [var for equation in jaxpr.eqns for var in equation.invars if isinstance(var, Var)]
    read = list(dict.fromkeys(names[var] for var in uses if var in names))
    specs = param_specs(cfg)
    assert sorted(read) == sorted(specs)

    def matrices(names):
        # Those of experts are arguments of one equation, which chooses by platform.
        return [name.split(".experts.")[0] for name in names if specs[name].role != "vector"]

    assert matrices(read) == matrices(specs)
    segments = [segment_of(name) for name in read]
    assert segments == sorted(segments, key=list(dict.fromkeys(map(segment_of, specs))).index)


def specified(cfg, dtype):
    """Arrays as the specs say."""
    return {name: jax.ShapeDtypeStruct(spec.shape, dtype) for name, spec in param_specs(cfg).items()}


def test_initial_parameters():
    cfg = dataclasses.replace(
        CONFIGS["everything"], layers=1, attention_windows=(), hidden_size=64, ffn_size=96, head_dim=32,
        vocab_size=64, tied_head=False,
    )  # fmt: skip
    params = jax.tree.map(np.asarray, jit(functools.partial(init_params, cfg))(jax.random.key(0)))
    chex.assert_trees_all_equal_shapes_and_dtypes(params, specified(cfg, jnp.float32))
    chex.assert_tree_all_finite(params)
    deviations = {
        "embed.tokens": 0.02, "head": 0.02,
        "layers.0.attn.q": 64**-0.5, "layers.0.attn.v": 64**-0.5, "layers.0.ffn.up": 64**-0.5,
        # Contracted over both unit axes (kv heads and a group's queries), and one of two residuals.
        "layers.0.attn.o": (2 * 2 * 2 * 32) ** -0.5,
        "layers.0.ffn.down": (2 * 96) ** -0.5,
    }  # fmt: skip
    for name, deviation in deviations.items():
        assert np.std(params[name]) == pytest.approx(deviation, rel=0.05), name
        assert abs(np.mean(params[name])) < deviation * 0.06, name
    for name, value in params.items():
        if name.endswith("norm.scale"):
            np.testing.assert_array_equal(value, 1, err_msg=name)
        if name.endswith("bias"):
            np.testing.assert_array_equal(value, 0, err_msg=name)
    weights = [params[name].ravel()[:100] for name, spec in param_specs(cfg).items() if spec.role != "vector"]
    assert len(weights) == 9
    assert all(not np.array_equal(a, b) for i, a in enumerate(weights) for b in weights[:i])
