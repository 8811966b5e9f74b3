"""Gemma 4, text only: heads of two sizes, layers that share keys and values, normalized values, and per-layer
inputs of each token, or experts in addition to feed-forward blocks."""

from typing import Any

from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.errors import ConfigError
from jaxllm.layer_configs import MixedLayers, shares_kv
from jaxllm.models.architectures.gemma import GEMMA_INERT_KEYS, GEMMA_NORMS, gemma_keys
from jaxllm.models.architectures.llama import LLAMA_ATTENTION, LLAMA_FFN, LLAMA_TOP
from jaxllm.models.config_parts import (
    FULL,
    SLIDING,
    Fields,
    Part,
    fixed,
    keys,
    only,
    read_rope_section,
    read_windows,
    refuse_partial,
    write_windows,
)
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, Tensor, tensors

_PROPORTIONAL = "proportional"


def _read_sizes(reader: ConfigReader, windows: tuple[int, ...], kv_heads: int) -> tuple[int, int]:
    """Head size and kv heads of layers without a window: under keys of their own, or by layer."""
    keys_as_values = reader.flag("attention_k_eq_v", False)
    head_dim = reader.integer("global_head_dim", 512)
    # Transformers only reads them there.
    other = reader.optional_integer("num_global_key_value_heads")
    sizes = {(head_dim, (other if keys_as_values else None) or kv_heads)}
    section = reader.section("per_layer_config")
    if section is None:
        return sizes.pop()
    full = {str(layer) for layer, window in enumerate(windows) if not window}
    keys = section.keys()
    # transformers writes all numbers of layers as long as the longest: 05.
    if {key.lstrip("0") or "0" if key.isdecimal() else key for key in keys} not in (full, {FULL}):
        raise ConfigError(
            f"config key 'per_layer_config' is about the layers {', '.join(keys)[:80]}; jaxllm reads "
            f"sizes of all layers of the type {FULL}, and of no other"
        )
    found = set[tuple[int, int]]()
    for key in keys:
        of = section.section(key) or ConfigReader({})
        found.add((of.integer("head_dim", head_dim), of.integer("num_key_value_heads", kv_heads)))
    if len(found) != 1:
        raise ConfigError(f"config key 'per_layer_config' has layers of different sizes: {sorted(found)}")
    return found.pop()


def _read_experts(reader: ConfigReader) -> dict[str, Any]:
    """Expert fields; none if layers have none."""
    keys = ("num_experts", "top_k_experts", "moe_intermediate_size")
    sizes = [reader.optional_integer(key) for key in keys]
    if not reader.flag("enable_moe_block", False):
        return {}
    if None in sizes or min(each or 0 for each in sizes) < 1:
        raise ConfigError(
            f"config key 'enable_moe_block' is true, so {', '.join(keys)} must be positive; fix them"
        )
    return dict(zip(("experts", "experts_per_token", "expert_ffn_size"), sizes, strict=True))


def _read_ropes(reader: ConfigReader, fields: Fields, full_head_dim: int) -> Fields:
    """The rotary embeddings of full and of sliding layers."""
    nested = reader.section("rope_parameters") or ConfigReader({})
    full, sliding = (nested.section(kind) or ConfigReader({}) for kind in (FULL, SLIDING))
    local = read_rope_section(sliding, fields, theta=1e4)
    refuse_partial(local, fields["head_dim"])
    if full.text("rope_type", _PROPORTIONAL) != _PROPORTIONAL:
        rope = read_rope_section(full, {**fields, "head_dim": full_head_dim}, theta=1e6)
        refuse_partial(rope, full_head_dim)
        return {"rope": rope, "local_rope": local}
    share = full.number("partial_rotary_factor", 1.0 if full.keys() else 0.25)
    rope = RopeConfig(
        dim=full_head_dim,
        kind=_PROPORTIONAL,
        theta=full.number("rope_theta", 1e6),
        factor=full.number("factor", 1.0),
        rotated_dim=2 * int(share * full_head_dim // 2),
    )
    return {"rope": rope, "local_rope": local}


def _read_layers(reader: ConfigReader, fields: Fields) -> Fields:
    layers, size = fields["layers"], reader.integer("hidden_size_per_layer_input", 256)
    rows = reader.integer("vocab_size_per_layer_input", 262144)
    if size and rows != fields["vocab_size"]:
        raise ConfigError(
            f"config key 'vocab_size_per_layer_input' is {rows}; jaxllm supports only the vocab_size, "
            f"{fields['vocab_size']}"
        )
    slides = [(layer + 1) % 6 > 0 and layer + 1 < layers for layer in range(max(layers, 0))]
    windows = read_windows(reader, reader.optional_integer("sliding_window", 512), slides)
    if windows and windows[-1]:
        raise ConfigError(
            f"config key 'layer_types' ends with {SLIDING}, which transformers reads as {FULL}; name it so"
        )
    full_head_dim, full_kv_heads = _read_sizes(reader, windows, fields["kv_heads"])
    shared, wide = reader.integer("num_kv_shared_layers", 0), reader.flag("use_double_wide_mlp", False)
    return {
        **_read_ropes(reader, fields, full_head_dim),
        **_read_experts(reader),
        "attention_windows": windows,
        "embed_scale": fields["hidden_size"] ** 0.5,
        "mixed": MixedLayers(
            full_head_dim=full_head_dim,
            full_kv_heads=full_kv_heads,
            keys_as_values=reader.flag("attention_k_eq_v", False),
            shared_kv_layers=shared,
            shared_ffn_size=fields["ffn_size"] * (1 + wide) if shared else 0,
            layer_input_size=size,
        ),
    }


def _write_layers(cfg: ModelConfig) -> dict[str, Any]:
    mixed, rope, local = cfg.mixed, cfg.rope, cfg.local_rope
    assert mixed is not None
    assert rope is not None
    assert local is not None
    full: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind == _PROPORTIONAL:
        full |= {"partial_rotary_factor": rope.rotated_dim / rope.dim, "factor": rope.factor}
    return {
        **write_windows(cfg),
        "global_head_dim": mixed.full_head_dim,
        "num_global_key_value_heads": mixed.full_kv_heads if mixed.keys_as_values else None,
        "attention_k_eq_v": mixed.keys_as_values,
        "num_kv_shared_layers": mixed.shared_kv_layers,
        "use_double_wide_mlp": mixed.shared_ffn_size > cfg.ffn_size,
        "hidden_size_per_layer_input": mixed.layer_input_size,
        "vocab_size_per_layer_input": cfg.vocab_size,
        "sliding_window": max(cfg.attention_windows) or 512,
        "enable_moe_block": cfg.experts > 0,
        "num_experts": cfg.experts or None,
        "top_k_experts": cfg.experts_per_token or None,
        "moe_intermediate_size": cfg.expert_ffn_size or None,
        "rope_parameters": {
            FULL: full,
            SLIDING: {"rope_type": "default", "rope_theta": local.theta},
        },
    }


def _unread(cfg: ModelConfig) -> set[str]:
    """Keys and values in checkpoints of layers that share those of others."""
    parts = ("k_proj", "v_proj", "k_norm", "v_norm")
    shared = [layer for layer in range(cfg.layers) if shares_kv(cfg, layer)]
    return {f"layers.{layer}.self_attn.{part}.weight" for layer in shared for part in parts}


GEMMA4_TEXT = Architecture(
    model_type="gemma4_text",
    class_name="Gemma4ForCausalLM",
    parts=(
        only(
            "use_bidirectional_attention", (None, "vision"),
            "texts are read from left to right, each by itself",
        ),
        only("attention_bias", (None, False), "products of attention have no biases"),
        gemma_keys(vocab_size=262144, num_hidden_layers=30),
        keys(final_logit_softcapping=(None, "logit_softcap")),
        Part(_read_layers, _write_layers),
        fixed(attention_scale=1.0, qk_norm=True, post_norms=True),
    ),
    top_tensors=(
        *LLAMA_TOP,
        *tensors(
            {
                "embed_tokens_per_layer": "embed.layer_inputs",
                "per_layer_model_projection": "embed.input_projection",
                "per_layer_projection_norm": "embed.input_norm",
            }
        ),
    ),
    layer_tensors=(
        *tensors(GEMMA_NORMS),
        *LLAMA_ATTENTION,
        *LLAMA_FFN,
        *tensors(
            {
                "per_layer_input_gate": "layer_input.gate",
                "per_layer_projection": "layer_input.o",
                "post_per_layer_input_norm": "layer_input_norm",
                "router.proj": "router",
                "pre_feedforward_layernorm_2": "experts_norm",
                "post_feedforward_layernorm_1": "dense_post_norm",
                "post_feedforward_layernorm_2": "experts_post_norm",
            }
        ),
        Tensor("layer_scalar", ("output.scale",)),
        Tensor("router.scale", ("router_norm.scale",)),
        Tensor("router.per_expert_scale", ("router_output.scale",)),
        Tensor("experts.gate_up_proj", ("experts.gate", "experts.up"), stacked=True),
        Tensor("experts.down_proj", ("experts.down",), stacked=True, transposed=True),
    ),
    inert_keys=GEMMA_INERT_KEYS,
    unread=_unread,
)  # fmt: skip
