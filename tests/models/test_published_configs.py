"""Configs as their authors publish them, with keys that the family's class does not read."""

import importlib.util
from pathlib import Path

import pytest

from jaxllm.models.architectures import ARCHITECTURES
from tests.models.test_translation import translate


def test_smollm3_as_published():
    layers = {"no_rope_layers": [1, 1, 1, 0] * 9, "layer_types": ["full_attention"] * 36}
    config = {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "attention_bias": False, **layers,
        "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128012, "pad_token_id": 128004,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 11008,
        "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False, "rope_scaling": None,
        "no_rope_layer_interval": 4, "num_attention_heads": 16, "num_hidden_layers": 36,
        "num_key_value_heads": 4, "pretraining_tp": 2, "rms_norm_eps": 1e-6, "rope_theta": 5000000.0,
        "sliding_window": None, "torch_dtype": "bfloat16", "transformers_version": "4.54.0",
        "use_cache": False, "use_sliding_window": False, "vocab_size": 128256,
    }  # fmt: skip
    cfg = translate(config)
    assert (cfg.layers, cfg.rope.theta, cfg.rope_layers[:4]) == (36, 5e6, (True, True, True, False))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_no_family_reads_keys_of_another_time(model_type):
    """They are ignored, as by the family's own class."""
    pytest.importorskip("transformers")
    modules = importlib.util.find_spec(f"transformers.models.{model_type.removesuffix('_text')}")
    sources = [path.read_text() for path in Path(modules.origin).parent.glob("modeling_*.py")]
    assert sources
    assert not any("pretraining_tp" in source for source in sources)
