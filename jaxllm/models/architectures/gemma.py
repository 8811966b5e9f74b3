"""Gemma (texts): Llama with norms that multiply by 1 + w, scaled embeddings and a GELU gate.

Gemma 2 has norms before and after each block, soft-capped scores and logits, and a sliding window in every
other layer. Gemma 3 has norms on every head's query and key instead of capped scores, five sliding layers to
one full one, and a rotary embedding for each kind of layer. Gemma 4 has heads of two sizes, layers that share
keys and values, normalized values, and per-layer inputs of each token, or experts in addition to feed-forward
blocks.
"""

from typing import Any

from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.errors import ConfigError
from jaxllm.layer_configs import MixedLayers, shares_kv
from jaxllm.models.architectures.llama import (
    ATTENTION_BIAS,
    HEAD,
    LLAMA_ATTENTION,
    LLAMA_FFN,
    LLAMA_TOP,
    llama_keys,
)
from jaxllm.models.config_parts import (
    FULL,
    SLIDING,
    Fields,
    Part,
    all_but_each,
    every_other,
    fixed,
    keys,
    only,
    read_rope_section,
    read_windows,
    refuse_partial,
    rope,
    ropes_by_layer,
    windows,
    write_windows,
)
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, Tensor, tensors

_CAUSAL = only("use_bidirectional_attention", (None, False), "the decoder attends to past tokens alone")
GEMMA_TOP = (
    *tensors({"embed_tokens": "embed.tokens"}),
    *tensors({"norm": "final_norm"}, plus_one=True),
    *HEAD,
)


def _read_scale(reader: ConfigReader, fields: Fields) -> Fields:
    scale: Fields = {"embed_scale": max(fields["hidden_size"], 0) ** 0.5}
    if fields["activation"] == "gelu":
        # The first release names gelu although its weights were trained with the tanh approximation;
        # transformers reads it so.
        scale["activation"] = "gelu_tanh"
    return scale


GEMMA = Architecture(
    model_type="gemma",
    class_name="GemmaForCausalLM",
    parts=(
        _CAUSAL,
        llama_keys(
            vocab_size=256000, hidden_size=3072, intermediate_size=24576, num_hidden_layers=28,
            num_attention_heads=16, num_key_value_heads=16, head_dim=256, hidden_act="gelu_pytorch_tanh",
            max_position_embeddings=8192, tie_word_embeddings=True,
        ),
        rope(),
        Part(_read_scale),
        ATTENTION_BIAS,
    ),
    top_tensors=GEMMA_TOP,
    layer_tensors=(
        *tensors({"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}, plus_one=True),
        *LLAMA_ATTENTION,
        *LLAMA_FFN,
    ),
    # Older configs have it besides `hidden_act`, which transformers reads.
    inert_keys=frozenset({"hidden_activation"}),
)  # fmt: skip


def gemma_keys(**defaults: Any) -> Part:
    """`llama_keys` with those of Gemma 2 to 4, and their defaults."""
    shared = {
        "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return llama_keys(activation_key="hidden_activation", **shared | defaults)


def _read_scales(reader: ConfigReader, fields: Fields) -> Fields:
    scalar = reader.number("query_pre_attn_scalar", 256, low=1e-6, high=1e6)
    return {"attention_scale": scalar**-0.5, "embed_scale": max(fields["hidden_size"], 0) ** 0.5}


_SCALES = Part(_read_scales, lambda cfg: {"query_pre_attn_scalar": round(cfg.attention_scale**-2)})
# Older configs have `hidden_act` as well; transformers only reads `hidden_activation`.
GEMMA_INERT_KEYS = frozenset({"hidden_act"})
GEMMA_NORMS = {
    "input_layernorm": "attn_norm",
    **{f"self_attn.{part}_norm": f"attn.{part}_norm" for part in "qk"},
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "ffn_post_norm",
}
_LAYER = tensors(GEMMA_NORMS, plus_one=True) + LLAMA_ATTENTION + LLAMA_FFN
GEMMA2 = Architecture(
    model_type="gemma2",
    class_name="Gemma2ForCausalLM",
    parts=(
        _CAUSAL,
        gemma_keys(vocab_size=256000, num_hidden_layers=26, max_position_embeddings=8192),
        ATTENTION_BIAS,
        _SCALES,
        rope(),
        fixed(post_norms=True),
        keys(
            attn_logit_softcapping=(50.0, "attention_softcap"),
            final_logit_softcapping=(30.0, "logit_softcap"),
        ),
        windows(4096, every_other),
    ),
    top_tensors=GEMMA_TOP,
    layer_tensors=_LAYER,
    inert_keys=GEMMA_INERT_KEYS,
)


def _gemma3_slides(reader: ConfigReader, fields: Fields) -> list[bool]:
    # The key has an underscore if transformers 5 wrote it.
    pattern = reader.integer("_sliding_window_pattern", 6, least=1)
    return all_but_each(reader.integer("sliding_window_pattern", pattern, least=1), fields["layers"])


GEMMA3_TEXT = Architecture(
    model_type="gemma3_text",
    class_name="Gemma3ForCausalLM",
    parts=(
        only(
            "attn_logit_softcapping", (None,), "transformers ignores it for Gemma 3, so its meaning is open"
        ),
        _CAUSAL,
        gemma_keys(vocab_size=262208, num_hidden_layers=26),
        ATTENTION_BIAS,
        _SCALES,
        fixed(post_norms=True, qk_norm=True),
        keys(final_logit_softcapping=(None, "logit_softcap")),
        ropes_by_layer(1e6, "rope_local_base_freq", 1e4),
        windows(4096, _gemma3_slides),
    ),
    top_tensors=GEMMA_TOP,
    layer_tensors=_LAYER,
    inert_keys=GEMMA_INERT_KEYS,
)


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
