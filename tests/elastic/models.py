"""Small models of every kind of layer, with random parameters (norms and biases too)."""

import dataclasses

import jax
import numpy as np

from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.elastic.units import UnitOrder
from jaxllm.models.parameters import param_specs
from jaxllm.quant import quantize, to_blocks
from tests.tiny import random_params

LLAMA = ModelConfig(
    model_type="llama", vocab_size=64, hidden_size=32, layers=3, heads=8, kv_heads=4, head_dim=8, ffn_size=96,
    window_tokens=64, rope=RopeConfig(dim=8),
)  # fmt: skip
PLAIN = dataclasses.replace(
    LLAMA, model_type="gpt2", kv_heads=8, norm="layer", gated_ffn=False, activation="gelu_tanh",
    learned_positions=True, rope=None, qkv_bias=True, o_bias=True, ffn_bias=True, tied_head=True,
)  # fmt: skip
GEMMA = dataclasses.replace(
    LLAMA, model_type="gemma2", post_norms=True, attention_softcap=20.0, attention_windows=(5, 0, 5)
)
QWEN2 = dataclasses.replace(LLAMA, model_type="qwen2", qkv_bias=True)
QWEN3 = dataclasses.replace(LLAMA, model_type="qwen3", qk_norm=True)
MIXTRAL = dataclasses.replace(LLAMA, model_type="mixtral", experts=4, experts_per_token=2)
QWEN3_MOE = dataclasses.replace(
    MIXTRAL, model_type="qwen3_moe", qk_norm=True, expert_ffn_size=24, sparse_layers=(True, False, True)
)
MODELS = {cfg.model_type: cfg for cfg in (LLAMA, PLAIN, GEMMA, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE)}
TOKENS = np.random.default_rng(3).integers(0, LLAMA.vocab_size, (2, 20)).astype(np.int32)


def scaled_params(cfg, seed=0):
    """Random parameters whose activations stay of the order of one."""
    specs = param_specs(cfg)
    return {
        name: value if specs[name].role == "vector" else value * np.float32(cfg.hidden_size**-0.5)
        for name, value in random_params(cfg, seed).items()
    }


def in_blocks(cfg, params, bits):
    """The parameters at 8 or 4 bits, as native kernels read them."""
    stored = {}
    for name, spec in param_specs(cfg).items():
        axis = -2 if spec.role == "from_units" else -1
        stored[name] = (
            params[name]
            if spec.role == "vector"
            else to_blocks(quantize(np.asarray(params[name]), bits=bits, axis=axis))
        )
    return jax.tree.map(jax.numpy.asarray, stored)


def random_order(cfg, seed=5):
    """A random order of a model's units."""
    draw = np.random.default_rng(seed)
    groups, neurons = [], []
    for layer in range(cfg.layers):
        units = cfg.units(layer)
        groups.append(draw.permutation(units.kv_heads).astype(np.int32))
        rows = cfg.experts if cfg.is_sparse(layer) else 1
        each = np.stack([draw.permutation(units.neurons).astype(np.int32) for _ in range(rows)])
        neurons.append(each if cfg.is_sparse(layer) else each[0])
    return UnitOrder(tuple(groups), tuple(neurons))
