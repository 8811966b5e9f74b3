"""OLMo 2: norms of each block's output in place of its input, and RMS norms over the queries and the keys of
all heads."""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.models.architectures.llama import (
    LLAMA_ATTENTION_TENSORS,
    LLAMA_FFN_TENSORS,
    LLAMA_TOP_TENSORS,
    read_llama_fields,
    write_llama_fields,
)
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, Tensor

OLMO2_DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
OLMO2_LAYER_TENSORS = (
    *LLAMA_ATTENTION_TENSORS,
    Tensor("self_attn.q_norm.weight", ("attn.q_norm.scale",)),
    Tensor("self_attn.k_norm.weight", ("attn.k_norm.scale",)),
    Tensor("post_attention_layernorm.weight", ("attn_post_norm.scale",)),
    *LLAMA_FFN_TENSORS,
    Tensor("post_feedforward_layernorm.weight", ("ffn_post_norm.scale",)),
)
# Fields of all models whose blocks have unnormalized inputs.
POST_NORMS_ONLY: dict[str, Any] = {"pre_norms": False, "post_norms": True, "qk_norm": True}


def _read(reader: ConfigReader) -> ModelConfig:
    fields = read_llama_fields(reader, OLMO2_DEFAULTS)
    attention_bias = reader.flag("attention_bias", False)
    return ModelConfig(
        model_type="olmo2",
        **fields,
        **POST_NORMS_ONLY,
        joint_qk_norm=True,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    return {**write_llama_fields(cfg), "attention_bias": cfg.qkv_bias}


OLMO2 = Architecture(
    model_type="olmo2",
    read_config=_read,
    write_config=_write,
    class_name="Olmo2ForCausalLM",
    top_tensors=LLAMA_TOP_TENSORS,
    layer_tensors=OLMO2_LAYER_TENSORS,
)
