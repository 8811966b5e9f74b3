"""Model folders: what is read, what is refused and how it is said, and what is written."""

import json
import os

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.checkpoints.huggingface import read_config, read_params, write_folder
from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models import parameters

# A Llama small enough to write by hand: shapes are checked against it, not against what wrote it.
CONFIG = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
LAYER_SHAPES = {
    "input_layernorm.weight": (8,),
    "self_attn.q_proj.weight": (8, 8),
    "self_attn.k_proj.weight": (4, 8),
    "self_attn.v_proj.weight": (4, 8),
    "self_attn.o_proj.weight": (8, 8),
    "post_attention_layernorm.weight": (8,),
    "mlp.gate_proj.weight": (6, 8),
    "mlp.up_proj.weight": (6, 8),
    "mlp.down_proj.weight": (8, 6),
}


def tensors(dtype=np.float32):
    shapes = {"model.embed_tokens.weight": (11, 8), "model.norm.weight": (8,), "lm_head.weight": (11, 8)}
    for layer in range(2):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in LAYER_SHAPES.items()}
    draw = np.random.default_rng(0)
    return {name: draw.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def write(folder, config=CONFIG, weights=None):
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors() if weights is None else weights, folder / "model.safetensors")
    return folder


def read(folder):
    cfg = read_config(folder)
    return cfg, dict(read_params(folder, cfg))


def refused(kind, folder, *parts, **how):
    """The one-line message with which reading the folder fails; it holds all `parts`."""
    with pytest.raises(kind) as caught:
        dict(read_params(folder, read_config(folder, **how)))
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message
    return message


# What comes out


def test_layout_by_hand(tmp_path):
    stored = tensors()
    cfg, params = read(write(tmp_path))
    assert list(params) == list(parameters.param_specs(cfg))
    assert {name: value.shape for name, value in params.items()} == {
        name: spec.shape for name, spec in parameters.param_specs(cfg).items()
    }
    body = "model.layers.1.self_attn."
    # Query head n = 2k + g is the g-th of kv-group k; H is 2.
    np.testing.assert_array_equal(params["layers.1.attn.q"][1, 2:4], stored[body + "q_proj.weight"][6:8])
    np.testing.assert_array_equal(params["layers.1.attn.k"][1], stored[body + "k_proj.weight"][2:4])
    np.testing.assert_array_equal(params["layers.1.attn.o"][1, 3], stored[body + "o_proj.weight"][:, 7])
    down = stored["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(params["layers.1.ffn.down"], down.T)
    np.testing.assert_array_equal(params["head"], stored["lm_head.weight"])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_stored_type_is_kept(tmp_path, dtype):
    stored = tensors(dtype)
    _, params = read(write(tmp_path, weights=stored))
    assert {value.dtype for value in params.values()} == {np.dtype(dtype)}
    up = params["layers.0.ffn.up"]
    np.testing.assert_array_equal(up, stored["model.layers.0.mlp.up_proj.weight"])


def test_reading_is_lazy(tmp_path):
    cfg = read_config(write(tmp_path))
    params = read_params(tmp_path, cfg)
    name, first = next(params)
    assert name == "embed.tokens"
    # Only the block that was asked for is in memory: an array of its own, not a view of a file's.
    assert first.base is None or first.base.nbytes == first.nbytes
    assert next(params)[0] == "layers.0.attn_norm.scale"


def test_shards(tmp_path):
    stored = tensors()
    names = sorted(stored)
    halves = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for file, part in halves.items():
        save_file({name: stored[name] for name in part}, tmp_path / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in halves.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    _, sharded = read(tmp_path)
    whole_folder = tmp_path / "whole"
    whole_folder.mkdir()
    _, whole = read(write(whole_folder))
    assert list(sharded) == list(whole)
    for name, value in whole.items():
        np.testing.assert_array_equal(sharded[name], value)


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_prefix_is_optional_and_buffers_are_skipped(tmp_path, prefix):
    stored = {name.replace("model.", prefix): value for name, value in tensors().items()}
    stored[prefix + "layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(1, np.float32)
    _, params = read(write(tmp_path, weights=stored))
    np.testing.assert_array_equal(params["embed.tokens"], tensors()["model.embed_tokens.weight"])


def test_gpt2_as_on_the_hub(tmp_path):
    """No prefix, a stored causal mask, and Conv1D's [in, out] weights."""
    config = {"model_type": "gpt2", "n_embd": 4, "n_layer": 1, "n_head": 2, "vocab_size": 7}
    config |= {"n_positions": 5, "n_ctx": 5, "task_specific_params": {"text": {"max_length": 50}}}
    shapes = {"wte.weight": (7, 4), "wpe.weight": (5, 4), "ln_f.weight": (4,), "ln_f.bias": (4,)}
    shapes |= {f"h.0.{name}.{part}": (4,) for name in ("ln_1", "ln_2") for part in ("weight", "bias")}
    shapes |= {"h.0.attn.c_attn.weight": (4, 12), "h.0.attn.c_attn.bias": (12,)}
    shapes |= {"h.0.attn.c_proj.weight": (4, 4), "h.0.attn.c_proj.bias": (4,)}
    shapes |= {"h.0.mlp.c_fc.weight": (4, 16), "h.0.mlp.c_fc.bias": (16,)}
    shapes |= {"h.0.mlp.c_proj.weight": (16, 4), "h.0.mlp.c_proj.bias": (4,)}
    draw = np.random.default_rng(0)
    stored = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    mask = np.tril(np.ones((1, 1, 5, 5), np.uint8))
    extra = {"h.0.attn.bias": mask, "h.0.attn.masked_bias": np.float32([-1e4])}
    _, params = read(write(tmp_path, config, stored | extra))
    fused = stored["h.0.attn.c_attn.weight"]
    np.testing.assert_array_equal(params["layers.0.attn.v"][1, 0], fused[:, 8 + 2])
    np.testing.assert_array_equal(params["layers.0.attn.k_bias"].ravel(), stored["h.0.attn.c_attn.bias"][4:8])
    np.testing.assert_array_equal(params["layers.0.ffn.down"], stored["h.0.mlp.c_proj.weight"])


# What is refused


def test_missing_and_malformed_config(tmp_path):
    refused(CheckpointError, tmp_path, "config.json is missing")
    for text in ("{", "[" * 100_000, "\x00"):
        (tmp_path / "config.json").write_text(text)
        refused(CheckpointError, tmp_path, "cannot be read as JSON")
    (tmp_path / "config.json").write_text("[1]")
    refused(CheckpointError, tmp_path, "not a JSON object")


def test_missing_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refused(CheckpointError, tmp_path, "neither model.safetensors nor model.safetensors.index.json")


def test_pickles_are_never_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    import pickle

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    refused(CheckpointError, tmp_path, "pytorch_model.bin", "pickles", "safetensors")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated(tmp_path, keep):
    path = write(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(CheckpointError, tmp_path, "model.safetensors is truncated or corrupt")


def test_corrupt_header(tmp_path):
    path = write(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:8] + b"\xff" * 4000)
    refused(CheckpointError, tmp_path, "model.safetensors is truncated or corrupt")


def test_missing_tensors_are_named(tmp_path):
    weights = tensors()
    for layer in range(2):
        del (
            weights[f"model.layers.{layer}.mlp.up_proj.weight"],
            weights[f"model.layers.{layer}.mlp.gate_proj.weight"],
        )
    write(tmp_path, weights=weights)
    refused(CheckpointError, tmp_path, "model.layers.0.mlp.gate_proj.weight", "and 1 more")


def test_missing_embedding_is_named_with_the_usual_prefix(tmp_path):
    weights = tensors()
    del weights["model.embed_tokens.weight"]
    refused(CheckpointError, write(tmp_path, weights=weights), "lacks model.embed_tokens.weight")


def test_unexpected_tensor_is_named(tmp_path):
    weights = tensors() | {"model.layers.0.self_attn.q_proj.bias": np.zeros(8, np.float32)}
    refused(CheckpointError, write(tmp_path, weights=weights), "holds model.layers.0.self_attn.q_proj.bias")


def test_config_of_other_weights(tmp_path):
    write(tmp_path, {**CONFIG, "intermediate_size": 12})
    refused(CheckpointError, tmp_path, "mlp.gate_proj.weight", "[6, 8]", "[12, 8]")


def test_wrong_shape_with_the_right_size(tmp_path):
    weights = tensors()
    down = "model.layers.1.mlp.down_proj.weight"
    weights[down] = np.ascontiguousarray(weights[down].T)
    refused(CheckpointError, write(tmp_path, weights=weights), down, "[6, 8]", "[8, 6]")


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.float64, ml_dtypes.float8_e4m3fn])
def test_other_types(tmp_path, dtype):
    weights = tensors()
    name = "model.layers.1.self_attn.v_proj.weight"
    weights[name] = weights[name].astype(dtype)
    refused(CheckpointError, write(tmp_path, weights=weights), name, "stored as", "F32, F16, BF16")


@pytest.mark.parametrize(
    "file",
    ["../a.safetensors", "/etc/a.safetensors", "x/../../a.safetensors", "..", "a.bin", "x\\a.safetensors", 7],
)
def test_shard_outside_of_the_folder(tmp_path, file):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors(), tmp_path / "a.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    index = {"weight_map": dict.fromkeys(tensors(), file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(CheckpointError, folder, repr(str(file)), "same folder")


def test_index_and_shards_disagree(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors(), "a.safetensors")}))
    refused(CheckpointError, tmp_path, "shard a.safetensors is missing")
    weights = tensors()
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "a.safetensors")
    refused(CheckpointError, tmp_path, "shard a.safetensors", "lacks lm_head.weight")
    index.write_text("{}")
    refused(CheckpointError, tmp_path, "weight_map")


# What is written


def small_config(**changes):
    rope = RopeConfig(dim=8, theta=500.0, kind="llama3", factor=2.0, original_window_tokens=8)
    fields = {
        "model_type": "llama", "vocab_size": 11, "hidden_size": 8, "layers": 2, "heads": 4, "kv_heads": 2,
        "head_dim": 8, "ffn_size": 6, "window_tokens": 32, "rope": rope, "norm_eps": 1e-4,
    }  # fmt: skip
    return ModelConfig(**{**fields, **changes})


def small_params(cfg, dtype=np.float32):
    draw = np.random.default_rng(0)
    return {
        name: draw.normal(size=spec.shape).astype(dtype) for name, spec in parameters.param_specs(cfg).items()
    }


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_round_trip(tmp_path, dtype):
    cfg = small_config(tied_head=True, qkv_bias=True, o_bias=True)
    params = small_params(cfg, dtype)
    folder = tmp_path / "new" / "model"
    write_folder(folder, cfg, params, extra_config={"eos_token_id": 2})
    # The library, which did not write the file, agrees with it.
    assert load_file(folder / "model.safetensors")["model.norm.weight"].dtype == dtype
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 2
    again_cfg, again = read(folder)
    assert again_cfg == cfg
    assert list(again) == list(params)
    for name, value in params.items():
        np.testing.assert_array_equal(again[name], value)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]


def test_jax_arrays_are_written(tmp_path):
    cfg = small_config()
    params = small_params(cfg)
    write_folder(tmp_path, cfg, {name: jnp.asarray(value) for name, value in params.items()})
    _, again = read(tmp_path)
    np.testing.assert_array_equal(again["layers.1.attn.o"], params["layers.1.attn.o"])


def test_failed_write_leaves_the_old_model(tmp_path):
    cfg = small_config()
    params = small_params(cfg)
    write_folder(tmp_path, cfg, params)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    class Failing:
        shape, dtype = params["head"].shape, params["head"].dtype

        def __array__(self, *args, **kwargs):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_folder(tmp_path, cfg, {**params, "head": Failing()})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_cannot_be_written(tmp_path):
    cfg = small_config()
    params = small_params(cfg)
    with pytest.raises(ConfigError, match="cannot express qk_norm=True"):
        write_folder(tmp_path, small_config(qk_norm=True), params)
    with pytest.raises(ConfigError, match="changes the model"):
        write_folder(tmp_path, cfg, params, extra_config={"rms_norm_eps": 0.5})
    with pytest.raises(ConfigError, match="'surprise'"):
        write_folder(tmp_path, cfg, params, extra_config={"surprise": 1})
    with pytest.raises(CheckpointError, match="disagree on head"):
        write_folder(tmp_path, cfg, {name: each for name, each in params.items() if name != "head"})
    with pytest.raises(CheckpointError, match="head has shape"):
        write_folder(tmp_path, cfg, {**params, "head": params["head"].T})
    with pytest.raises(CheckpointError, match="int8"):
        write_folder(tmp_path, cfg, {**params, "head": params["head"].astype(np.int8)})
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def tiny_hf():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests import tiny_hf

    return tiny_hf


def variants():
    from tests.tiny_hf import VARIANTS

    return list(VARIANTS)


@pytest.mark.parametrize("variant", variants())
def test_transformers_reads_what_we_write(tmp_path, tiny_hf, variant):
    original = tiny_hf.save(variant, tmp_path / "theirs")
    cfg, params = read(original)
    write_folder(tmp_path / "ours", cfg, params)
    tokens = np.arange(20, dtype=np.int32)[None]
    before = tiny_hf.logits(tiny_hf.load(original), tokens)
    after = tiny_hf.logits(tiny_hf.load(tmp_path / "ours"), tokens)
    # Norms written as 1 + w lose w's last bits; nothing else may change.
    np.testing.assert_allclose(after, before, atol=1e-5, rtol=0)
    assert read(tmp_path / "ours")[0] == cfg


def test_shards_of_transformers(tmp_path, tiny_hf):
    whole = tiny_hf.save("gemma2", tmp_path / "whole", dtype="bfloat16")
    sharded = tiny_hf.save("gemma2", tmp_path / "sharded", dtype="bfloat16", max_shard_size="8KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    (_, expected), (_, got) = read(whole), read(sharded)
    assert list(got) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value)
        norm = name.endswith("norm.scale")
        assert value.dtype == (np.float32 if norm else ml_dtypes.bfloat16)
