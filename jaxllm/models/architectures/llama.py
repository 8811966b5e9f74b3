"""Llama (1 to 3.x) and SmolLM3, and the parts shared with architectures derived from Llama; Mistral, with one
sliding window for all layers (or none) and no biases, Ministral 3 and Mixtral; Granite 3 and 4 (dense)."""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.config_parts import (
    FULL,
    Fields,
    Part,
    all_but_each,
    experts,
    keys,
    only,
    rope,
    rope_parameters,
    windows,
)
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, tensors

# The keys with their fields, and the defaults of Llama's class.
_KEYS: dict[str, tuple[Any, str]] = {
    "vocab_size": (32000, "vocab_size"),
    "hidden_size": (4096, "hidden_size"),
    "intermediate_size": (11008, "ffn_size"),
    "num_hidden_layers": (32, "layers"),
    "num_attention_heads": (32, "heads"),
    "num_key_value_heads": (None, "kv_heads"),
    "head_dim": (None, "head_dim"),
    "hidden_act": ("silu", "activation"),
    "max_position_embeddings": (2048, "window_tokens"),
    "rms_norm_eps": (1e-6, "norm_eps"),
    "tie_word_embeddings": (False, "tied_head"),
}


def llama_keys(*, activation_key: str = "hidden_act", **defaults: Any) -> Part:
    """The keys of all architectures derived from Llama, without those of rotary embeddings; `defaults` are
    those of the Hugging Face class that differ from Llama's, by key."""
    known = {key: (defaults.get(key, default), field) for key, (default, field) in _KEYS.items()}
    known[activation_key] = known.pop("hidden_act")
    return keys(**known)


ATTENTION_BIAS = keys(attention_bias=(False, "qkv_bias", "o_bias"))
MLP_BIAS = keys(mlp_bias=(False, "ffn_bias"))

HEAD = tensors({"lm_head": "head"}, in_body=False)
LLAMA_TOP = tensors({"embed_tokens": "embed.tokens", "norm": "final_norm"}) + HEAD
LLAMA_ATTENTION = tensors({f"self_attn.{part}_proj": f"attn.{part}" for part in "qkvo"})
LLAMA_FFN = tensors({f"mlp.{part}_proj": f"ffn.{part}" for part in ("gate", "up", "down")})
LLAMA_NORMS = tensors({"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"})
LLAMA_LAYER = LLAMA_NORMS + LLAMA_ATTENTION + LLAMA_FFN
# Of every head's queries and keys.
QK_NORMS = tensors({f"self_attn.{part}_norm": f"attn.{part}_norm" for part in "qk"})

LLAMA = Architecture(
    model_type="llama",
    class_name="LlamaForCausalLM",
    parts=(llama_keys(), rope(), ATTENTION_BIAS, MLP_BIAS),
    top_tensors=LLAMA_TOP,
    layer_tensors=LLAMA_LAYER,
    # In Falcon3's configs besides `hidden_act`; it is not read.
    inert_keys=frozenset({"activation"}),
)


def _read_smollm3_layers(reader: ConfigReader, fields: Fields) -> Fields:
    """`rope_layers` from `no_rope_layers`, which has 1 for layers with a rotary embedding."""
    layers = max(fields["layers"], 0)
    usual = all_but_each(reader.integer("no_rope_layer_interval", 4, least=1), layers)
    flags = reader.integers("no_rope_layers") or usual
    if len(flags) != layers or not set(flags) <= {0, 1}:
        raise ConfigError(
            f"config key 'no_rope_layers' must be {layers} times 0 or 1, one per layer, got {flags!r:.80}"
        )
    return {"rope_layers": tuple(map(bool, flags))}


# Without rotary embedding in every fourth layer, which may have a window.
SMOLLM3 = Architecture(
    model_type="smollm3",
    class_name="SmolLM3ForCausalLM",
    parts=(
        llama_keys(
            vocab_size=128256, hidden_size=2048, num_hidden_layers=36, num_attention_heads=16,
            num_key_value_heads=4, max_position_embeddings=32768, tie_word_embeddings=True,
        ),
        rope(2e6),
        Part(
            _read_smollm3_layers,
            lambda cfg: {"no_rope_layers": [int(flag) for flag in cfg.rope_layers or (True,) * cfg.layers]},
        ),
        windows(None, lambda reader, fields: [not each for each in fields["rope_layers"]], switch=True),
        ATTENTION_BIAS,
        MLP_BIAS,
    ),
    top_tensors=LLAMA_TOP,
    layer_tensors=LLAMA_LAYER,
    # Left over from Qwen2's configs; it has no effect.
    inert_keys=frozenset({"max_window_layers"}),
)  # fmt: skip


MISTRAL = Architecture(
    model_type="mistral",
    class_name="MistralForCausalLM",
    parts=(
        llama_keys(intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072),
        rope(),
        windows(4096),
    ),
    top_tensors=LLAMA_TOP,
    layer_tensors=LLAMA_LAYER,
)

# The defaults of transformers for a config of Ministral 3 without scaling.
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _write_growing_rope(cfg: ModelConfig) -> dict[str, Any]:
    if cfg.rope is None:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    further = {
        "llama_4_scaling_beta": cfg.rope.query_growth,
        "original_max_position_embeddings": cfg.rope.original_window_tokens or cfg.window_tokens,
    }
    return {"rope_parameters": rope_parameters(cfg.rope) | further}


# Mistral with YaRN, and queries that grow with the logarithm of the position.
MINISTRAL3 = Architecture(
    model_type="ministral3",
    class_name="Ministral3ForCausalLM",
    parts=(
        llama_keys(
            vocab_size=131072, intermediate_size=14336, num_hidden_layers=34, num_key_value_heads=8,
            head_dim=128, max_position_embeddings=262144, rms_norm_eps=1e-5,
        ),
        Part(rope(1e6, usual=_ROPE, growth=True).read, _write_growing_rope),
        windows(),
    ),
    top_tensors=LLAMA_TOP,
    layer_tensors=LLAMA_LAYER,
)  # fmt: skip

# Mistral with experts in every layer, their weights normalized over each token's choice.
MIXTRAL = Architecture(
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    parts=(
        llama_keys(
            intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5
        ),
        rope(1e6),
        windows(),
        experts("num_local_experts", 8),
        keys(num_experts_per_tok=(2, "experts_per_token")),
    ),
    top_tensors=LLAMA_TOP,
    layer_tensors=(
        *LLAMA_NORMS,
        *LLAMA_ATTENTION,
        *tensors(
            {
                "block_sparse_moe.gate": "router",
                "block_sparse_moe.experts.{expert}.w1": "experts.gate",
                "block_sparse_moe.experts.{expert}.w3": "experts.up",
                "block_sparse_moe.experts.{expert}.w2": "experts.down",
            }
        ),
    ),
)


# Granite 3 and 4: Llama whose embeddings, residual branches, scores and logits are multiplied by numbers of
# the config. A residual branch times r equals a residual stream divided by r: norms cancel the factor if
# their epsilon is divided by r², so that embeddings times e / r account for it exactly.


def _read_multipliers(reader: ConfigReader, fields: Fields) -> Fields:
    names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    embedding, residual, attention, logits = (reader.number(key, 1.0, low=1e-6, high=1e6) for key in names)
    return {
        "norm_eps": fields["norm_eps"] / residual**2,
        "embed_scale": embedding / residual,
        "attention_scale": attention,
        "logit_scale": 1.0 / logits,
    }


def _write_multipliers(cfg: ModelConfig) -> dict[str, Any]:
    """The same model without a residual multiplier."""
    return {
        "embedding_multiplier": cfg.embed_scale,
        "residual_multiplier": 1.0,
        "attention_multiplier": cfg.attention_scale,
        "logits_scaling": 1.0 / cfg.logit_scale,
    }


_MULTIPLIERS = Part(_read_multipliers, _write_multipliers)
GRANITE = Architecture(
    model_type="granite",
    class_name="GraniteForCausalLM",
    parts=(llama_keys(), rope(), _MULTIPLIERS, ATTENTION_BIAS, MLP_BIAS),
    top_tensors=LLAMA_TOP,
    layer_tensors=LLAMA_LAYER,
)


def _read_hybrid(reader: ConfigReader, fields: Fields) -> Fields:
    layers = max(fields["layers"], 0)
    # The kind of an attention layer, as versions of transformers spell it.
    every = [[kind] * layers for kind in ("attention", FULL)]
    reader.only("layer_types", every, "Mamba layers are not implemented")
    reader.only("layers_block_type", [*every, None], "Mamba layers are not implemented")
    reader.require("layer_types", "without it all layers are Mamba layers, which are not implemented")
    reader.require("num_local_experts", "without it the model has experts, which are not implemented")
    rotary = reader.optional_text("position_embedding_type") == "rope"
    found: Fields = {"ffn_size": reader.integer("shared_intermediate_size", 1024)}
    return found if rotary else found | {"rope": None}


def _write_hybrid(cfg: ModelConfig) -> dict[str, Any]:
    return {
        "shared_intermediate_size": cfg.ffn_size,
        "num_local_experts": 0,
        # transformers checks the sizes of Mamba layers even if there are none.
        "mamba_n_heads": 1,
        "layer_types": [FULL] * cfg.layers,
        "position_embedding_type": "nope" if cfg.rope is None else "rope",
    }


# `granite` in the words of its hybrid family; models with Mamba layers or experts are refused.
GRANITEMOEHYBRID = Architecture(
    model_type="granitemoehybrid",
    class_name="GraniteMoeHybridForCausalLM",
    parts=(
        only("num_local_experts", (0,), "experts beside a shared block are not implemented"),
        only("position_embedding_type", (None, "rope", "nope"), "positions are rotary, or there are none"),
        llama_keys(),
        rope(),
        Part(_read_hybrid, _write_hybrid),
        _MULTIPLIERS,
        ATTENTION_BIAS,
    ),
    top_tensors=LLAMA_TOP,
    layer_tensors=(
        *LLAMA_NORMS,
        *LLAMA_ATTENTION,
        *tensors(
            {"shared_mlp.input_linear": "ffn.gate ffn.up", "shared_mlp.output_linear": "ffn.down"}
        ),
    ),
    # Of Mamba layers and experts, which the model does not have.
    inert_keys=frozenset(
        {
            "mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state",
            "mamba_expand", "mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "num_experts_per_tok",
            "time_step_limit", "init_method", "normalization_function",
        }
    ),
)  # fmt: skip
