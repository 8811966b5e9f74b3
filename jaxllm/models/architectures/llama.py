"""Llama (1 to 3.x) and SmolLM3, and the parts shared with architectures derived from Llama."""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.config_parts import Fields, Part, all_but_each, keys, rope, windows
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


def _write_smollm3_layers(cfg: ModelConfig) -> dict[str, Any]:
    return {"no_rope_layers": [int(flag) for flag in cfg.rope_layers or (True,) * cfg.layers]}


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
        Part(_read_smollm3_layers, _write_smollm3_layers),
        windows(None, lambda reader, fields: [not each for each in fields["rope_layers"]], switch=True),
        ATTENTION_BIAS,
        MLP_BIAS,
    ),
    top_tensors=LLAMA_TOP,
    layer_tensors=LLAMA_LAYER,
    # Left over from Qwen2's configs; it has no effect.
    inert_keys=frozenset({"max_window_layers"}),
)  # fmt: skip
