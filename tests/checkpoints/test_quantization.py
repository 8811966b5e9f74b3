"""Folders of quantized weights give the numbers that their formats define, and what is not read is named."""

import dataclasses
import itertools
import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.bundle import Bundle
from jaxllm.checkpoints.huggingface import Checkpoint, read_config, read_params
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.architectures import architecture
from jaxllm.prepare import prepare
from jaxllm.quant import QArray
from tests.checkpoints import mutations
from tests.checkpoints.memory import Most, is_refused, traced
from tests.tiny import TINY, random_params, write_tiny_folder

CFG = dataclasses.replace(TINY, ffn_size=256, hidden_size=128)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
BNB = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
# Mutated folders of each kind that is mutated.
MUTATIONS = int(os.environ.get("JAXLLM_FOLDER_MUTATIONS", "20"))
_TYPES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "int8": "I8",
    "uint8": "U8", "int32": "I32", "int64": "I64",
}  # fmt: skip
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [64, 32], "activation_scheme": "dynamic"}


def compressed(form, **weights):
    known = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "input_activations": None, "weights": known | weights}
    groups = {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", "format": form, **groups}


def words(values, bits, axis):
    """Unsigned numbers packed into words of 32 bits, lowest bits first along an axis."""
    values = np.moveaxis(values, axis, -1).astype(np.uint32)
    parts = values.reshape(*values.shape[:-1], -1, 32 // bits)
    packed = np.zeros(parts.shape[:-1], np.uint32)
    for at in range(32 // bits):
        packed |= parts[..., at] << np.uint32(bits * at)
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis)).view(np.int32)


def levels(draw, shape, group, low, high):
    """Random levels `[out, in]`, scales `[out, groups]` and the latter for each input."""
    groups = 1 if not group else shape[1] // group
    scale = draw.uniform(0.001, 0.01, (shape[0], groups)).astype(np.float16)
    return draw.integers(low, high, shape), scale, scale.astype(np.float32).repeat(shape[1] // groups, 1)


def as_gptq(draw, shape, of):
    bits, symmetric = of["bits"], of["sym"]
    values, scale, wide = levels(draw, shape, max(of["group_size"], 0), int(bits == 8), 1 << bits)
    zero = np.full(scale.shape, 1 << bits - 1) if symmetric else draw.integers(1, 1 << bits, scale.shape)
    more = 0 if of.get("checkpoint_format") == "gptq_v2" else 1
    parts = {
        "qweight": words(values.T, bits, 0),
        "qzeros": words((zero - more).T, bits, 1),
        "scales": np.ascontiguousarray(scale.T),
        "g_idx": (np.arange(shape[1]) // (shape[1] // scale.shape[1])).astype(np.int32),
    }
    return parts, (values - zero.repeat(shape[1] // scale.shape[1], 1)) * wide


def as_awq(draw, shape, of):
    values, scale, wide = levels(draw, shape, of["group_size"], 0, 16)
    zero = draw.integers(0, 16, scale.shape)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(numbers):
        mixed = numbers.reshape(len(numbers), -1, 8)[..., order].reshape(len(numbers), -1)
        return words(mixed, 4, 1)

    parts = {"qweight": packed(values.T), "qzeros": packed(zero.T), "scales": np.ascontiguousarray(scale.T)}
    return parts, (values - zero.repeat(of["group_size"], 1)) * wide


def as_compressed(draw, shape, of):
    weights = of["config_groups"]["group_0"]["weights"]
    bits, top = weights["num_bits"], 1 << weights["num_bits"] - 1
    group = weights["group_size"] if weights["strategy"] == "group" else 0
    values, scale, wide = levels(draw, shape, group, 1 - top, top)
    if of["format"] == "int-quantized":
        return {"weight": values.astype(np.int8), "weight_scale": scale}, values * wide
    parts = {"weight_packed": words(values + top, bits, 1), "weight_scale": scale.astype(ml_dtypes.bfloat16)}
    parts["weight_shape"] = np.asarray(shape, np.int64)
    wide = parts["weight_scale"].astype(np.float32).repeat(shape[1] // scale.shape[1], 1)
    return parts, values * wide


def as_bnb(draw, shape, of):
    values = draw.integers(-127, 128, shape)
    most = draw.uniform(0.1, 0.5, shape[0]).astype(np.float32)
    parts = {"weight": values.astype(np.int8), "SCB": most, "weight_format": np.zeros((), np.uint8)}
    return parts, values * (most / np.float32(127))[:, None]


def as_fp8(draw, shape, of):
    rows, columns = of["weight_block_size"] or shape
    values = (draw.standard_normal(shape) * 20).astype(ml_dtypes.float8_e4m3fn)
    scale = draw.uniform(0.001, 0.01, (-(-shape[0] // rows), -(-shape[1] // columns))).astype(np.float32)
    wide = scale.repeat(rows, 0)[: shape[0]].repeat(columns, 1)[:, : shape[1]]
    if of["weight_block_size"] is None:
        # As Ministral 3 comes.
        parts = {"weight_scale_inv": scale.reshape(()), "activation_scale": np.ones((), np.float32)}
        return {"weight": values, **parts}, values.astype(np.float32) * wide
    return {"weight": values, "weight_scale_inv": scale}, values.astype(np.float32) * wide


CASES = {
    "gptq": (GPTQ, as_gptq, 4),
    "gptq v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, as_gptq, 4),
    "gptq 8 bits": ({**GPTQ, "bits": 8}, as_gptq, 8),
    "gptq per channel": ({**GPTQ, "group_size": -1}, as_gptq, 4),
    "gptq with minima": ({**GPTQ, "sym": False}, as_gptq, 4),
    "awq": (AWQ, as_awq, 4),
    "compressed 4 bits": (compressed("pack-quantized"), as_compressed, 4),
    "compressed 8 bits": (compressed("pack-quantized", num_bits=8), as_compressed, 8),
    "compressed per channel": (
        compressed("int-quantized", num_bits=8, strategy="channel", group_size=None), as_compressed, 8
    ),
    "bitsandbytes": (BNB, as_bnb, 8),
    "fp8": (FP8, as_fp8, 8),
    "fp8 per matrix": ({**FP8, "weight_block_size": None, "activation_scheme": "static"}, as_fp8, 8),
}  # fmt: skip


def write(folder, of, pack):
    """A folder whose layers' matrices are quantized, and the floats that each parameter stands for."""
    write_tiny_folder(folder, cfg=CFG, params=random_params(CFG))
    stored = load_file(folder / "model.safetensors")
    plain = dict(stored)
    floats = folder.parent / f"{folder.name}-floats"
    write_tiny_folder(floats, cfg=CFG, params=random_params(CFG))
    draw, packed = np.random.default_rng(0), {}
    for name, value in stored.items():
        if "_proj." in name:
            parts, wide = pack(draw, value.shape, of)
            plain[name] = wide.astype(np.float32)
            packed |= {name.removesuffix("weight") + part: each for part, each in parts.items()}
        else:
            packed[name] = value
    save_file(plain, floats / "model.safetensors")
    write_safetensors(folder / "model.safetensors", packed)
    change(folder, of)
    return dict(read_params(floats, CFG))


def write_safetensors(path, tensors):
    """The format by hand, because the library takes no 8-bit floats from NumPy."""
    header, data = {}, b""
    for name, each in tensors.items():
        own = np.ascontiguousarray(each).tobytes()
        offsets = [len(data), len(data) + len(own)]
        header[name] = {"dtype": _TYPES[each.dtype.name], "shape": list(each.shape), "data_offsets": offsets}
        data += own
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.unlink()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def change(folder, of):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": of}))


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_the_format(tmp_path, case):
    of, pack, bits = CASES[case]
    expected = write(tmp_path / "q", of, pack)
    cfg = read_config(tmp_path / "q")
    assert cfg == CFG
    stored = dict(Checkpoint(tmp_path / "q", cfg=cfg).stored_params())
    for name, value in read_params(tmp_path / "q", cfg):
        if case.startswith("fp8") and isinstance(stored[name], QArray):
            error = np.sqrt(np.mean((value - expected[name]) ** 2) / np.mean(expected[name] ** 2))
            assert error < 0.01, name
        elif stored_with_minima(stored[name]):
            # A zero point times its scale is rounded to float16.
            step = np.repeat(np.asarray(stored[name].scale, np.float32), 32, stored[name].axis)
            np.testing.assert_array_less(np.abs(value - expected[name]), 0.008 * step, err_msg=name)
        else:
            np.testing.assert_allclose(value, expected[name], rtol=1e-6, err_msg=name)
    for name in ("attn.q", "attn.o", "ffn.up", "ffn.down"):
        found = stored[f"layers.1.{name}"]
        assert isinstance(found, QArray)
        assert found.bits == bits
    prepare(tmp_path / "q", tmp_path / "m.jaxllm")
    with Bundle.open(tmp_path / "m.jaxllm") as bundle:
        assert bundle.layout.weights == f"int{bits}"
        assert bundle.layout.tensors["layers.0.ffn.up"].bits == bits
        # What the checkpoint has as floats stays as it is.
        assert bundle.layout.tensors["embed.tokens"].bits == 0


def stored_with_minima(value):
    return isinstance(value, QArray) and value.minimum is not None


def test_the_lowest_of_256_levels_is_a_step_higher(tmp_path):
    of, pack, _ = CASES["compressed per channel"]
    write(tmp_path / "q", of, pack)
    path = tmp_path / "q" / "model.safetensors"
    stored = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    stored[name][3, 5] = -128
    save_file(stored, path)
    found = dict(read_params(tmp_path / "q", CFG))["layers.0.ffn.up"]
    assert found[3, 5] == pytest.approx(-127 * float(stored[f"{name}_scale"][3, 0]))


# Refusals


@pytest.mark.parametrize(
    ("of", "match"),
    [
        ({"quant_method": "hqq"}, "'hqq' .* read are gptq, awq"),
        ({**GPTQ, "desc_act": True}, "desc_act.*act-order is not read"),
        ({**GPTQ, "bits": 3}, "3 bits"),
        ({**GPTQ, "something_new": 1}, "--ignore-config-key quantization_config.something_new"),
        ({**BNB, "load_in_4bit": True}, "load_in_4bit.*8 bits, or GPTQ"),
        (compressed("pack-quantized", symmetric=False), "symmetric"),
        (compressed("float-quantized"), "'float-quantized'"),
        ({**compressed("pack-quantized"), "config_groups": {}}, "one group"),
    ],
)
def test_other_kinds_are_refused_by_name(tmp_path, of, match):
    write_tiny_folder(tmp_path / "q", cfg=CFG, params=random_params(CFG))
    change(tmp_path / "q", of)
    with pytest.raises(ConfigError, match=match) as caught:
        read_config(tmp_path / "q")
    assert "\n" not in str(caught.value)


def test_unknown_key_can_be_ignored_and_other_widths_are_made_of_the_numbers(tmp_path):
    write(tmp_path / "q", {**GPTQ, "something_new": 1}, as_gptq)
    ignored = {"ignore_keys": ["quantization_config.something_new"]}
    assert Checkpoint(tmp_path / "q", **ignored).cfg == CFG
    prepare(tmp_path / "q", tmp_path / "m.jaxllm", weights="f32", **ignored)
    with Bundle.open(tmp_path / "m.jaxllm") as bundle:
        assert bundle.layout.tensors["layers.0.ffn.up"].bits == 0


@pytest.mark.parametrize(
    ("part", "value", "match"),
    [
        ("scales", None, "lacks .*scales"),
        ("scales", np.full((2, 64), np.inf, np.float16), "not finite"),
        ("qweight", np.zeros((16, 64), np.float32), "is F32"),
        ("qzeros", np.zeros((2, 8), np.int32), "not those of symmetric"),
        ("g_idx", np.zeros(128, np.int32), "act-order is not read"),
    ],
)
def test_damaged_tensors(tmp_path, part, value, match):
    write(tmp_path / "q", GPTQ, as_gptq)
    stored = load_file(tmp_path / "q" / "model.safetensors")
    name = next(each for each in stored if each.endswith(f"q_proj.{part}"))
    stored |= {} if value is None else {name: value}
    if value is None:
        del stored[name]
    save_file(stored, tmp_path / "q" / "model.safetensors")
    with pytest.raises(CheckpointError, match=match):
        dict(read_params(tmp_path / "q", read_config(tmp_path / "q")))


@pytest.mark.parametrize("case", ["gptq", "compressed 4 bits", "bitsandbytes", "fp8"])
def test_mutated_folders_give_one_line(tmp_path, case):
    of, pack, _ = CASES[case]
    write(tmp_path / "q", of, pack)
    mutate(tmp_path / "q")


def read_all(folder):
    for _ in read_params(folder, read_config(folder)):
        pass


def mutate(folder):
    """Configs, headers and weights of a sound folder are changed, at random."""
    sound, refusals, most = shutil.copytree(folder, folder.parent / "sound"), 0, Most()
    size = (folder / "model.safetensors").stat().st_size
    # What widens weights is compiled once, for the shapes of the sound folder.
    assert dict(read_params(folder, read_config(folder)))
    with traced():
        for label, change_it in itertools.islice(mutations.random_changes(seed=1), MUTATIONS):
            shutil.rmtree(folder)
            shutil.copytree(sound, folder)
            change_it(folder)
            # Never less than for the whole: what is cut off is missed only when it is read.
            refusals += is_refused(lambda: read_all(folder), size, label, most)
    shutil.rmtree(sound)
    print(f"{MUTATIONS} mutated folders, {refusals} refused, at most {most.share:.1f} times a file's size")
    assert refusals > MUTATIONS // 4


# Experts in MXFP4, bit for bit

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
