"""MobileBERT folders: what is read, what is refused, and how it is said."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.checkpoints.encoder_folders import config_from_hf, read_encoder
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.encoder.config import EncoderConfig
from tests.models.encoder.tiny import CONFIGS, MOBILE, params_of, write_encoder

# As google/mobilebert-uncased says it.
ON_THE_HUB = {
    "attention_probs_dropout_prob": 0.1, "classifier_activation": False, "embedding_size": 128,
    "hidden_act": "relu", "hidden_dropout_prob": 0.0, "hidden_size": 512, "initializer_range": 0.02,
    "intermediate_size": 512, "intra_bottleneck_size": 128, "key_query_shared_bottleneck": True,
    "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "mobilebert",
    "normalization_type": "no_norm", "num_attention_heads": 4, "num_feedforward_networks": 4,
    "num_hidden_layers": 24, "pad_token_id": 0, "trigram_input": True, "true_hidden_size": 128,
    "type_vocab_size": 2, "use_bottleneck": True, "use_bottleneck_attention": False, "vocab_size": 30522,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    write_encoder(tmp_path, MOBILE, params_of(MOBILE))
    return tmp_path


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(kind, folder, *parts):
    with pytest.raises(kind) as caught:
        read_encoder(folder)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


# What comes out


def test_config_on_the_hub():
    assert config_from_hf(ON_THE_HUB) == EncoderConfig(
        vocab_size=30522, embedding_size=128, hidden_size=512, layers=24, heads=4, ffn_size=512,
        window_tokens=512, bottleneck_size=128, share_bottleneck=True, ffn_blocks=4, trigram_input=True,
    )  # fmt: skip
    # Every key has its default.
    assert config_from_hf({"model_type": "mobilebert"}) == config_from_hf(ON_THE_HUB)


def test_names_by_hand(folder):
    stored, params = load_file(folder / "model.safetensors"), params_of(MOBILE)
    for ours, theirs in {
        "embed.tokens": "embeddings.word_embeddings.weight",
        "embed.projection_bias": "embeddings.embedding_transformation.bias",
        "embed.norm.scale": "embeddings.LayerNorm.weight",
        "layers.1.attn.narrow": "encoder.layer.1.bottleneck.attention.dense.weight",
        "layers.0.attn.k_bias": "encoder.layer.0.attention.self.key.bias",
        "layers.0.ffn.1.down": "encoder.layer.0.ffn.1.output.dense.weight",
        "layers.0.ffn.2.down": "encoder.layer.0.output.dense.weight",
        "layers.1.widen_norm.bias": "encoder.layer.1.output.bottleneck.LayerNorm.bias",
    }.items():
        np.testing.assert_array_equal(stored[theirs], params[ours])
    assert len(stored) == len(params)


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)
def test_round_trip(cfg, tmp_path):
    dtype = np.float16 if cfg == MOBILE else np.float32
    params = {name: jnp.asarray(value.astype(dtype)) for name, value in params_of(cfg).items()}
    write_encoder(tmp_path / "new", cfg, params)
    again_cfg, again = read_encoder(tmp_path / "new")
    assert again_cfg == cfg
    assert list(again) == list(params)
    for name, value in params.items():
        assert again[name].dtype == dtype
        np.testing.assert_array_equal(again[name], value)


@pytest.mark.parametrize("prefix", ["mobilebert.", ""])
def test_prefix_and_heads(folder, prefix):
    path = folder / "model.safetensors"
    more = {
        f"{prefix}pooler.dense.weight": np.zeros((16, 16), np.float32),
        f"{prefix}embeddings.position_ids": np.arange(11)[None],
        "cls.predictions.bias": np.zeros(23, np.float32),
        "classifier.weight": np.zeros((2, 16), np.float32),
    }
    save_file({prefix + name: value for name, value in load_file(path).items()} | more, path)
    _, params = read_encoder(folder)
    np.testing.assert_array_equal(params["layers.1.widen"], params_of(MOBILE)["layers.1.widen"])


# What is refused


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"surprise": 1}, ["'surprise'", "--ignore-config-key surprise"]),
        ({"true_hidden_size": 12}, ["'true_hidden_size' is 12"]),
        ({"hidden_act": "tanh"}, ["'hidden_act' is 'tanh'"]),
        ({"layer_norm_eps": -1}, ["norm_eps must be"]),
        ({"key_query_shared_bottleneck": False}, ["share_bottleneck or bottleneck_attention"]),
        ({"position_embedding_type": "relative_key"}, ["'position_embedding_type'"]),
        ({"quantization_config": {"bits": 4}}, ["'quantization_config'"]),
    ],
)
def test_config_that_is_refused(folder, changes, parts):
    change_config(folder, **changes)
    refused(ConfigError, folder, *parts)


def test_configs_of_other_weights(folder):
    for number, parts in ((2, ["holds", "ffn.1"]), (4, ["lacks", "ffn.2"])):
        change_config(folder, num_feedforward_networks=number)
        refused(CheckpointError, folder, *parts)


def test_tensors_that_are_refused(folder):
    name = "encoder.layer.1.attention.self.value.weight"
    whole = load_file(folder / "model.safetensors")
    for change, parts in (
        ({name: None}, ["lacks", name]),
        ({name: whole[name].T.copy()}, [name, "[16, 8]", "[8, 16]"]),
        ({"extra": whole[name]}, ["holds extra"]),
        (dict.fromkeys(whole), ["lacks mobilebert.embeddings.LayerNorm.bias", "more"]),
    ):
        stored = {each: value for each, value in {**whole, **change}.items() if value is not None}
        save_file(stored, folder / "model.safetensors")
        refused(CheckpointError, folder, *parts)
    (folder / "model.safetensors").unlink()
    refused(CheckpointError, folder, "neither model.safetensors nor")
    (folder / "config.json").unlink()
    refused(CheckpointError, folder, "config.json is missing")
