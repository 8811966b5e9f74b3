"""BART: an encoder-decoder with learned positions (two rows of padding) and a layer norm after each sum.

mBART and Marian have the same tensors, and differ in their norms and positions.
"""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.models.architectures.llama import split_heads
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, Tensor, read_activation, write_activation

# PyTorch's default, which these models use without a config key.
_NORM_EPS = 1e-5
BART_INERT_KEYS = frozenset(
    [
        "add_bias_logits", "add_final_layer_norm", "classif_dropout", "decoder_layerdrop",
        "encoder_layerdrop", "extra_pos_embeddings", "gradient_checkpointing", "normalize_before",
        "normalize_embedding", "num_hidden_layers", "save_step", "static_position_embeddings",
    ]
)  # fmt: skip


def read_bart(reader: ConfigReader, model_type: str, *, vocab_size: int = 50265, **own: Any) -> ModelConfig:
    """A config of the family: with the class's default of `vocab_size`, and `own`, the fields in which its
    members differ."""
    reader.only("is_encoder_decoder", (True,), "an encoder without a decoder gives no text")
    hidden = reader.integer("d_model", 1024)
    shared: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": reader.integer("vocab_size", vocab_size),
        "hidden_size": hidden,
        "window_tokens": reader.integer("max_position_embeddings", 1024),
        "activation": read_activation(reader, "activation_function", "gelu"),
        "gated_ffn": False,
        "norm": "layer",
        "norm_eps": _NORM_EPS,
        "embed_scale": hidden**0.5 if reader.flag("scale_embedding", False) else 1.0,
        "qkv_bias": True,
        "o_bias": True,
        "ffn_bias": True,
        **own,
    }

    def side(name: str, **fields: Any) -> ModelConfig:
        heads = reader.integer(f"{name}_attention_heads", 16)
        return ModelConfig(
            **shared,
            layers=reader.integer(f"{name}_layers", 12),
            heads=heads,
            kv_heads=heads,
            head_dim=split_heads(hidden, heads),
            ffn_size=reader.integer(f"{name}_ffn_dim", 4096),
            **fields,
        )

    tied = reader.flag("tie_word_embeddings", True)
    return side("decoder", encoder=side("encoder", tied_head=True), tied_head=tied, head_bias=True)


def write_bart(cfg: ModelConfig) -> dict[str, Any]:
    """The keys of the family's configs."""
    assert cfg.encoder is not None
    written: dict[str, Any] = {
        "is_encoder_decoder": True,
        "vocab_size": cfg.vocab_size,
        "d_model": cfg.hidden_size,
        "max_position_embeddings": cfg.window_tokens,
        "activation_function": write_activation(cfg.activation),
        "scale_embedding": cfg.embed_scale != 1.0,
        "tie_word_embeddings": cfg.tied_head,
    }
    for name, side in (("encoder", cfg.encoder), ("decoder", cfg)):
        written |= {
            f"{name}_layers": side.layers,
            f"{name}_attention_heads": side.heads,
            f"{name}_ffn_dim": side.ffn_size,
        }
    return written


def _pair(name: str, param: str, *, transposed: bool = False) -> tuple[Tensor, Tensor]:
    return (
        Tensor(f"{name}.weight", (param,), transposed=transposed),
        Tensor(f"{name}.bias", (f"{param}_bias",)),
    )


def norm_tensors(name: str, param: str) -> tuple[Tensor, Tensor]:
    """The tensors of a layer norm."""
    return Tensor(f"{name}.weight", (f"{param}.scale",)), Tensor(f"{name}.bias", (f"{param}.bias",))


def _attention(name: str, param: str) -> tuple[Tensor, ...]:
    return (
        *norm_tensors(f"{name}_layer_norm", f"{param}_norm"),
        *(each for part in "qkv" for each in _pair(f"{name}.{part}_proj", f"{param}.{part}")),
        *_pair(f"{name}.out_proj", f"{param}.o", transposed=True),
    )


_FEED_FORWARD = (
    *norm_tensors("final_layer_norm", "ffn_norm"),
    *_pair("fc1", "ffn.up"),
    *_pair("fc2", "ffn.down", transposed=True),
)
BART_ENCODER_TENSORS = (*_attention("self_attn", "attn"), *_FEED_FORWARD)
BART_LAYER_TENSORS = (
    *_attention("self_attn", "attn"),
    *_attention("encoder_attn", "cross"),
    *_FEED_FORWARD,
)
BART_TOP_TENSORS = (
    Tensor("shared.weight", ("embed.tokens",)),
    Tensor("encoder.embed_positions.weight", ("encoder.embed.positions",), skip_rows=2),
    *norm_tensors("encoder.layernorm_embedding", "encoder.embed.norm"),
    *norm_tensors("encoder.layer_norm", "encoder.final_norm"),
    Tensor("decoder.embed_positions.weight", ("embed.positions",), skip_rows=2),
    *norm_tensors("decoder.layernorm_embedding", "embed.norm"),
    *norm_tensors("decoder.layer_norm", "final_norm"),
    Tensor("lm_head.weight", ("head",), in_body=False),
    Tensor("final_logits_bias", ("head_bias",), in_body=False, one_row=True),
)
# Both sides have the one token embedding.
BART_COPIES: dict[str, str] = dict.fromkeys(
    ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), "embed.tokens"
)
BART_BUFFERS = (
    "encoder.version",
    "decoder.version",
)


def bart_like(model_type: str, class_name: str, **own: Any) -> Architecture:
    """An architecture of the family; `own` are the fields in which its members differ."""

    def read(reader: ConfigReader) -> ModelConfig:
        return read_bart(reader, model_type, **own)

    return Architecture(
        model_type=model_type,
        read_config=read,
        write_config=write_bart,
        class_name=class_name,
        top_tensors=BART_TOP_TENSORS,
        layer_tensors=BART_LAYER_TENSORS,
        layer_prefix="decoder.layers.{}.",
        prefixes=("model.", ""),
        inert_keys=BART_INERT_KEYS,
        buffers=BART_BUFFERS,
        copies=BART_COPIES,
        encoder_tensors=BART_ENCODER_TENSORS,
        encoder_prefix="encoder.layers.{}.",
    )


BART = bart_like(
    "bart",
    "BartForConditionalGeneration",
    learned_positions=True,
    embed_norm=True,
    norm_after=True,
    final_norm=False,
)
