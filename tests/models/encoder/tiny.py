"""Tiny encoders, one for each kind of layer, with random parameters far from their initial values."""

import dataclasses
import functools
import json

import numpy as np
from safetensors.numpy import save_file

from jaxllm.checkpoints.encoder_folders import stored_name
from jaxllm.models.encoder.config import EncoderConfig
from jaxllm.models.encoder.mobilebert import embed_tokens, encode_layers, encoder_shapes

MOBILE = EncoderConfig(
    vocab_size=23, embedding_size=6, hidden_size=16, layers=2, heads=2, ffn_size=12, window_tokens=11,
    bottleneck_size=8, share_bottleneck=True, ffn_blocks=3, trigram_input=True,
)  # fmt: skip
# With an eps that shows, where transformers takes it and where it does not.
CONFIGS = {
    "mobile": MOBILE,
    "narrow-attention": dataclasses.replace(
        MOBILE, share_bottleneck=False, bottleneck_attention=True, norm="layer", norm_eps=0.1, ffn_blocks=1
    ),
    "no-bottleneck": dataclasses.replace(
        MOBILE, bottleneck_size=0, share_bottleneck=False, trigram_input=False, norm="layer", norm_eps=0.1,
        activation="gelu", ffn_blocks=2,
    ),
    "no-projection": dataclasses.replace(
        MOBILE, bottleneck_size=0, share_bottleneck=False, trigram_input=False, embedding_size=16,
        type_vocab_size=3, heads=4, ffn_blocks=1,
    ),
}  # fmt: skip


def random_values(shapes, seed=0):
    """Float32 parameters with which attention is far from uniform, and norms and biases show."""
    draw = np.random.default_rng(seed)

    def value(name, shape):
        noise = draw.standard_normal(shape).astype(np.float32)
        if name.endswith("norm.scale"):
            return np.float32(1) + np.float32(0.3) * noise
        if name.endswith("bias"):
            return np.float32(0.3) * noise
        if name.startswith("embed.") and name != "embed.projection":
            return noise
        # Without norms, what goes into the residual stream would grow from layer to layer.
        gain = 1.5 if name.endswith(("attn.q", "attn.k")) else 0.6
        return noise * np.float32(gain * shape[-1] ** -0.5)

    return {name: value(name, shape) for name, shape in shapes.items()}


@functools.cache
def params_of(cfg):
    return random_values(encoder_shapes(cfg))


def encode(params, tokens, mask, *, cfg, **how):
    """Hidden states of whole sequences."""
    hidden = embed_tokens(params, tokens, mask, cfg=cfg, **how)
    return encode_layers(params, hidden, mask, cfg=cfg, layers=range(cfg.layers))


def hf_keys(cfg):
    """The encoder as transformers' `MobileBertConfig`."""
    return {
        "vocab_size": cfg.vocab_size, "embedding_size": cfg.embedding_size, "hidden_size": cfg.hidden_size,
        "num_hidden_layers": cfg.layers, "num_attention_heads": cfg.heads, "intermediate_size": cfg.ffn_size,
        "max_position_embeddings": cfg.window_tokens, "use_bottleneck": cfg.bottleneck_size > 0,
        "intra_bottleneck_size": cfg.width, "use_bottleneck_attention": cfg.bottleneck_attention,
        "key_query_shared_bottleneck": cfg.share_bottleneck, "num_feedforward_networks": cfg.ffn_blocks,
        "trigram_input": cfg.trigram_input, "layer_norm_eps": cfg.norm_eps, "hidden_act": cfg.activation,
        "normalization_type": "layer_norm" if cfg.norm == "layer" else "no_norm",
        "type_vocab_size": cfg.type_vocab_size,
    }  # fmt: skip


def write_encoder(folder, cfg, params, **keys):
    """A folder that transformers' `MobileBertModel` loads; `keys` are further keys of its config."""
    folder.mkdir(exist_ok=True)
    own = {"model_type": "mobilebert", "pad_token_id": None, "classifier_activation": False}
    (folder / "config.json").write_text(json.dumps({**own, **hf_keys(cfg), **keys}))
    tensors = {stored_name(cfg, name): np.asarray(params[name]) for name in encoder_shapes(cfg)}
    if not cfg.projects_embeddings:
        # transformers always has this matrix.
        name, size = "embeddings.embedding_transformation", cfg.hidden_size
        tensors |= {f"{name}.weight": np.eye(size, dtype="f4"), f"{name}.bias": np.zeros(size, "f4")}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def tokens_of(cfg, batch, count, seed=1):
    return np.random.default_rng(seed).integers(0, cfg.vocab_size, (batch, count), dtype=np.int32)


def front_mask(lengths, count):
    """`[B, count]` bool: the first `lengths[b]` tokens of each row are real."""
    return np.arange(count) < np.asarray(lengths)[:, None]
