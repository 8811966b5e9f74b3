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
        ("marian", "model.encoder.embed_positions.weight", None),
    ],
)
def test_copies_and_computed_positions_are_compared(tmp_path, variant, copy, own):
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
