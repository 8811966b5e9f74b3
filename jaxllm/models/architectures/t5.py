"""T5: an encoder-decoder with relative position biases, RMS norms and unscaled attention.

Version 1.0 has a plain feed-forward block and multiplies the states before its tied head by D^-0.5; version
1.1 has a gated one and a separate head. All layers use the position biases of the first one.
"""

from typing import Any

from jaxllm.config import Activation, ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, Tensor

_DEFAULTS = {"vocab_size": 32128, "d_model": 512, "d_ff": 2048, "num_heads": 8, "num_layers": 6}
# T5 has no maximum sequence length; configs have the training length, or nothing.
_TRAINED_TOKENS = 512
# `feed_forward_proj` -> whether there is a gate, and the activation. The first "gelu" is an old name.
_FEED_FORWARDS: dict[str, tuple[bool, Activation]] = {
    "relu": (False, "relu"),
    "gelu": (False, "gelu"),
    "silu": (False, "silu"),
    "gelu_new": (False, "gelu_tanh"),
    "gated-gelu": (True, "gelu_tanh"),
    "gated-relu": (True, "relu"),
    "gated-silu": (True, "silu"),
}
# Keys that repeat `feed_forward_proj`, and keys without effect on the logits.
T5_INERT_KEYS = frozenset(
    ["dense_act_fn", "is_gated_act", "dropout_rate", "initializer_factor", "output_past", "n_positions"]
)
# Both sides have the one token embedding.
T5_COPIES: dict[str, str] = dict.fromkeys(
    ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), "embed.tokens"
)
T5_BUFFERS = ("EncDecAttention.relative_attention_bias.weight",)


def read_t5(
    reader: ConfigReader, model_type: str, *, feed_forward: str, scaled_head: bool, **defaults: int
) -> ModelConfig:
    """A config of the family, with the defaults of its class.

    Args:
      reader: reader of the config.
      model_type: type of the family.
      feed_forward: default of `feed_forward_proj`.
      scaled_head: whether the head's inputs are scaled and the head is tied.
      defaults: defaults of other keys that differ from T5's.
    """
    reader.only("is_encoder_decoder", (True,), "an encoder without a decoder gives no text")
    kind = reader.text("feed_forward_proj", feed_forward)
    if kind not in _FEED_FORWARDS:
        raise ConfigError(
            f"config key 'feed_forward_proj' is {kind!r:.80}, which is not supported; jaxllm has "
            f"{', '.join(_FEED_FORWARDS)}"
        )
    gated, activation = _FEED_FORWARDS[kind]
    known = {**_DEFAULTS, **defaults}
    hidden, heads, layers = (
        reader.integer(key, known[key]) for key in ("d_model", "num_heads", "num_layers")
    )
    window = reader.optional_integer("n_positions") or _TRAINED_TOKENS
    shared: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": reader.integer("vocab_size", known["vocab_size"]),
        "hidden_size": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": reader.integer("d_kv", 64),
        "ffn_size": reader.integer("d_ff", known["d_ff"]),
        "window_tokens": window,
        "activation": activation,
        "gated_ffn": gated,
        "norm_eps": reader.number("layer_norm_epsilon", 1e-6),
        "attention_scale": 1.0,
        "relative_buckets": reader.integer("relative_attention_num_buckets", 32),
        "relative_distance": reader.integer("relative_attention_max_distance", 128),
    }
    decoder_layers = (
        reader.optional_integer("num_decoder_layers", defaults.get("num_decoder_layers")) or layers
    )
    return ModelConfig(
        **shared,
        encoder=ModelConfig(**shared, layers=layers, tied_head=True),
        layers=decoder_layers,
        tied_head=scaled_head,
        logit_scale=hidden**-0.5 if scaled_head else 1.0,
    )


def write_t5(cfg: ModelConfig) -> dict[str, Any]:
    """The keys of the family's configs."""
    assert cfg.encoder is not None
    return {
        "is_encoder_decoder": True,
        "vocab_size": cfg.vocab_size,
        "d_model": cfg.hidden_size,
        "d_kv": cfg.head_dim,
        "d_ff": cfg.ffn_size,
        "num_heads": cfg.heads,
        "num_layers": cfg.encoder.layers,
        "num_decoder_layers": cfg.layers,
        "n_positions": cfg.window_tokens,
        "feed_forward_proj": _feed_forward(cfg),
        "layer_norm_epsilon": cfg.norm_eps,
        "relative_attention_num_buckets": cfg.relative_buckets,
        "relative_attention_max_distance": cfg.relative_distance,
    }


def _feed_forward(cfg: ModelConfig) -> str | None:
    """The name of the feed-forward block; None if the family has no such block."""
    names = {kind: name for name, kind in reversed(_FEED_FORWARDS.items())}
    return names.get((cfg.gated_ffn, cfg.activation))


def attention_tensors(layer: int, name: str, ours: str) -> tuple[Tensor, ...]:
    """The tensors of one attention of a layer, and of its norm."""
    lead = f"layer.{layer}."
    return (
        Tensor(f"{lead}layer_norm.weight", (f"{ours}_norm.scale",)),
        *(Tensor(f"{lead}{name}.{part}.weight", (f"{ours}.{part}",)) for part in "qkv"),
        Tensor(f"{lead}{name}.o.weight", (f"{ours}.o",), transposed=True),
    )


def feed_forward_tensors(layer: int, block: str = "DenseReluDense") -> tuple[Tensor, ...]:
    """The tensors of a feed-forward block, plain or gated, and of its norm."""
    lead = f"layer.{layer}."
    return (
        Tensor(f"{lead}layer_norm.weight", ("ffn_norm.scale",)),
        Tensor(f"{lead}{block}.wi_0.weight", ("ffn.gate",)),
        Tensor(f"{lead}{block}.wi_1.weight", ("ffn.up",), gated=True),
        Tensor(f"{lead}{block}.wi.weight", ("ffn.up",), gated=False),
        Tensor(f"{lead}{block}.wo.weight", ("ffn.down",), transposed=True),
    )


T5_TOP_TENSORS = (
    Tensor("shared.weight", ("embed.tokens",)),
    Tensor(
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        ("encoder.relative_positions",),
    ),
    Tensor("encoder.final_layer_norm.weight", ("encoder.final_norm.scale",)),
    Tensor("decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", ("relative_positions",)),
    Tensor("decoder.final_layer_norm.weight", ("final_norm.scale",)),
    Tensor("lm_head.weight", ("head",)),
)


def _read(reader: ConfigReader) -> ModelConfig:
    # Newer configs have a separate key, because they tie all heads that files lack.
    tied = reader.flag("tie_word_embeddings", True)
    scaled = reader.flag("scale_decoder_outputs", tied)
    return read_t5(reader, "t5", feed_forward="relu", scaled_head=scaled)


def _write(cfg: ModelConfig) -> dict[str, Any]:
    return {**write_t5(cfg), "tie_word_embeddings": cfg.tied_head, "scale_decoder_outputs": cfg.tied_head}


T5 = Architecture(
    model_type="t5",
    read_config=_read,
    write_config=_write,
    class_name="T5ForConditionalGeneration",
    top_tensors=T5_TOP_TENSORS,
    layer_tensors=(
        *attention_tensors(0, "SelfAttention", "attn"),
        *attention_tensors(1, "EncDecAttention", "cross"),
        *feed_forward_tensors(2),
    ),
    layer_prefix="decoder.block.{}.",
    prefixes=("",),
    inert_keys=T5_INERT_KEYS,
    buffers=T5_BUFFERS,
    copies=T5_COPIES,
    encoder_tensors=(*attention_tensors(0, "SelfAttention", "attn"), *feed_forward_tensors(1)),
    encoder_prefix="encoder.block.{}.",
    head_or_embedding=True,
)
