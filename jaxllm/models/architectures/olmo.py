"""OLMo 2 and 3: norms of each block's output in place of its input, and RMS norms over the queries and the
keys of all heads; OLMoE; and EXAONE 4."""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.architectures.llama import (
    ATTENTION_BIAS,
    LLAMA_ATTENTION,
    LLAMA_FFN,
    LLAMA_TOP,
    QK_NORMS,
    llama_keys,
)
from jaxllm.models.architectures.qwen import QWEN_MOE_LAYER
from jaxllm.models.config_parts import (
    Fields,
    Part,
    all_but_each,
    experts,
    fixed,
    keys,
    read_windows,
    rope,
    ropes_by_layer,
    windows,
    write_windows,
)
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, tensors

_OLMO_KEYS = llama_keys(vocab_size=50304, rms_norm_eps=1e-5)
_POST_NORMS_ONLY: dict[str, Any] = {"pre_norms": False, "post_norms": True, "qk_norm": True}
_POST_NORMS = {"post_attention_layernorm": "attn_post_norm", "post_feedforward_layernorm": "ffn_post_norm"}
_LAYER = LLAMA_ATTENTION + QK_NORMS + LLAMA_FFN + tensors(_POST_NORMS)
OLMO2 = Architecture(
    model_type="olmo2",
    class_name="Olmo2ForCausalLM",
    parts=(_OLMO_KEYS, rope(), ATTENTION_BIAS, fixed(**_POST_NORMS_ONLY, joint_qk_norm=True)),
    top_tensors=LLAMA_TOP,
    layer_tensors=_LAYER,
)


# A sliding window in three of four layers, and a rotary embedding for each kind of layer.
OLMO3 = Architecture(
    model_type="olmo3",
    class_name="Olmo3ForCausalLM",
    parts=(
        _OLMO_KEYS,
        ropes_by_layer(5e5),
        ATTENTION_BIAS,
        fixed(**_POST_NORMS_ONLY, joint_qk_norm=True),
        windows(4096, lambda reader, fields: all_but_each(4, fields["layers"])),
    ),
    top_tensors=LLAMA_TOP,
    layer_tensors=_LAYER,
)

# Experts in every layer, and norms before blocks.
OLMOE = Architecture(
    model_type="olmoe",
    class_name="OlmoeForCausalLM",
    parts=(
        llama_keys(
            vocab_size=50304, hidden_size=2048, intermediate_size=2048, num_hidden_layers=16,
            num_attention_heads=16, max_position_embeddings=4096, rms_norm_eps=1e-5,
        ),
        rope(),
        ATTENTION_BIAS,
        fixed(qk_norm=True, joint_qk_norm=True),
        experts("num_experts", 64),
        keys(
            clip_qkv=(None, "qkv_clip"),
            num_experts_per_tok=(8, "experts_per_token"),
            norm_topk_prob=(False, "normalize_expert_weights"),
        ),
    ),
    top_tensors=LLAMA_TOP,
    layer_tensors=QWEN_MOE_LAYER,
)  # fmt: skip


def _exaone4_slides(reader: ConfigReader, layers: int, window: int | None) -> list[bool]:
    """Whether each layer slides by `sliding_window_pattern`: a number n (all but each n-th), or a repeated
    string of letters, L for sliding and G for full; the last layer is then full."""
    pattern = reader.integer_or_text("sliding_window_pattern", 4)
    if window is None or not pattern:
        return [False] * layers
    if isinstance(pattern, int):
        return all_but_each(reader.integer("sliding_window_pattern", 4, least=1), layers)
    if not set(pattern) <= {"L", "G"}:
        raise ConfigError(
            f"config key 'sliding_window_pattern' is {pattern!r:.80}; give a number, or letters L and G"
        )
    return [layer < layers - 1 and pattern[layer % len(pattern)] == "L" for layer in range(layers)]


def _read_exaone4_layers(reader: ConfigReader, fields: Fields) -> Fields:
    layers = max(fields["layers"], 0)
    window = reader.optional_integer("sliding_window", 4096)
    found = read_windows(reader, window, _exaone4_slides(reader, layers, window))
    rope_layers = () if window is None else tuple(each > 0 for each in found)
    return {"attention_windows": found, "rope_layers": rope_layers}


def _write_exaone4_layers(cfg: ModelConfig) -> dict[str, Any]:
    written = write_windows(cfg)
    # Any length means that full layers have no rotary embedding.
    window = written["sliding_window"] or (cfg.window_tokens if cfg.rope_layers else None)
    return written | {"sliding_window": window}


# Norms of every head's query and key; if some layers have a sliding window, the full ones have no rotary
# embedding.
EXAONE4 = Architecture(
    model_type="exaone4",
    class_name="Exaone4ForCausalLM",
    parts=(
        llama_keys(vocab_size=102400, intermediate_size=16384, num_key_value_heads=32, rms_norm_eps=1e-5),
        rope(),
        fixed(**_POST_NORMS_ONLY),
        Part(_read_exaone4_layers, _write_exaone4_layers),
    ),
    top_tensors=LLAMA_TOP,
    layer_tensors=_LAYER,
)
