"""Operations and memory of a step by hand."""

import dataclasses

from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.training.loop.hardware import known_device, step_flops_per_token

CFG = ModelConfig(
    model_type="llama", vocab_size=10, hidden_size=4, layers=2, heads=2, kv_heads=1, head_dim=2,
    ffn_size=6, window_tokens=8, norm_eps=1e-5, tied_head=False, rope=RopeConfig(dim=2, theta=1e4),
)  # fmt: skip


def test_operations_are_those_of_products_and_attention():
    layer = 4 * (4 + 2 + 2 + 4) + 3 * 6 * 4 + 2 * 4
    products = 2 * (2 * layer + 4 + 40)
    attention = 2 * 2 * 2 * 2 * 8
    assert step_flops_per_token(CFG, 8) == 3 * (products + attention)
    assert step_flops_per_token(CFG, 8, adapter=True) == 2 * products + 3 * attention
    tied = dataclasses.replace(CFG, tied_head=True)
    assert step_flops_per_token(tied, 8) == step_flops_per_token(CFG, 8)


def test_devices_are_known_by_their_kinds():
    assert known_device("cpu") is None
    lite, whole = known_device("TPU v5 lite"), known_device("TPU v5p")
    assert lite is not None
    assert whole is not None
    assert lite.flops < whole.flops
    assert known_device("NVIDIA H100 80GB HBM3") is not None
