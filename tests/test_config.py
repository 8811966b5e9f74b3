"""ModelConfig and RopeConfig: what they refuse, what they fill in, and their JSON."""

import dataclasses
import json
import math

import pytest

from jaxllm.config import MAX_DIMENSION, MAX_EXPERTS, MAX_LAYERS, LayerUnits, ModelConfig, RopeConfig
from jaxllm.errors import ConfigError
from jaxllm.layer_configs import MixedLayers, StateConfig

SHAPE = {
    "model_type": "llama", "vocab_size": 11, "hidden_size": 8, "layers": 3, "heads": 4, "kv_heads": 2,
    "head_dim": 16, "ffn_size": 12, "window_tokens": 32,
}  # fmt: skip
LLAMA3 = {"dim": 16, "kind": "llama3", "factor": 8.0, "original_window_tokens": 64}
MOE = {"experts": 4, "experts_per_token": 2}
YARN = {"dim": 16, "kind": "yarn", "factor": 4.0, "original_window_tokens": 64}


ENCODER = {"norm": "layer", "activation": "relu"}


def model(**changes):
    return ModelConfig(**{**SHAPE, **changes})


def refused(make, *parts):
    with pytest.raises(ConfigError) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def test_defaults():
    cfg = model()
    assert cfg.attention_windows == (0, 0, 0)
    assert cfg.attention_scale == 0.25
    assert cfg.group == 2
    assert (cfg.activation, cfg.norm, cfg.gated_ffn, cfg.embed_scale) == ("silu", "rms", True, 1.0)
    assert cfg.rope is None
    assert cfg.layer_rope(0) is None
    assert model(attention_scale=0.5).attention_scale == 0.5
    assert RopeConfig(dim=4) == RopeConfig(
        dim=4, theta=10000.0, kind="default", factor=1.0, attention_factor=1.0
    )


def test_experts_fill_in_what_is_left_out():
    cfg = model(**MOE)
    assert (cfg.expert_ffn_size, cfg.normalize_expert_weights) == (12, True)
    assert cfg.sparse_layers == (True, True, True)
    assert all(map(cfg.is_sparse, range(3)))
    some = model(**MOE, expert_ffn_size=5, sparse_layers=(False, True, False))
    assert [some.is_sparse(layer) for layer in range(3)] == [False, True, False]
    assert some.expert_ffn_size == 5
    assert not any(map(model().is_sparse, range(3)))
    one = dataclasses.replace(cfg, layers=1, attention_windows=(), sparse_layers=())
    assert one.sparse_layers == (True,)


@pytest.mark.parametrize(
    "name", ["vocab_size", "hidden_size", "head_dim", "ffn_size", "window_tokens", "heads", "kv_heads"]
)
@pytest.mark.parametrize("value", [0, MAX_DIMENSION + 1, 2.0, True])
def test_sizes_are_whole_numbers_within_bounds(name, value):
    refused(lambda: model(**{name: value}), name, f"{value!r}", "whole number in [1, ")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        *(
            ({"layers": each}, ("layers", str(each), f"[1, {MAX_LAYERS}]"))
            for each in (0, MAX_LAYERS + 1, 2.0)
        ),
        ({"model_type": None}, ("model_type", "None")),
        ({"kv_heads": 3}, ("heads (4)", "kv_heads (3)")),
        ({"activation": "swish"}, ("'swish'", "gelu_tanh")),
        ({"norm": "batch"}, ("norm", "'batch'")),
        ({"norm_eps": 0.0}, ("norm_eps", "positive", "0.0")),
        ({"attention_scale": -1.0}, ("attention_scale", "-1.0")),
        ({"attention_softcap": -0.5}, ("attention_softcap", "-0.5")),
        ({"embed_scale": math.inf}, ("embed_scale", "inf")),
        ({"attention_windows": (0, 1)}, ("attention_windows", "3 entries", "(0, 1)")),
        ({"attention_windows": (0, 1, -1)}, ("attention_windows", "-1")),
        ({"experts": MAX_EXPERTS + 1, "experts_per_token": 1}, ("experts", str(MAX_EXPERTS))),
        ({"experts": 4, "experts_per_token": 5}, ("experts_per_token", "[1, 4]", "5")),
        ({**MOE, "gated_ffn": False}, ("experts", "gated_ffn")),
        ({**MOE, "normalize_expert_weights": 1}, ("normalize_expert_weights", "1")),
        ({**MOE, "sparse_layers": (True, 1, 0)}, ("sparse_layers", "(True, 1, 0)")),
        ({**MOE, "sparse_layers": (False,) * 3}, ("sparse_layers", "no layer")),
        ({"experts_per_token": 2}, ("experts_per_token", "no experts")),
        ({"normalize_expert_weights": False}, ("normalize_expert_weights", "without experts")),
        ({"rope": RopeConfig(dim=18)}, ("rope dim", "16", "18")),
        ({"encoder": model(tied_head=True, vocab_size=12)}, ("the same vocab_size", "12 and 11")),
        ({"encoder": model()}, ("neither an encoder nor a head",)),
        ({"encoder": model(tied_head=True), "qk_norm": True}, ("norms of queries",)),
        ({"encoder": model(tied_head=True), "rope": RopeConfig(dim=4)}, ("no rotary embedding",)),
        ({"relative_buckets": 6, "relative_distance": 9}, ("multiple of 4", "6 and 9")),
        ({"sinusoidal_positions": True, "hidden_size": 6}, ("multiple of 4", "6")),
        ({**MOE, "expert_capacity": 2}, ("set gated_ffn to False",)),
    ],
)
def test_model_refusals(changes, parts):
    refused(lambda: model(**changes), *parts)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"dim": 0}, ("rope dim", "0")),
        ({"dim": 7}, ("rope dim", "even", "7")),
        ({"dim": 4, "theta": 0.0}, ("theta", "positive")),
        ({"dim": 4, "factor": 0.5}, ("factor", "0.5")),
        ({"dim": 4, "kind": "dynamic"}, ("'dynamic'", "yarn")),
        ({"dim": 4, "attention_factor": math.nan}, ("attention_factor", "nan")),
        ({**LLAMA3, "original_window_tokens": 0}, ("original window", "0")),
        ({**LLAMA3, "low_freq_factor": 4.0}, ("high_freq_factor", "4.0")),
        ({**YARN, "beta_fast": 0.0}, ("beta_fast", "0.0")),
        ({**YARN, "theta": 1.0}, ("theta", "above 1")),
    ],
)
def test_rope_refusals(fields, parts):
    refused(lambda: RopeConfig(**fields), *parts)


CONFIGS = {
    "defaults": model(),
    "all": model(
        activation="gelu_tanh", gated_ffn=False, norm="layer", norm_eps=1e-6, rope=RopeConfig(**LLAMA3),
        local_rope=RopeConfig(**YARN, beta_fast=8.0, truncate=False), learned_positions=True,
        attention_windows=(4, 0, 7), attention_scale=0.3, attention_softcap=50.0, logit_softcap=30.0,
        embed_scale=2.5, qkv_bias=True, o_bias=True, ffn_bias=True, qk_norm=True, post_norms=True,
        tied_head=True,
    ),
    "experts": model(
        **MOE, expert_ffn_size=20, normalize_expert_weights=False, sparse_layers=(True, False, True),
        layer_units=(LayerUnits(kv_heads=1, neurons=8),) * 3,
    ),
    "shared expert": model(**MOE, shared_expert_size=12, rope_layers=(True, False, True), logit_scale=0.25),
    "experts with biases": model(**MOE, expert_bias=True, activation="clamped_swiglu", sink_logits=True),
    "parallel": model(parallel_blocks=True, head_bias=True),
    "norms behind": model(pre_norms=False, post_norms=True),
    "joint norms": model(qk_norm=True, joint_qk_norm=True, qkv_clip=8.0),
    "states": model(
        states=StateConfig(
            kind="delta_rule", taps=3, key_heads=1, value_heads=2, key_dim=4, value_dim=8
        ),
        state_layers=(True, False, True), attention_gate=True,
    ),
    "mixed": model(
        qk_norm=True, post_norms=True, attention_windows=(4, 0, 0), local_rope=RopeConfig(dim=4),
        rope=RopeConfig(dim=12, kind="proportional", rotated_dim=6),
        mixed=MixedLayers(
            full_head_dim=12, full_kv_heads=1, keys_as_values=True, shared_kv_layers=1, shared_ffn_size=6,
            layer_input_size=4,
        ),
    ),
    "encoder-decoder": model(
        encoder=model(
            **ENCODER, layers=2, tied_head=True, embed_norm=True, norm_after=True, final_norm=False,
            sinusoidal_positions=True,
        ),
        **ENCODER, head_bias=True, logit_scale=0.5, relative_buckets=8, relative_distance=9,
        embed_norm=True, norm_after=True, final_norm=False, sinusoidal_positions=True, **MOE, gated_ffn=False,
        expert_capacity=3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_json_round_trip(name):
    cfg = CONFIGS[name]
    data = json.loads(json.dumps(cfg.to_json()))
    again = ModelConfig.from_json(data)
    # The data stays as it is.
    assert data == json.loads(json.dumps(cfg.to_json()))
    assert again == cfg
    assert hash(again) == hash(cfg)
    assert type(again.attention_windows) is type(again.sparse_layers) is type(again.rope_layers) is tuple


def test_all_fields_differ_from_the_defaults_in_the_round_trip():
    """So that a field which is lost on the way is seen."""
    plain, *others = CONFIGS.values()
    names = [field.name for field in dataclasses.fields(plain)]
    same = [name for name in names if all(getattr(plain, name) == getattr(cfg, name) for cfg in others)]
    assert same == list(SHAPE)


def test_state_layers():
    conv = StateConfig(kind="short_conv", taps=3)
    marked = {"state_layers": (True, False, True)}
    assert [model(states=conv, **marked).is_state(layer) for layer in range(3)] == [True, False, True]
    refused(lambda: model(**marked), "states is not set")
    refused(lambda: model(states=conv, state_layers=(True,) * 3), "one kind is missing")
    refused(lambda: model(states=conv, **marked, parallel_blocks=True), "one block after another")
    refused(
        lambda: model(states=conv, **marked, layer_units=[LayerUnits(kv_heads=1, neurons=8)] * 3),
        "sub-models",
    )
    refused(lambda: StateConfig(kind="short_conv", taps=3, key_dim=4), "key_dim of state layers")
    sizes = {"key_heads": 2, "value_heads": 3, "key_dim": 4, "value_dim": 4}
    refused(lambda: StateConfig(kind="delta_rule", taps=3, **sizes), "multiple of key heads")


@pytest.mark.parametrize(
    ("field", "value"), [("norm_after", True), ("relative_buckets", 8), ("final_norm", False)]
)
def test_a_stored_decoder_has_no_fields_of_encoder_decoders(field, value):
    data = {**model().to_json(), field: value, "relative_distance": 9}
    refused(lambda: ModelConfig.from_json(data), "the model has no encoder")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"hidden": 8}, "hidden"),
        ({"rope": {"dims": 4}}, "dims"),
        ({"attention_windows": 3}, "malformed model config"),
        ({**MOE, "sparse_layers": ["yes", "no", "no"]}, "sparse_layers"),
    ],
)
def test_malformed_json_is_a_config_error(change, part):
    refused(lambda: ModelConfig.from_json({**model().to_json(), **change}), part)
