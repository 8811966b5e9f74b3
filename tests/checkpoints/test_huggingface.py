"""Model folders: what is read, what is refused and how it is said, and what is written."""

import dataclasses
import itertools
import json
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.checkpoints.huggingface import read_config, read_params, write_folder
from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.errors import CheckpointError, ConfigError, JaxllmError
from jaxllm.models import decoder, parameters
from jaxllm.prepare import prepare
from tests.checkpoints import mutations
from tests.tiny import random_params, write_tiny_folder
from tests.tiny_states import DELTA_RULE

# A Llama small enough to write by hand: shapes are checked against it, not against what wrote it.
CONFIG = {
    "model_type": "llama", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
LAYER_SHAPES = {
    "input_layernorm.weight": (8,), "self_attn.q_proj.weight": (8, 8), "self_attn.k_proj.weight": (4, 8),
    "self_attn.v_proj.weight": (4, 8), "self_attn.o_proj.weight": (8, 8),
    "post_attention_layernorm.weight": (8,), "mlp.gate_proj.weight": (6, 8), "mlp.up_proj.weight": (6, 8),
    "mlp.down_proj.weight": (8, 6),
}  # fmt: skip


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


def refused(kind, folder, *parts):
    """The one-line message with which reading the folder fails; it holds all `parts`."""
    with pytest.raises(kind) as caught:
        dict(read_params(folder, read_config(folder)))
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message
    return message


# What comes out


def test_reading_is_lazy(tmp_path):
    cfg = read_config(write(tmp_path))
    params = read_params(tmp_path, cfg)
    name, first = next(params)
    assert name == "embed.tokens"
    # Only the block that was asked for is in memory: an array of its own, not a view of a file's.
    assert first.base is None or first.base.nbytes == first.nbytes
    assert next(params)[0] == "layers.0.attn_norm.scale"


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


def test_weights_that_are_missing_or_cut(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refused(CheckpointError, tmp_path, "neither model.safetensors nor model.safetensors.index.json")
    path = write(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    for raw in (b"", whole[:4], whole[:100], whole[:-1], whole[:8] + b"\xff" * 4000):
        path.write_bytes(raw)
        refused(CheckpointError, tmp_path, "model.safetensors is truncated or corrupt")


def without(*ends):
    return lambda stored: {name: each for name, each in stored.items() if not name.endswith(ends)}


def changed(name, change):
    return lambda stored: stored | {name: np.ascontiguousarray(change(stored[name]))}


DOWN, V = "model.layers.1.mlp.down_proj.weight", "model.layers.1.self_attn.v_proj.weight"
BIAS = "model.layers.0.self_attn.q_proj.bias"
MISFITS = {
    "no embedding": (without("embed_tokens.weight"), {}, ["lacks model.embed_tokens.weight"]),
    "one too many": (lambda stored: stored | {BIAS: np.zeros(8, np.float32)}, {}, [f"holds {BIAS}"]),
    "another config": (dict, {"intermediate_size": 12}, ["mlp.gate_proj.weight", "[6, 8]", "[12, 8]"]),
    "the right size": (changed(DOWN, np.transpose), {}, [DOWN, "[6, 8]", "[8, 6]"]),
    **{
        kind: (changed(V, lambda each, kind=kind: each.astype(kind)), {}, [V, "F32, F16, BF16"])
        for kind in ("int8", "int32", "float64", "float8_e4m3fn")
    },
}  # fmt: skip


@pytest.mark.parametrize(("change", "config", "parts"), MISFITS.values(), ids=MISFITS)
def test_weights_that_do_not_fit(tmp_path, change, config, parts):
    refused(CheckpointError, write(tmp_path, CONFIG | config, change(tensors())), *parts)


def test_pickles_are_never_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    import pickle

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    refused(CheckpointError, tmp_path, "pytorch_model.bin", "pickles", "safetensors")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "file",
    ["../a.safetensors", "/etc/a.safetensors", "x/../../a.safetensors", "..", "a.bin", 7],
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
    save_file(without("lm_head.weight")(tensors()), tmp_path / "a.safetensors")
    refused(CheckpointError, tmp_path, "shard a.safetensors", "lacks lm_head.weight")
    save_file(tensors() | {"model.layers.0.gate": np.ones(3, np.float32)}, tmp_path / "a.safetensors")
    refused(CheckpointError, tmp_path, "model.layers.0.gate", "does not have")
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
    head, rest = params["head"], {name: each for name, each in params.items() if name != "head"}
    for kind, match, config, given, extra in (
        (ConfigError, "cannot express qk_norm=True", small_config(qk_norm=True), params, {}),
        (ConfigError, "changes the model", cfg, params, {"rms_norm_eps": 0.5}),
        (ConfigError, "'surprise'", cfg, params, {"surprise": 1}),
        (CheckpointError, "disagree on head", cfg, rest, {}),
        (CheckpointError, "head has shape", cfg, params | {"head": head.T}, {}),
        (CheckpointError, "int8", cfg, params | {"head": head.astype(np.int8)}, {}),
    ):
        with pytest.raises(kind, match=match):
            write_folder(tmp_path, config, given, extra_config=extra)
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


# Tensors that repeat others are compared: stored heads where they are tied, copies, computed positions


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_tied_head_may_be_stored(tmp_path, dtype):
    """As a copy; a head that is another one is the head."""
    stored = tensors(ml_dtypes.bfloat16)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].astype(dtype)
    config = {**CONFIG, "tie_word_embeddings": True}
    cfg, params = read(write(tmp_path, config, stored))
    assert cfg.tied_head
    assert "head" not in params
    cfg, params = read(write(tmp_path, config))
    assert not cfg.tied_head
    np.testing.assert_array_equal(params["head"], tensors()["lm_head.weight"])


@pytest.mark.parametrize("variant", ["gpt2", "gemma2"])
def test_stored_heads_answer_as_in_transformers(tmp_path, tiny_hf, variant):
    """The config says tied, and the file has another head."""
    tokens = np.arange(14).reshape(2, 7)
    tiny_hf.save(variant, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    stored = load_file(tmp_path / "model.safetensors")
    embedding = next(value for name, value in stored.items() if "embed_tokens" in name or "wte" in name)
    noise = np.random.default_rng(0).normal(size=embedding.shape).astype(np.float32)
    save_file(stored | {"lm_head.weight": noise}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    cfg = read_config(tmp_path)
    params = {name: jnp.asarray(value) for name, value in read_params(tmp_path, cfg)}
    hidden = decoder.forward_documents(params, jnp.asarray(tokens, jnp.int32), cfg=cfg)
    theirs = tiny_hf.logits(tiny_hf.load(tmp_path), tokens)
    np.testing.assert_allclose(decoder.logits(params, hidden, cfg=cfg), theirs, atol=2e-3)


@pytest.mark.parametrize(
    ("variant", "copy", "own"),
    [
        ("t5", "encoder.embed_tokens.weight", "shared.weight"),
        ("bart", "model.decoder.embed_tokens.weight", "model.shared.weight"),
        ("marian", "model.encoder.embed_positions.weight", None),
    ],
)
def test_copies_and_computed_positions_are_compared(tmp_path, tiny_hf, variant, copy, own):
    tiny_hf.save_encoder_decoder(variant, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    if own is None:
        model = tiny_hf.load_encoder_decoder(tmp_path)
        known = model.model.encoder.embed_positions.create_weight().numpy()
    else:
        known = stored[own]
    save_file(stored | {copy: known.copy()}, tmp_path / "model.safetensors")
    dict(read_params(tmp_path, read_config(tmp_path)))
    save_file(stored | {copy: known + 1}, tmp_path / "model.safetensors")
    refused(CheckpointError, tmp_path, copy, own or "", "differs")


# All experts of a layer in one tensor, where others of the family have each by itself.
MIXTURE = dataclasses.replace(
    DELTA_RULE, model_type="qwen3_5_moe_text", experts=3, experts_per_token=2, expert_ffn_size=24,
    ffn_size=24, shared_expert_size=40,
)  # fmt: skip


def test_stacked_experts_are_those_by_themselves(tmp_path):
    folder = write_tiny_folder(tmp_path / "m", cfg=MIXTURE, params=random_params(MIXTURE))
    params = dict(read_params(folder, MIXTURE))
    path = folder / "model.safetensors"
    stored = load_file(path)
    for layer in range(MIXTURE.layers):
        experts = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            np.stack(
                [stored.pop(f"{experts}{expert}.{name}_proj.weight") for expert in range(MIXTURE.experts)]
            )
            for name in ("gate", "up", "down")
        )
        stored |= {f"{experts}gate_up_proj": np.concatenate([gate, up], 1), f"{experts}down_proj": down}
    save_file(stored, path)
    for name, value in read_params(folder, MIXTURE):
        np.testing.assert_array_equal(value, params[name], err_msg=name)


SPECIAL = dict(mutations.special_files())


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("sound") / "model")


@pytest.mark.parametrize("name", SPECIAL)
def test_pipes_devices_and_endless_files_are_not_read(name: str, sound: Path, tmp_path: Path):
    folder = shutil.copytree(sound, tmp_path / "model")
    SPECIAL[name](folder)
    # A file that is not needed may be missing.
    missing = "dead link" in name and not name.startswith(
        ("config.json", "tokenizer.json", "model.safetensors ")
    )
    if missing or name.startswith("model.safetensors.index.json"):
        return prepare(folder, tmp_path / "out.jaxllm")
    with pytest.raises(JaxllmError) as caught:
        prepare(folder, tmp_path / "out.jaxllm")
    assert "\n" not in str(caught.value)
    return None


def test_no_mutation_of_a_folder_is_uncaught(sound: Path, tmp_path: Path):
    refused = 0
    for _, change in itertools.islice(mutations.folders(seed=3), len(SPECIAL), len(SPECIAL) + 100):
        folder = tmp_path / "model"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(sound, folder)
        change(folder)
        try:
            prepare(folder, tmp_path / "out.jaxllm")
        except JaxllmError as error:
            refused += "\n" not in str(error)
    assert 20 < refused < 100
