"""The encoder: its config and folders, what is refused of them, and its laws."""

import dataclasses
import functools
import json
import math

import chex
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.checkpoints.encoder_folders import config_from_hf, read_encoder
from jaxllm.config import MAX_DIMENSION, MAX_LAYERS
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.encoder.config import MAX_FFN_BLOCKS, EncoderConfig
from jaxllm.models.encoder.mobilebert import embed_tokens, encode_layers
from tests.models.encoder.tiny import CONFIGS, MOBILE, encode, front_mask, params_of, tokens_of, write_encoder
from tests.quick_jit import jit

COUNT = 7
TOKENS = tokens_of(MOBILE, 3, COUNT)


@pytest.fixture(params=CONFIGS)
def cfg(request):
    return CONFIGS[request.param]


def test_padding_changes_nothing(cfg):
    """Neither its ids nor its number; also where all is padding."""
    mask, run = front_mask([0, 3, 5], COUNT), jit(functools.partial(encode, cfg=cfg))
    others = np.where(mask, TOKENS, (TOKENS + 5) % MOBILE.vocab_size)
    first, second = (np.asarray(run(params_of(cfg), each, mask)) for each in (TOKENS, others))
    np.testing.assert_array_equal(first[mask], second[mask])
    chex.assert_tree_all_finite(first)
    # The last row is whole here.
    shorter = run(params_of(cfg), TOKENS[:, :5], mask[:, :5])
    np.testing.assert_allclose(first[mask], shorter[mask[:, :5]], atol=2e-5, rtol=1e-5)


def test_the_first_tokens_alone(cfg):
    """What is computed for them is what they have among all."""
    params, mask = params_of(cfg), front_mask([COUNT, 3, 1], COUNT)

    @jit
    def both(params):
        hidden = embed_tokens(params, TOKENS, mask, cfg=cfg)
        some = functools.partial(encode_layers, params, hidden, mask, cfg=cfg, layers=range(cfg.layers))
        return some(), some(first=1), encode_layers(params, hidden, mask, cfg=cfg, layers=range(0), first=2)

    whole, first, untouched = both(params)
    chex.assert_shape([whole, first, untouched], [(3, count, cfg.hidden_size) for count in (COUNT, 1, 2)])
    np.testing.assert_allclose(first, whole[:, :1], atol=1e-4)


def test_too_many_tokens_and_other_shapes():
    tokens = tokens_of(MOBILE, 2, MOBILE.window_tokens + 1)
    with pytest.raises(ConfigError, match="12 tokens do not fit the encoder's window of 11"):
        encode(params_of(MOBILE), tokens, np.ones(tokens.shape, bool), cfg=MOBILE)
    with pytest.raises(ConfigError, match=r"takes mask as \[B, T\] bool"):
        encode(params_of(MOBILE), tokens[:, :4], front_mask([3, 2], 3), cfg=MOBILE)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("model_type", ["bert", None, "x" * 1000]),
        ("vocab_size", [0, -1, MAX_DIMENSION + 1, True, 2.0, "2", 10**100]),
        ("heads", [0, 3, MAX_DIMENSION + 1]),
        ("layers", [0, MAX_LAYERS + 1]),
        # Of one that is not there the flags are refused.
        ("bottleneck_size", [-2, MAX_DIMENSION + 1, 0]),
        ("ffn_blocks", [0, MAX_FFN_BLOCKS + 1]),
        ("trigram_input", [1, None]),
        ("share_bottleneck", [1, False]),
        ("bottleneck_attention", ["yes", True]),
        ("norm", ["rms", None]),
        ("activation", ["tanh", None]),
        ("norm_eps", [0, -1e-5, 2, math.nan, math.inf, True, "1"]),
    ],
)
def test_refused(field, values):
    for value in values:
        with pytest.raises(ConfigError) as caught:
            dataclasses.replace(MOBILE, **{field: value})
        message = str(caught.value)
        assert field in message
        assert len(message) < 300
        assert "\n" not in message


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
        ({"key_query_shared_bottleneck": False}, ["share_bottleneck or bottleneck_attention"]),
        ({"quantization_config": {"bits": 4}}, ["'quantization_config'"]),
    ],
)
def test_config_that_is_refused(folder, changes, parts):
    change_config(folder, **changes)
    refused(ConfigError, folder, *parts)


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
