"""Phi 1 to 4, StableLM and ERNIE 4.5: Llama with other norms, joined tensors, or a rotary embedding over a
part of each head or of neighbouring dimensions."""

import dataclasses

from jaxllm.errors import ConfigError
from jaxllm.models.architectures.llama import HEAD, LLAMA_LAYER, LLAMA_NORMS, LLAMA_TOP, llama_keys
from jaxllm.models.config_parts import Fields, Part, fixed, keys, only, partial_rope, rope, windows
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, tensors

# Phi-1, Phi-1.5 and Phi-2: one layer norm, which attention and the feed-forward block both read, and biases
# everywhere, also of the head.
PHI = Architecture(
    model_type="phi",
    class_name="PhiForCausalLM",
    parts=(
        only("qk_layernorm", (None, False), "layer norms of queries and keys are not implemented"),
        # The head has a bias, so that transformers cannot share it either.
        only("tie_word_embeddings", (None, False), "the head is a parameter of its own"),
        keys(
            vocab_size=(51200, "vocab_size"),
            hidden_size=(2048, "hidden_size"),
            num_hidden_layers=(24, "layers"),
            num_attention_heads=(32, "heads"),
            num_key_value_heads=(None, "kv_heads"),
            intermediate_size=(8192, "ffn_size"),
            max_position_embeddings=(2048, "window_tokens"),
            hidden_act=("gelu_new", "activation"),
            layer_norm_eps=(1e-5, "norm_eps"),
        ),
        partial_rope(0.5),
        fixed(gated_ffn=False, norm="layer", qkv_bias=True, o_bias=True, ffn_bias=True),
        fixed(parallel_blocks=True, head_bias=True),
    ),
    top_tensors=tensors({"embed_tokens": "embed.tokens", "final_layernorm": "final_norm"}) + HEAD,
    layer_tensors=tensors(
        {
            "input_layernorm": "attn_norm",
            **{f"self_attn.{part}_proj": f"attn.{part}" for part in "qkv"},
            "self_attn.dense": "attn.o",
            "mlp.fc1": "ffn.up",
            "mlp.fc2": "ffn.down",
        }
    ),
    inert_keys=frozenset({"embd_pdrop", "resid_pdrop"}),
)


def _refuse_scaling(reader: ConfigReader, fields: Fields) -> Fields:
    kind = fields["rope"].kind
    if kind != "default":
        raise ConfigError(
            f"rope scaling {kind!r} is not supported for phi3, where transformers takes it for "
            "longrope or refuses it; use a checkpoint without rope scaling"
        )
    return {}


# Phi-3, Phi-3.5 and Phi-4: q, k, v in one tensor, gate and up in another. The long-context variants
# (longrope) are refused.
PHI3 = Architecture(
    model_type="phi3",
    class_name="Phi3ForCausalLM",
    parts=(
        llama_keys(
            vocab_size=32064, hidden_size=3072, intermediate_size=8192, max_position_embeddings=4096,
            rms_norm_eps=1e-5,
        ),
        partial_rope(),
        Part(_refuse_scaling),
        windows(),
    ),
    top_tensors=LLAMA_TOP,
    layer_tensors=(
        *LLAMA_NORMS,
        *tensors(
            {
                "self_attn.qkv_proj": "attn.q attn.k attn.v",
                "self_attn.o_proj": "attn.o",
                "mlp.gate_up_proj": "ffn.gate ffn.up",
                "mlp.down_proj": "ffn.down",
            }
        ),
    ),
)  # fmt: skip

# The 12B model of StableLM, with norms on queries and keys and parallel blocks, is refused.
STABLELM = Architecture(
    model_type="stablelm",
    class_name="StableLmForCausalLM",
    parts=(
        only("use_parallel_residual", (None, False), "parallel blocks (12B) are not implemented"),
        only("qk_layernorm", (None, False), "layer norms of queries and keys (12B) are not implemented"),
        keys(
            vocab_size=(50304, "vocab_size"),
            hidden_size=(2560, "hidden_size"),
            num_hidden_layers=(32, "layers"),
            num_attention_heads=(32, "heads"),
            num_key_value_heads=(32, "kv_heads"),
            intermediate_size=(6912, "ffn_size"),
            max_position_embeddings=(4096, "window_tokens"),
            hidden_act=("silu", "activation"),
            layer_norm_eps=(1e-5, "norm_eps"),
            use_qkv_bias=(False, "qkv_bias"),
            tie_word_embeddings=(False, "tied_head"),
        ),
        partial_rope(0.25),
        fixed(norm="layer"),
    ),
    top_tensors=LLAMA_TOP,
    layer_tensors=LLAMA_LAYER,
)

_PAIRED = ("attn.q", "attn.q_bias", "attn.k", "attn.k_bias")
# The rotary embedding is of neighbouring dimensions (2i, 2i+1) of each head.
ERNIE4_5 = Architecture(
    model_type="ernie4_5",
    class_name="Ernie4_5ForCausalLM",
    parts=(
        llama_keys(
            vocab_size=103424, hidden_size=1024, intermediate_size=3072, num_hidden_layers=18,
            num_attention_heads=16, num_key_value_heads=2, head_dim=128, max_position_embeddings=131072,
            rms_norm_eps=1e-5, tie_word_embeddings=True,
        ),
        rope(500000.0),
        keys(use_bias=(False, "qkv_bias", "o_bias", "ffn_bias")),
    ),
    top_tensors=LLAMA_TOP,
    layer_tensors=tuple(
        dataclasses.replace(tensor, interleaved=tensor.params[0] in _PAIRED) for tensor in LLAMA_LAYER
    ),
)  # fmt: skip
