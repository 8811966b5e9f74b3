"""GPT-2 and OPT: layer norms, learned positions, a plain feed-forward block, biases everywhere."""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.models.architectures.bart import FEED_FORWARD, SELF_ATTENTION
from jaxllm.models.architectures.llama import HEAD
from jaxllm.models.config_parts import Fields, Part, fixed, keys, only
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, tensors

_BIASES = {"qkv_bias": True, "o_bias": True, "ffn_bias": True}
_SHARED: dict[str, Any] = {"gated_ffn": False, "norm": "layer", "learned_positions": True}


def _read_sizes(reader: ConfigReader, fields: Fields) -> Fields:
    ffn, scaled = reader.optional_integer("n_inner"), reader.flag("scale_attn_weights", True)
    return {
        "ffn_size": 4 * fields["hidden_size"] if ffn is None else ffn,
        "attention_scale": fields["head_dim"] ** -0.5 if scaled else 1.0,
    }


def _write_sizes(cfg: ModelConfig) -> dict[str, Any]:
    return {"n_inner": cfg.ffn_size, "scale_attn_weights": cfg.attention_scale == cfg.head_dim**-0.5}


_NO_SUCH = "the shared decoder has no such attention"
GPT2 = Architecture(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    parts=(
        only("scale_attn_by_inverse_layer_idx", (None, False), _NO_SUCH),
        only("add_cross_attention", (None, False), _NO_SUCH),
        keys(
            vocab_size=(50257, "vocab_size"),
            n_embd=(768, "hidden_size"),
            n_layer=(12, "layers"),
            n_head=(12, "heads"),
            n_positions=(1024, "window_tokens"),
            activation_function=("gelu_new", "activation"),
            layer_norm_epsilon=(1e-5, "norm_eps"),
            tie_word_embeddings=(True, "tied_head"),
        ),
        Part(_read_sizes, _write_sizes),
        fixed(**_SHARED, **_BIASES),
    ),
    top_tensors=tensors({"wte": "embed.tokens", "wpe": "embed.positions", "ln_f": "final_norm"}) + HEAD,
    # Linear layers are stored as `[in, out]` (Conv1D), transposed against all other architectures.
    layer_tensors=tensors(
        {
            "ln_1": "attn_norm",
            "attn.c_attn": "attn.q attn.k attn.v",
            "attn.c_proj": "attn.o",
            "ln_2": "ffn_norm",
            "mlp.c_fc": "ffn.up",
            "mlp.c_proj": "ffn.down",
        },
        turned=True,
    ),
    layer_prefix="h.{}.",
    prefixes=("transformer.", ""),
    # Upcasting and reordering only change rounding; n_ctx repeats n_positions; the summary head belongs to
    # another class.
    inert_keys=frozenset(
        {
            "n_ctx", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout",
            "summary_proj_to_labels", "summary_type", "summary_use_proj",
        }
    ),
    # The causal mask, which older checkpoints contain.
    buffers=(".attn.bias", ".attn.masked_bias"),
)  # fmt: skip


# The 350m model, with norms after each block and narrower embeddings, is refused.
OPT = Architecture(
    model_type="opt",
    class_name="OPTForCausalLM",
    parts=(
        only("do_layer_norm_before", (True,), "norms after each block (opt-350m) are not implemented"),
        only("_remove_final_layer_norm", (None, False), "the shared decoder ends in a norm"),
        only("layer_norm_elementwise_affine", (True,), "norms without weights are not implemented"),
        keys(
            vocab_size=(50272, "vocab_size"),
            hidden_size=(768, "hidden_size"),
            num_hidden_layers=(12, "layers"),
            num_attention_heads=(12, "heads"),
            ffn_dim=(3072, "ffn_size"),
            max_position_embeddings=(2048, "window_tokens"),
            activation_function=("relu", "activation"),
            enable_bias=(True, *_BIASES),
            tie_word_embeddings=(True, "tied_head"),
        ),
        only(
            "word_embed_proj_dim",
            lambda fields: (None, fields["hidden_size"]),
            "projected embeddings (opt-350m) are not implemented; use another OPT size",
        ),
        # PyTorch's default epsilon, which OPT uses without a config key.
        fixed(**_SHARED, norm_eps=1e-5),
    ),
    top_tensors=(
        *tensors({"embed_tokens": "embed.tokens", "final_layer_norm": "final_norm"}),
        # Two rows of padding.
        *tensors({"embed_positions": "embed.positions"}, skip_rows=2),
        *HEAD,
    ),
    layer_tensors=SELF_ATTENTION + FEED_FORWARD,
    prefixes=("model.decoder.", "decoder.", ""),
)
