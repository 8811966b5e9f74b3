"""Gemma 1 to 3 (texts): Llama with norms that multiply by 1 + w, scaled embeddings and a GELU gate.

Gemma 2 has norms before and after each block, soft-capped scores and logits, and a sliding window in every
other layer. Gemma 3 has norms on every head's query and key instead of capped scores, five sliding layers to
one full one, and a rotary embedding for each kind of layer.
"""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.models.architectures.llama import ATTENTION_BIAS, HEAD, LLAMA_ATTENTION, LLAMA_FFN, llama_keys
from jaxllm.models.config_parts import (
    Fields,
    Part,
    all_but_each,
    every_other,
    fixed,
    keys,
    only,
    read_ropes_by_layer,
    rope,
    windows,
    write_rope,
)
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, tensors

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


def _read_gemma3_ropes(reader: ConfigReader, fields: Fields) -> Fields:
    bases = reader.number("rope_theta", 1e6), reader.number("rope_local_base_freq", 1e4)
    return read_ropes_by_layer(reader, fields, *bases)


def _write_gemma3_ropes(cfg: ModelConfig) -> dict[str, Any]:
    local = {} if cfg.local_rope is None else {"rope_local_base_freq": cfg.local_rope.theta}
    return {**write_rope(cfg.rope), **local}


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
        Part(_read_gemma3_ropes, _write_gemma3_ropes),
        windows(4096, _gemma3_slides),
    ),
    top_tensors=GEMMA_TOP,
    layer_tensors=_LAYER,
    inert_keys=GEMMA_INERT_KEYS,
)
