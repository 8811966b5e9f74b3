"""Experts in MXFP4 are read bit for bit, and damaged ones refused in one line."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxllm.bundle import Bundle
from jaxllm.checkpoints.huggingface import read_config, read_params
from jaxllm.errors import CheckpointError
from jaxllm.models.architectures import architecture
from jaxllm.prepare import prepare
from tests.checkpoints.test_quantization import change, mutate, write_safetensors
from tests.tiny import TINY, random_params, write_tiny_folder

GPT_OSS = architecture("gpt_oss").config_from_hf(
    {
        "model_type": "gpt_oss", "vocab_size": TINY.vocab_size, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
    }
)  # fmt: skip
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def write_mxfp4(folder):
    """A folder of gpt-oss whose experts are quantized, and transformers' own numbers `[E, in, out]`."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    torch = pytest.importorskip("torch")
    write_tiny_folder(folder, cfg=GPT_OSS, params=random_params(GPT_OSS))
    stored, expected = load_file(folder / "model.safetensors"), {}
    draw = np.random.default_rng(0)
    for name in [each for each in stored if each.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        blocks = draw.integers(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)
        scales = draw.integers(112, 126, (experts, outputs, inputs // 32)).astype(np.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        parts = map(torch.from_numpy, (blocks, scales))
        expected[name] = mxfp4.convert_moe_packed_tensors(*parts, dtype=torch.float32).numpy()
    write_safetensors(folder / "model.safetensors", stored)
    change(folder, MXFP4)
    return expected


def test_mxfp4_is_bit_exact_in_8_bits(tmp_path):
    expected = write_mxfp4(tmp_path / "q")
    cfg = read_config(tmp_path / "q")
    assert cfg == GPT_OSS
    found = dict(read_params(tmp_path / "q", cfg))
    for layer in range(cfg.layers):
        both = expected[f"model.layers.{layer}.mlp.experts.gate_up_proj"].swapaxes(1, 2)
        np.testing.assert_array_equal(found[f"layers.{layer}.experts.gate"], both[:, ::2])
        np.testing.assert_array_equal(found[f"layers.{layer}.experts.up"], both[:, 1::2])
        down = expected[f"model.layers.{layer}.mlp.experts.down_proj"]
        np.testing.assert_array_equal(found[f"layers.{layer}.experts.down"], down)
    prepare(tmp_path / "q", tmp_path / "m.jaxllm")
    with Bundle.open(tmp_path / "m.jaxllm") as bundle:
        assert bundle.layout.weights == "int8"
        assert bundle.layout.tensors["layers.0.experts.down"].bits == 8
        assert bundle.layout.tensors["layers.0.attn.q"].bits == 0


@pytest.mark.parametrize(
    ("part", "spoil", "match"),
    [
        ("scales", lambda scales: None, "lacks .*scales"),
        ("scales", lambda scales: scales[..., :1], "implies U8 of shape"),
        ("scales", lambda scales: scales.astype(np.int8), "is I8"),
        ("blocks", lambda blocks: blocks[..., :8], "implies U8 of shape"),
        ("scales", lambda scales: np.full_like(scales, 255), "not finite"),
        ("scales", lambda scales: np.full_like(scales, 144), "above what float16 holds"),
    ],
)
def test_damaged_mxfp4(tmp_path, part, spoil, match):
    write_mxfp4(tmp_path / "q")
    path = tmp_path / "q" / "model.safetensors"
    stored = load_file(path)
    name = f"model.layers.1.mlp.experts.down_proj_{part}"
    value = spoil(stored.pop(name))
    write_safetensors(path, stored if value is None else stored | {name: np.ascontiguousarray(value)})
    with pytest.raises(CheckpointError, match=match) as caught:
        dict(read_params(tmp_path / "q", read_config(tmp_path / "q")))
    assert "\n" not in str(caught.value)


def test_scales_below_float16_are_rounded_to_its_least_and_mutated_folders_give_one_line(tmp_path):
    write_mxfp4(tmp_path / "q")
    mutate(tmp_path / "q")
    write_mxfp4(tmp_path / "p")
    path = tmp_path / "p" / "model.safetensors"
    stored = load_file(path)
    stored["model.layers.0.mlp.experts.down_proj_scales"][:] = 103
    write_safetensors(path, stored)
    found = dict(read_params(tmp_path / "p", GPT_OSS))["layers.0.experts.down"]
    assert np.abs(found).max() == 6 * 2.0**-24
    np.testing.assert_array_equal(found % 2.0**-24, 0)
