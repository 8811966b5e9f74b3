"""T5, mT5 and Switch Transformers: encoder-decoders with relative position biases, RMS norms and unscaled
attention.

Version 1.0 of T5 has a plain feed-forward block and multiplies the states before its tied head by D^-0.5;
version 1.1 has a gated one and a separate head. All layers use the position biases of the first one. mT5 is
version 1.1 for a hundred languages; the states before its head are not scaled.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxllm.config import Activation, ModelConfig
from jaxllm.models.config_parts import Fields, Part, keys, only, read_choice
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, Tensor, tensors

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
_INERT_KEYS = frozenset(
    ["dense_act_fn", "is_gated_act", "dropout_rate", "initializer_factor", "output_past", "n_positions"]
)
_TIED = "tie_word_embeddings"
_ENCODER_DECODER = only("is_encoder_decoder", (True,), "an encoder without a decoder gives no text")


def _keys(
    kind: str, scaled: Callable[[ConfigReader], bool], *, kind_key: str = "feed_forward_proj", **defaults: int
) -> tuple[Part, Part]:
    """The keys of the family.

    Args:
      kind: default of `kind_key`.
      scaled: whether the head's inputs are scaled and the head is tied.
      kind_key: key of the kind of feed-forward blocks.
      defaults: defaults of other keys that differ from T5's.
    """
    known = {**_DEFAULTS, **defaults}

    def read(reader: ConfigReader, fields: Fields) -> Fields:
        gated, activation = read_choice(reader, kind_key, kind, _FEED_FORWARDS)
        heads, layers = (reader.integer(key, known[key]) for key in ("num_heads", "num_layers"))
        shared: Fields = {
            **fields,
            "heads": heads,
            "kv_heads": heads,
            "head_dim": reader.integer("d_kv", 64),
            "window_tokens": reader.optional_integer("n_positions") or _TRAINED_TOKENS,
            "activation": activation,
            "gated_ffn": gated,
            "attention_scale": 1.0,
        }
        others = reader.optional_integer("num_decoder_layers", known.get("num_decoder_layers")) or layers
        tied = scaled(reader)
        encoder = ModelConfig(**shared, layers=layers, tied_head=True)
        scale = fields["hidden_size"] ** -0.5 if tied else 1.0
        return {**shared, "encoder": encoder, "layers": others, "tied_head": tied, "logit_scale": scale}

    def write(cfg: ModelConfig) -> dict[str, Any]:
        assert cfg.encoder is not None
        kinds = {kind: name for name, kind in reversed(_FEED_FORWARDS.items())}
        return {
            "is_encoder_decoder": True,
            "d_kv": cfg.head_dim,
            "num_heads": cfg.heads,
            "num_layers": cfg.encoder.layers,
            "num_decoder_layers": cfg.layers,
            "n_positions": cfg.window_tokens,
            # None if the family has no such block.
            kind_key: kinds.get((cfg.gated_ffn, cfg.activation)),
            _TIED: cfg.tied_head,
        }

    plain = keys(
        vocab_size=(known["vocab_size"], "vocab_size"),
        d_model=(known["d_model"], "hidden_size"),
        d_ff=(known["d_ff"], "ffn_size"),
        layer_norm_epsilon=(1e-6, "norm_eps"),
        relative_attention_num_buckets=(32, "relative_buckets"),
        relative_attention_max_distance=(128, "relative_distance"),
    )
    return plain, Part(read, write)


def _attention(layer: int, name: str, ours: str) -> tuple[Tensor, ...]:
    products = {f"layer.{layer}.{name}.{part}": f"{ours}.{part}" for part in "qkvo"}
    return tensors({f"layer.{layer}.layer_norm": f"{ours}_norm", **products})


def _feed_forward(layer: int, block: str = "DenseReluDense") -> tuple[Tensor, ...]:
    lead = f"layer.{layer}.{block}"
    norm = {f"layer.{layer}.layer_norm": "ffn_norm"}
    return (
        *tensors({**norm, f"{lead}.wi_0": "ffn.gate", f"{lead}.wo": "ffn.down"}),
        *tensors({f"{lead}.wi_1": "ffn.up"}, gated=True),
        *tensors({f"{lead}.wi": "ffn.up"}, gated=False),
    )


_ENCODER_ATTENTION = _attention(0, "SelfAttention", "attn")
_DECODER_ATTENTION = _ENCODER_ATTENTION + _attention(1, "EncDecAttention", "cross")
_BIASES = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
T5 = Architecture(
    model_type="t5",
    class_name="T5ForConditionalGeneration",
    parts=(
        _ENCODER_DECODER,
        # Newer configs have a separate key, because they tie all heads that files lack.
        *_keys("relu", lambda reader: reader.flag("scale_decoder_outputs", reader.flag(_TIED, True))),
        Part(lambda reader, fields: {}, lambda cfg: {"scale_decoder_outputs": cfg.tied_head}),
    ),
    top_tensors=(
        Tensor("shared.weight", ("embed.tokens",)),
        Tensor(f"encoder.{_BIASES}", ("encoder.relative_positions",)),
        Tensor(f"decoder.{_BIASES}", ("relative_positions",)),
        *tensors(
            {"encoder.final_layer_norm": "encoder.final_norm", "decoder.final_layer_norm": "final_norm"}
        ),
        Tensor("lm_head.weight", ("head",)),
    ),
    layer_tensors=_DECODER_ATTENTION + _feed_forward(2),
    layer_prefix="decoder.block.{}.",
    prefixes=("",),
    inert_keys=_INERT_KEYS,
    buffers=("EncDecAttention.relative_attention_bias.weight",),
    # Both sides have the one token embedding.
    copies={f"{side}.embed_tokens.weight": "embed.tokens" for side in ("encoder", "decoder")},
    encoder_tensors=_ENCODER_ATTENTION + _feed_forward(1),
    encoder_prefix="encoder.block.{}.",
    head_or_embedding=True,
)
MT5 = dataclasses.replace(
    T5,
    model_type="mt5",
    class_name="MT5ForConditionalGeneration",
    parts=(
        _ENCODER_DECODER,
        *_keys("gated-gelu", lambda _: False, vocab_size=250112, d_ff=1024, num_heads=6, num_layers=8),
    ),
    # Files have a separate head or none, independent of their config.
    inert_keys=_INERT_KEYS | {_TIED},
)


# Switch Transformers: T5 with experts of limited capacity in the feed-forward block of every few layers. A
# token only visits the most likely expert, weighted by its probability; tokens beyond the expert's capacity
# skip it.


def _read_switch(reader: ConfigReader, fields: Fields) -> Fields:
    encoder = fields["encoder"]
    count, capacity = reader.integer("num_experts", 8), reader.integer("expert_capacity", 64)

    def sparse(name: str, layers: int) -> Fields:
        wanted = reader.integer(f"num_sparse_{name}_layers", 3)
        step = layers // wanted if wanted > 0 else layers
        # A repetition of the two.
        reader.only(f"{name}_sparse_step", (None, step), "it follows from the numbers of layers")
        marked = tuple(step > 0 and (layer % step == 1 or step == 1) for layer in range(layers))
        if not any(marked):
            return {}
        return {
            "experts": count,
            "experts_per_token": 1,
            "normalize_expert_weights": False,
            "expert_capacity": capacity,
            "sparse_layers": marked,
        }

    encoder = dataclasses.replace(encoder, **sparse("encoder", encoder.layers))
    return {**sparse("decoder", fields["layers"]), "encoder": encoder}


def _write_switch(cfg: ModelConfig) -> dict[str, Any]:
    assert cfg.encoder is not None
    sides = {"encoder": cfg.encoder, "decoder": cfg}
    return {
        "num_experts": max(side.experts for side in sides.values()),
        "expert_capacity": max(side.expert_capacity for side in sides.values()),
        **{
            f"num_sparse_{name}_layers": sum(map(side.is_sparse, range(side.layers)))
            for name, side in sides.items()
        },
    }


def _experts(layer: int) -> tuple[Tensor, ...]:
    lead = f"layer.{layer}.mlp."
    expert = lead + "experts.expert_{expert}."
    experts = {f"{expert}wi": "experts.up", f"{expert}wo": "experts.down"}
    return _feed_forward(layer, "mlp") + tensors({f"{lead}router.classifier": "router", **experts})


SWITCH_TRANSFORMERS = dataclasses.replace(
    T5,
    model_type="switch_transformers",
    class_name="SwitchTransformersForConditionalGeneration",
    parts=(
        _ENCODER_DECODER,
        only("router_bias", (None, False), "routers with biases are not implemented"),
        only("router_ignore_padding_tokens", (None, False), "there are no padding tokens here to ignore"),
        only("router_dtype", ("float32",), "routers compute in float32, for which the paper asks"),
        *_keys(
            "relu",
            lambda reader: reader.flag(_TIED, True),
            kind_key="dense_act_fn",
            d_model=768,
            num_heads=12,
            num_layers=12,
            num_decoder_layers=12,
        ),
        Part(_read_switch, _write_switch),
    ),
    layer_tensors=_DECODER_ATTENTION + _experts(2),
    inert_keys=_INERT_KEYS - {"dense_act_fn"}
    | {"router_z_loss_coef", "router_aux_loss_coef", "add_router_probs", "add_cross_attention"},
    encoder_tensors=_ENCODER_ATTENTION + _experts(1),
)
