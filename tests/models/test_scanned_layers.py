"""Layers in a loop give what they give one by one: outputs, gradients, routing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import LayerUnits
from jaxllm.errors import ConfigError
from jaxllm.models import decoder
from jaxllm.models.lora import LoraConfig, adapt, init_adapter
from jaxllm.models.parameters import init_params
from jaxllm.models.scanned_layers import is_stacked, scan_runs, stack_name, stacked, unstacked
from tests.models.configs import CONFIGS, PLAIN

FIVE = dataclasses.replace(PLAIN, layers=5, attention_windows=())
ALTERNATING = dataclasses.replace(FIVE, attention_windows=(3, 0, 3, 0, 3))
SPARSE = dataclasses.replace(CONFIGS["experts"], layers=4, attention_windows=(), sparse_layers=())
WHOLE, LESS = (LayerUnits(kv_heads=PLAIN.kv_heads, neurons=n) for n in (PLAIN.ffn_size, PLAIN.ffn_size // 2))
LEVEL = dataclasses.replace(FIVE, layer_units=(WHOLE, LESS, LESS, WHOLE, LESS))
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, PLAIN.vocab_size, (2, 12)), jnp.int32)
STARTS = jnp.asarray([[0] * 5 + [5] * 7, [0] * 12], jnp.int32)


def test_equal_layers_are_runs():
    def told(cfg):
        return [(run.first, run.period, run.repeats) for run in scan_runs(cfg)]

    assert told(FIVE) == [(0, 1, 5)]
    assert told(ALTERNATING) == [(0, 2, 2), (4, 1, 1)]
    assert told(LEVEL) == [(0, 1, 1), (1, 1, 2), (3, 1, 1), (4, 1, 1)]
    assert stack_name(ALTERNATING, "layers.3.attn.q") == ("stacks.1.attn.q", 1)
    assert stack_name(ALTERNATING, "layers.4.attn.q") == ("layers.4.attn.q", -1)
    assert stack_name(ALTERNATING, "head") == ("head", -1)


@pytest.mark.parametrize(
    "cfg", [FIVE, ALTERNATING, SPARSE, LEVEL], ids=["equal", "windows", "experts", "level"]
)
def test_stacks_are_taken_apart_again(cfg):
    params = init_params(cfg, jax.random.key(0))
    together = stacked(params, cfg)
    assert is_stacked(together)
    assert not is_stacked(params)
    for apart in (unstacked(together, cfg), unstacked(jax.tree.map(np.asarray, together), cfg)):
        assert set(apart) == set(params)
        for name, value in params.items():
            np.testing.assert_array_equal(apart[name], value)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize(
    "cfg", [FIVE, ALTERNATING, SPARSE, LEVEL], ids=["equal", "windows", "experts", "level"]
)
def test_a_loop_has_the_outputs_and_gradients_of_single_layers(cfg, remat):
    params = init_params(cfg, jax.random.key(0))

    def loss(params):
        if not cfg.experts:
            return decoder.forward_documents(params, TOKENS, STARTS, cfg=cfg, remat=remat).std(), ()
        hidden, routing = decoder.forward_documents_with_routing(params, TOKENS, STARTS, cfg=cfg, remat=remat)
        return hidden.std() + routing.weights.std(), routing

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (one, routing), gradients = run(params)
    (other, its_routing), stacks = run(stacked(params, cfg))
    np.testing.assert_allclose(one, other, rtol=1e-5)
    apart = unstacked(stacks, cfg)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(apart[name], gradient, atol=2e-5, err_msg=name)
    for each, its in zip(jax.tree.leaves(routing), jax.tree.leaves(its_routing), strict=True):
        np.testing.assert_allclose(each, its, atol=1e-5)


def test_adapters_are_stacked_beside_their_weights():
    params, lora = init_params(FIVE, jax.random.key(0)), LoraConfig(rank=2)
    adapter = {
        name: each + np.float32(0.01) for name, each in init_adapter(FIVE, lora, jax.random.key(1)).items()
    }
    alone = decoder.forward_documents(adapt(params, adapter, 1.5), TOKENS, cfg=FIVE)
    beside = adapt(stacked(params, FIVE), stacked(adapter, FIVE), 1.5)
    np.testing.assert_allclose(decoder.forward_documents(beside, TOKENS, cfg=FIVE), alone, atol=1e-5)


def test_equal_layers_need_equal_parameters():
    params = init_params(FIVE, jax.random.key(0))
    del params["layers.2.attn.q"]
    with pytest.raises(ConfigError, match=r"stacks\.0\.attn\.q is there for 4 of 5 equal layers"):
        stacked(params, FIVE)


def test_a_step_of_many_layers_has_no_more_code():
    def operations(layers):
        cfg = dataclasses.replace(PLAIN, layers=layers, attention_windows=())
        shapes = jax.eval_shape(lambda: stacked(init_params(cfg, jax.random.key(0)), cfg))

        def loss(params):
            return decoder.forward_documents(params, TOKENS, cfg=cfg, remat="full").std()

        return jax.jit(jax.grad(loss)).lower(shapes).as_text().count(" = ")

    assert operations(24) == operations(4)
