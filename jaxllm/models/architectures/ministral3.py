"""Ministral 3: Mistral with YaRN and queries that grow with the logarithm of the position."""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.models.architectures.llama import LLAMA, read_llama_shape, write_llama_shape
from jaxllm.models.config_reader import ConfigReader, read_rope, refuse_partial, write_rope
from jaxllm.models.translate import Architecture

_DEFAULTS = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
# The defaults of transformers for a config without scaling.
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


def _read(reader: ConfigReader) -> ModelConfig:
    fields = read_llama_shape(reader, _DEFAULTS)
    sizes = {"head_dim": fields["head_dim"], "window_tokens": fields["window_tokens"]}
    given = reader.has("rope_parameters") or reader.has("rope_scaling")
    source = reader if given else ConfigReader({"rope_parameters": _ROPE})
    rope = read_rope(source, **sizes, theta=1e6, growth=True)
    refuse_partial(rope, fields["head_dim"])
    window = reader.optional_integer("sliding_window")
    return ModelConfig(
        model_type="ministral3", **fields, rope=rope, attention_windows=(window or 0,) * fields["layers"]
    )


def _write(cfg: ModelConfig) -> dict[str, Any]:
    written = {} if cfg.rope is None else write_rope(cfg.rope)
    section = {
        "rope_type": "default",
        **written.get("rope_scaling", {}),
        "rope_theta": written.get("rope_theta", 1e6),
    }
    if cfg.rope is not None:
        section["llama_4_scaling_beta"] = cfg.rope.query_growth
        section["original_max_position_embeddings"] = cfg.rope.original_window_tokens or cfg.window_tokens
    return {
        **write_llama_shape(cfg),
        "rope_parameters": section,
        "sliding_window": cfg.attention_windows[0] or None,
    }


MINISTRAL3 = Architecture(
    model_type="ministral3",
    read_config=_read,
    write_config=_write,
    class_name="Ministral3ForCausalLM",
    top_tensors=LLAMA.top_tensors,
    layer_tensors=LLAMA.layer_tensors,
)
