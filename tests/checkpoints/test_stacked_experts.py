"""Folders that have all experts of a layer in one tensor, where others of the family have each by itself."""

import dataclasses

import numpy as np
from safetensors.numpy import load_file, save_file

from jaxllm.checkpoints.huggingface import read_params
from tests.tiny import random_params, write_tiny_folder
from tests.tiny_states import DELTA_RULE

CFG = dataclasses.replace(
    DELTA_RULE, model_type="qwen3_5_moe_text", experts=3, experts_per_token=2, expert_ffn_size=24,
    ffn_size=24, shared_expert_size=40,
)  # fmt: skip


def test_stacked_experts_are_those_by_themselves(tmp_path):
    folder = write_tiny_folder(tmp_path / "m", cfg=CFG, params=random_params(CFG))
    params = dict(read_params(folder, CFG))
    path = folder / "model.safetensors"
    stored = load_file(path)
    for layer in range(CFG.layers):
        experts = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            np.stack([stored.pop(f"{experts}{expert}.{name}_proj.weight") for expert in range(CFG.experts)])
            for name in ("gate", "up", "down")
        )
        stored |= {f"{experts}gate_up_proj": np.concatenate([gate, up], 1), f"{experts}down_proj": down}
    save_file(stored, path)
    for name, value in read_params(folder, CFG):
        np.testing.assert_array_equal(value, params[name], err_msg=name)
