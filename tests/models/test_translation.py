"""config.json of every architecture: defaults, both spellings of the rotary keys, unknown keys, refusals."""

import copy
import json
import operator

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.models.architectures import ARCHITECTURES, architecture
from jaxllm.models.parameters import parameter_count
from jaxllm.nn.layers import inverse_frequencies


def translate(config, **how):
    return architecture(config["model_type"]).config_from_hf(config, **how)


def refused(config, *parts, **how):
    with pytest.raises(ConfigError) as caught:
        translate(config, **how)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def llama(**keys):
    return {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, **keys}


# What a config has to say besides its model_type: without it the model has layers that are not implemented.
_NEEDED = {
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["attention"] * 2, "num_local_experts": 0}
}


def least(model_type):
    return {"model_type": model_type, **_NEEDED.get(model_type, {})}


def test_unknown_model_type_lists_what_is_supported():
    with pytest.raises(ConfigError, match=r"'bert' is not supported.*llama.*qwen3"):
        architecture("bert")
    with pytest.raises(ConfigError, match="None is not supported"):
        architecture(None)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_empty_config_is_the_class_default(model_type):
    """What a config leaves out is what transformers' class says."""
    transformers = pytest.importorskip("transformers")
    config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    spelled_out = json.loads(json.dumps(config_class(**_NEEDED.get(model_type, {})).to_dict()))
    assert translate(least(model_type)) == translate(spelled_out)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_unknown_key_is_refused_and_can_be_ignored(model_type):
    config = {**least(model_type), "score_multiplier": 0.22}
    refused(config, "'score_multiplier'", "0.22", "--ignore-config-key score_multiplier")
    assert translate(config, ignore_keys=["score_multiplier"]) == translate(least(model_type))


def test_unknown_keys_that_are_off_or_in_a_section_and_inert_ones():
    assert translate(llama(new_thing=None, other_thing=False)) == translate(llama())
    # Zero is a number that may mean something.
    refused(llama(new_scale=0), "'new_scale'")
    scaling = {"rope_type": "linear", "factor": 2.0, "shift": 3}
    refused(llama(rope_scaling=scaling), "'rope_scaling.shift'", "3")
    assert translate(llama(rope_scaling=scaling), ignore_keys=["rope_scaling.shift"]).rope.factor == 2.0
    refused(llama(), "'hidden_size'", "in use", ignore_keys=["hidden_size"])
    inert = {
        "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "initializer_range": 0.5, "use_cache": True,
        "attention_dropout": 0.3, "torch_dtype": "bfloat16", "dtype": "bfloat16", "auto_map": {"x": "y.py"},
        "pretraining_tp": 2, "activation": "swiglu", "_model_name_or_path": "x",
        "pruned_heads": {}, "is_llama_config": True, "rope_interleaved": False,
        "transformers.js_config": {"dtype": "q4"}, "transformers_version": "4.30.0", "id2label": {"0": "a"},
    }  # fmt: skip
    assert translate(llama(**inert)) == translate(llama())


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (llama(quantization_config={"bits": 4}), ["'quantization_config'", "float weights"]),
        (llama(rope_interleaved=True), ["'rope_interleaved'", "unknown"]),
        (llama(hidden_act="mish"), ["'hidden_act'", "'mish'"]),
        (llama(head_dim=None, num_attention_heads=5), ["64", "5 heads"]),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, ["inverse_layer_idx' is True"]),
        ({"model_type": "opt", "do_layer_norm_before": False}, ["'do_layer_norm_before'", "opt-350m"]),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, ["'use_bidirectional_attention'"]),
        ({"model_type": "stablelm", "use_parallel_residual": True}, ["'use_parallel_residual'", "12B"]),
        ({"model_type": "phi", "qk_layernorm": True}, ["'qk_layernorm'", "not implemented"]),
        ({"model_type": "granite", "residual_multiplier": 0.0}, ["'residual_multiplier'", "0.0"]),
        (
            {"model_type": "granitemoehybrid", "num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
            ["'layer_types'", "Mamba", "not implemented"],
        ),
        (
            {"model_type": "granitemoehybrid", "num_hidden_layers": 1, "layer_types": ["attention"]},
            ["'num_local_experts'", "experts"],
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, ["'no_rope_layers'", "36 times"]),
        ({"model_type": "exaone4", "sliding_window_pattern": "LX"}, ["'sliding_window_pattern'", "'LX'"]),
        ({"model_type": "gemma2", "sliding_window": None}, ["sliding layers", "None"]),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, ["'longrope'"]),
        ({"model_type": "phi3", "rope_scaling": {"type": "yarn", "factor": 2.0}}, ["'yarn'", "phi3"]),
        (llama(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), ["'dynamic'", "llama3, yarn"]),
        (llama(rope_scaling={"rope_type": "linear"}), ["'linear'", "'factor'"]),
        (
            llama(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_theta": 5.0}),
            ["both 'rope_parameters' and 'rope_scaling'"],
        ),
        ({"model_type": "mixtral", "num_local_experts": 0}, ["0 experts", "dense"]),
        ({"model_type": "qwen3_moe", "num_experts": 4, "num_local_experts": 8}, ["(8)", "(4)", "one number"]),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, ["'decoder_sparse_step'", "0"]),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [True]}, ["'mlp_only_layers'", "[True]"]),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, ["'layer_types'", "1 entries", "32"]),
        (
            {"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["chunked_attention"]},
            ["'layer_types'", "chunked_attention"],
        ),
    ],
)  # fmt: skip
def test_unsupported_values_are_named(config, parts):
    refused(config, *parts)


HOSTILE = [
    None, True, False, 0, -1, 1, 7, 10**9, 10**400, -(10**5000), 0.5, -2.5, float("nan"), "x", [], {}, [1],
    {"a": 1}, {"rope_type": "yarn"}, {"rope_type": "linear", "factor": -1}, {"rope_type": []},
    {"full_attention": 3}, ["full_attention"], {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0},
    {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1.0},
    {"rope_type": "llama3", "factor": 0, "low_freq_factor": 0, "high_freq_factor": 0},
    {"rope_type": "yarn", "factor": 2.0, "mscale": 1e308, "mscale_all_dim": -1e308},
]  # fmt: skip


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_hostile_values_give_a_config_or_a_config_error(model_type):
    family = ARCHITECTURES[model_type]
    keys = {*family.config_to_hf(translate(least(model_type))), "rope_parameters", "rope_scaling"}
    for key in sorted(keys - {"model_type"}):
        for value in HOSTILE:
            try:
                cfg = family.config_from_hf({**least(model_type), key: value})
            except ConfigError as error:
                message = str(error)
                shown = "\n" not in message and len(message) < 600
                assert shown, message
                continue
            for rope in (cfg.rope, cfg.local_rope):
                assert rope is None or np.isfinite(inverse_frequencies(rope)[0]).all()


def test_yarn_defaults():
    yarn = {"rope_type": "yarn", "factor": 4.0}
    rope = translate(llama(max_position_embeddings=2048, rope_scaling=yarn)).rope
    # Its paper: 0.1 ln 4 + 1.
    assert rope.attention_factor == pytest.approx(1.1386294)
    assert (rope.beta_fast, rope.beta_slow, rope.original_window_tokens) == (32.0, 1.0, 2048)
    beside = translate(llama(original_max_position_embeddings=512, rope_scaling=yarn)).rope
    assert beside.original_window_tokens == 512
    given = translate(llama(rope_scaling={**yarn, "attention_factor": 0.5})).rope
    assert given.attention_factor == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["llama-yarn-mscale", "phi3-partial", "gemma3-linear-rope"])
def test_old_spelling_of_what_transformers_writes(variant, tmp_path):
    """transformers 5 writes `rope_parameters`; the keys that version 4 wrote give the same model."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests import tiny_hf

    new = json.loads((tiny_hf.save(variant, tmp_path) / "config.json").read_text())
    old = copy.deepcopy(new)
    parameters = old.pop("rope_parameters")
    if variant.startswith("gemma3"):
        old["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = parameters["full_attention"]
    old["rope_theta"] = parameters.pop("rope_theta")
    if "partial_rotary_factor" in parameters:
        old["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
    old["rope_scaling"] = parameters
    old["torch_dtype"] = old.pop("dtype")
    assert translate(old) == translate(new)


def test_layers_without_rotary_embedding():
    cfg = translate({"model_type": "smollm3", "num_hidden_layers": 5})
    assert [cfg.layer_rope(layer) is None for layer in range(5)] == [False, False, False, True, False]
    keys = {"model_type": "exaone4", "num_hidden_layers": 4, "sliding_window": 9}
    cfg = translate({**keys, "sliding_window_pattern": "LLG"})
    assert cfg.attention_windows == (9, 9, 0, 0)
    assert [cfg.layer_rope(layer) is None for layer in range(4)] == [False, False, True, True]
    assert translate({**keys, "sliding_window": None}).rope_layers == ()


_WINDOWS = {"model_type": "qwen2", "num_hidden_layers": 3, "sliding_window": 7, "max_window_layers": 1}
_EXPERTS = {"model_type": "qwen3_moe", "num_hidden_layers": 6, "num_experts": 4, "num_experts_per_tok": 1}
_HALVES = {"model_type": "stablelm", "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (_WINDOWS, {"attention_windows": (0, 0, 0)}),
        ({**_WINDOWS, "use_sliding_window": True}, {"attention_windows": (0, 7, 7)}),
        (
            {**_EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [1, 4]},
            {
                "sparse_layers": (False, False, False, True, False, True), "ffn_size": 6144,
                "expert_ffn_size": 768, "normalize_expert_weights": False,
            },
        ),
        # The approximation by tanh.
        ({"model_type": "gemma", "hidden_act": "gelu"}, {"activation": "gelu_tanh"}),
        # A quarter of each head turns.
        ({**_HALVES, "partial_rotary_factor": 0.5}, {"rope.dim": 16}),
        (
            {"model_type": "granite", "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
            {"embed_scale": 6.0, "norm_eps": 4e-6, "logit_scale": 1.0},
        ),
        (
            {"model_type": "ministral3"},
            {"rope.kind": "yarn", "rope.query_growth": 0.1, "rope.original_window_tokens": 16384},
        ),
        # Where a fraction could be, a whole number is fine.
        (llama(rope_theta=10000), {"rope.theta": 10000.0}),
    ],
)  # fmt: skip
def test_what_keys_mean(config, fields):
    cfg = translate(config)
    assert {name: operator.attrgetter(name)(cfg) for name in fields} == fields


# Configs as their authors publish them, with keys that the family's class does not read

_PUBLISHED = {
    "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "max_window_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_scaling": None,
    "sliding_window": None, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
# Qwen3-Coder-30B-A3B-Instruct.
QWEN3_CODER = {
    **_PUBLISHED, "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "eos_token_id": 151645,
    "head_dim": 128, "intermediate_size": 5472, "max_position_embeddings": 262144, "mlp_only_layers": [],
    "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "output_router_logits": False, "qkv_bias": False, "rope_theta": 10000000, "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 0, "tie_word_embeddings": False, "transformers_version": "4.52.3",
    "use_qk_norm": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


def test_published_configs():
    assert round(parameter_count(translate(QWEN3_CODER)) / 1e9, 1) == 30.5
    refused({**QWEN3_CODER, "use_qk_norm": False}, "use_qk_norm")
