"""Gemma (version 1): Llama with norms that multiply by 1 + w, scaled embeddings and a GELU gate."""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.models.architectures.gemma2 import GEMMA_TOP_TENSORS
from jaxllm.models.architectures.llama import (
    LLAMA_ATTENTION_TENSORS,
    LLAMA_FFN_TENSORS,
    read_llama_fields,
    write_llama_fields,
)
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, Tensor

_DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def _read(reader: ConfigReader) -> ModelConfig:
    reader.only("use_bidirectional_attention", (None, False), "the decoder attends to past tokens alone")
    fields = read_llama_fields(reader, _DEFAULTS)
    if fields["activation"] == "gelu":
        # The first release names gelu although its weights were trained with the tanh approximation;
        # transformers reads it so.
        fields["activation"] = "gelu_tanh"
    attention_bias = reader.flag("attention_bias", False)
    return ModelConfig(
        model_type="gemma",
        **fields,
        embed_scale=max(fields["hidden_size"], 0) ** 0.5,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    return {**write_llama_fields(cfg), "attention_bias": cfg.qkv_bias}


GEMMA = Architecture(
    model_type="gemma",
    read_config=_read,
    write_config=_write,
    class_name="GemmaForCausalLM",
    top_tensors=GEMMA_TOP_TENSORS,
    layer_tensors=(
        Tensor("input_layernorm.weight", ("attn_norm.scale",), plus_one=True),
        *LLAMA_ATTENTION_TENSORS,
        Tensor("post_attention_layernorm.weight", ("ffn_norm.scale",), plus_one=True),
        *LLAMA_FFN_TENSORS,
    ),
    # Older configs have it besides `hidden_act`, which transformers reads.
    inert_keys=frozenset({"hidden_activation"}),
)
