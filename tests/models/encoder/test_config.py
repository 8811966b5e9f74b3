"""EncoderConfig: what it refuses, and its JSON."""

import dataclasses
import json
import math

import pytest

from jaxllm.config import MAX_DIMENSION, MAX_LAYERS
from jaxllm.errors import ConfigError
from jaxllm.models.encoder.config import MAX_FFN_BLOCKS, EncoderConfig
from tests.models.encoder.tiny import CONFIGS, MOBILE


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)
def test_json(cfg):
    assert EncoderConfig.from_json(json.loads(json.dumps(cfg.to_json()))) == cfg


@pytest.mark.parametrize("name", ["surprise", "vocab_size"])
def test_malformed_json(name):
    with pytest.raises(ConfigError, match=name):
        EncoderConfig.from_json({**MOBILE.to_json(), name: None})


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("model_type", ["bert", None, "x" * 1000]),
        ("vocab_size", [0, -1, MAX_DIMENSION + 1, True, 2.0, "2", 10**100]),
        ("embedding_size", [0, MAX_DIMENSION + 1]),
        ("hidden_size", [0, MAX_DIMENSION + 1]),
        ("window_tokens", [0, MAX_DIMENSION + 1]),
        ("ffn_size", [0, MAX_DIMENSION + 1]),
        ("type_vocab_size", [0, MAX_DIMENSION + 1]),
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
