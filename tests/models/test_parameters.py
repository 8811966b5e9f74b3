"""The parameters of a decoder: names, shapes, order and initial values."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Var

from jaxllm.bundle import segment_of
from jaxllm.models import decoder, parameters
from jaxllm.models.parameters import (
    ParamSpec,
    active_parameter_count,
    init_params,
    param_specs,
    parameter_count,
)
from tests.models.configs import CONFIGS, PLAIN, TOKENS, V, jit, params_of


def test_specs_of_a_plain_model():
    layer = {
        "attn_norm.scale": ParamSpec((12,), "vector"),
        "attn.q": ParamSpec((2, 12, 12), "to_units"),
        "attn.k": ParamSpec((2, 6, 12), "to_units"),
        "attn.v": ParamSpec((2, 6, 12), "to_units"),
        "attn.o": ParamSpec((2, 12, 12), "from_units"),
        "ffn_norm.scale": ParamSpec((12,), "vector"),
        "ffn.gate": ParamSpec((10, 12), "to_units"),
        "ffn.up": ParamSpec((10, 12), "to_units"),
        "ffn.down": ParamSpec((10, 12), "from_units"),
    }
    expected = {"embed.tokens": ParamSpec((V, 12), "embed")}
    for i in range(2):
        expected |= {f"layers.{i}.{name}": spec for name, spec in layer.items()}
    expected |= {"final_norm.scale": ParamSpec((12,), "vector"), "head": ParamSpec((V, 12), "embed")}
    assert param_specs(PLAIN) == expected
    assert list(param_specs(PLAIN)) == list(expected)
    assert parameter_count(PLAIN) == 2 * V * 12 + 12 + 2 * (2 * 12 + 2 * 2 * 12 * 12 + 2 * 2 * 6 * 12 + 360)


def test_specs_of_a_model_with_everything():
    specs = param_specs(CONFIGS["everything"])
    names = [name.removeprefix("layers.1.") for name in specs if name.startswith("layers.1.")]
    assert names == [
        "attn_norm.scale", "attn.q", "attn.q_bias", "attn.k", "attn.k_bias", "attn.v", "attn.v_bias",
        "attn.q_norm.scale", "attn.k_norm.scale", "attn.o", "attn.o_bias", "attn_post_norm.scale",
        "ffn_norm.scale", "ffn.gate", "ffn.gate_bias", "ffn.up", "ffn.up_bias", "ffn.down",
        "ffn.down_bias", "ffn_post_norm.scale",
    ]  # fmt: skip
    shapes = {name: specs[f"layers.1.{name}"].shape for name in names if "bias" in name or "q_norm" in name}
    assert shapes == {
        "attn.q_bias": (2, 12), "attn.k_bias": (2, 6), "attn.v_bias": (2, 6), "attn.q_norm.scale": (6,),
        "attn.o_bias": (12,), "ffn.gate_bias": (10,), "ffn.up_bias": (10,), "ffn.down_bias": (12,),
    }  # fmt: skip
    assert "head" not in specs
    assert "embed.positions" not in specs


def test_specs_of_a_model_with_experts():
    specs = param_specs(CONFIGS["some-experts"])
    assert [name for name in specs if name.startswith("layers.0.ffn.")] == [
        "layers.0.ffn.gate", "layers.0.ffn.up", "layers.0.ffn.down",
    ]  # fmt: skip
    experts = {name: spec for name, spec in specs.items() if "experts" in name or "router" in name}
    assert experts == {
        "layers.1.router": ParamSpec((3, 12), "vector"),
        "layers.1.experts.gate": ParamSpec((3, 6, 12), "to_units"),
        "layers.1.experts.up": ParamSpec((3, 6, 12), "to_units"),
        "layers.1.experts.down": ParamSpec((3, 6, 12), "from_units"),
    }
    assert not any(name.startswith("layers.1.ffn.") for name in specs)


def test_a_token_uses_few_of_the_experts():
    cfg = CONFIGS["some-experts"]
    assert parameter_count(cfg) - active_parameter_count(cfg) == 2 * 3 * 6 * 12
    assert active_parameter_count(PLAIN) == parameter_count(PLAIN)


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


def test_an_expert_starts_as_a_block_of_its_own():
    cfg = dataclasses.replace(CONFIGS["experts"], hidden_size=64, expert_ffn_size=96)
    made = {
        name: parameters.init_param(cfg, f"layers.0.{name}", jax.random.key(0), jnp.float32)
        for name in ("router", "experts.gate", "experts.down")
    }
    assert np.std(made["experts.gate"]) == pytest.approx(64**-0.5, rel=0.05)
    assert np.std(made["experts.down"]) == pytest.approx((2 * 2 * 96) ** -0.5, rel=0.05)
    assert np.std(made["router"]) == pytest.approx(64**-0.5, rel=0.2)
