"""Tensors that repeat others are compared: stored heads where they are tied, copies, computed positions."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.checkpoints.huggingface import read_config, read_params
from jaxllm.errors import CheckpointError
from jaxllm.models import decoder
from tests.checkpoints.test_huggingface import CONFIG, read, refused, tensors, write

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests import tiny_hf


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_tied_head_may_be_stored(tmp_path, dtype):
    stored = tensors(ml_dtypes.bfloat16)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].astype(dtype)
    cfg, params = read(write(tmp_path, {**CONFIG, "tie_word_embeddings": True}, stored))
    assert cfg.tied_head
    assert "head" not in params


def test_a_stored_head_that_is_not_the_embedding_is_the_head(tmp_path):
    cfg, params = read(write(tmp_path, {**CONFIG, "tie_word_embeddings": True}))
    assert not cfg.tied_head
    np.testing.assert_array_equal(params["head"], tensors()["lm_head.weight"])


@pytest.mark.parametrize("variant", ["llama-untied-biases", "gpt2", "gemma2"])
def test_stored_heads_answer_as_in_transformers(tmp_path, variant):
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
    ],
)
def test_copies_of_a_tensor_are_compared(tmp_path, variant, copy, own):
    tiny_hf.save_encoder_decoder(variant, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    save_file(stored | {copy: stored[own].copy()}, tmp_path / "model.safetensors")
    dict(read_params(tmp_path, read_config(tmp_path)))
    save_file(stored | {copy: stored[own] + 1}, tmp_path / "model.safetensors")
    refused(CheckpointError, tmp_path, copy, own, "differs")


def test_positions_that_are_computed_are_compared(tmp_path):
    name = "model.encoder.embed_positions.weight"
    model = tiny_hf.load_encoder_decoder(tiny_hf.save_encoder_decoder("marian", tmp_path))
    positions = model.model.encoder.embed_positions.create_weight().numpy()
    stored = load_file(tmp_path / "model.safetensors")
    save_file(stored | {name: positions}, tmp_path / "model.safetensors")
    dict(read_params(tmp_path, read_config(tmp_path)))
    save_file(stored | {name: positions[::-1].copy()}, tmp_path / "model.safetensors")
    refused(CheckpointError, tmp_path, name, "differs")


def test_tensors_that_the_index_leaves_out_are_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors() | {"model.layers.0.gate": np.ones(3, np.float32)}, tmp_path / "a.safetensors")
    index = {"weight_map": dict.fromkeys(tensors(), "a.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(CheckpointError, tmp_path, "model.layers.0.gate", "does not have")
