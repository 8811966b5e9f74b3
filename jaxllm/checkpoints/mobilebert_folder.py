"""Reads and writes Hugging Face folders of MobileBERT: config.json and safetensors, as our encoder.

Pooler, language-model and classifier heads are ignored. Only data is read, never pickles. Tokenizers are read
by `tokenizer_folder.py`.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.checkpoints.huggingface import CONFIG_FILE
from jaxllm.checkpoints.safetensors_folder import (
    WEIGHTS_FILE,
    SafetensorsFolder,
    Tensors,
    check_parameters,
    write_checkpoint,
)
from jaxllm.errors import ConfigError
from jaxllm.files.input_files import read_json
from jaxllm.models.config_parts import read_activation, write_activation
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.encoder.config import EncoderConfig
from jaxllm.models.encoder.mobilebert import encoder_shapes

# The first is the prefix of a model that was saved with a head.
_PREFIXES = ("mobilebert.", "")
_HEADS = ("cls.", "classifier.", "qa_outputs.", "mobilebert.pooler.", "pooler.")

_NORMS = {"no_norm": "no_norm", "layer_norm": "layer"}
# Dropouts, and settings of the heads.
_INERT_KEYS = frozenset(
    ["attention_probs_dropout_prob", "classifier_activation", "hidden_dropout_prob", "tie_word_embeddings"]
)

# Our name -> transformers' name, without `.scale`, `.bias`, `_bias` and `.weight`.
_BELOW = {
    "embed.tokens": "embeddings.word_embeddings",
    "embed.positions": "embeddings.position_embeddings",
    "embed.types": "embeddings.token_type_embeddings",
    "embed.projection": "embeddings.embedding_transformation",
    "embed.norm": "embeddings.LayerNorm",
}
_WITHIN = {
    "narrow": "bottleneck.input.dense",
    "narrow_norm": "bottleneck.input.LayerNorm",
    "attn.narrow": "bottleneck.attention.dense",
    "attn.narrow_norm": "bottleneck.attention.LayerNorm",
    "attn.q": "attention.self.query",
    "attn.k": "attention.self.key",
    "attn.v": "attention.self.value",
    "attn.o": "attention.output.dense",
    "attn_norm": "attention.output.LayerNorm",
    "widen": "output.bottleneck.dense",
    "widen_norm": "output.bottleneck.LayerNorm",
}
# Names of a layer's feed-forward blocks but the last, which has names of its own.
_BLOCK = {
    "up": "ffn.{}.intermediate.dense",
    "down": "ffn.{}.output.dense",
    "norm": "ffn.{}.output.LayerNorm",
}
_LAST_BLOCK = {"up": "intermediate.dense", "down": "output.dense", "norm": "output.LayerNorm"}


def read_encoder(
    folder: Path, *, ignore_keys: Collection[str] = ()
) -> tuple[EncoderConfig, dict[str, np.ndarray]]:
    """The encoder of a MobileBERT folder.

    Args:
      folder: folder with config.json and `model.safetensors`, whole or sharded with its index.
      ignore_keys: unknown keys of the config to ignore.

    Returns:
      The config, and all of `encoder_shapes` in the stored type: float32, float16 or bfloat16 (ml_dtypes).

    Raises:
      CheckpointError: a file is missing, truncated or corrupt, or weights are not safetensors, or hold
        tensors of another model or disagree with the config.
      ConfigError: the model_type is another, or a key is unknown, malformed or not supported.
    """
    folder = Path(folder)
    config = read_json(folder / CONFIG_FILE, "give the path of a MobileBERT folder")
    cfg = config_from_hf(config, ignore_keys=ignore_keys)
    weights = SafetensorsFolder(folder)
    located = _locate(cfg, weights)
    for name, shape in encoder_shapes(cfg).items():
        weights.check(located[name], shape)
    return cfg, {name: weights.read(stored, lambda rows: rows[:]) for name, stored in located.items()}


def write_encoder(
    folder: Path,
    cfg: EncoderConfig,
    params: Mapping[str, np.ndarray | jax.Array],
    *,
    extra_config: Mapping[str, Any] | None = None,
) -> None:
    """Writes a folder that transformers' `MobileBertModel.from_pretrained` loads.

    Args:
      folder: folder, created if missing; its config.json and model.safetensors are replaced, each atomically.
      cfg: config of the encoder.
      params: all of its parameters, as floats.
      extra_config: further keys for config.json that do not change the encoder, such as `pad_token_id`
        (null by default).

    Raises:
      ConfigError: an extra key is not inert.
      CheckpointError: parameters are missing, unknown, of a wrong shape or not floats.
    """
    folder, shapes = Path(folder), encoder_shapes(cfg)
    config = {**_config_to_hf(cfg), "pad_token_id": None, **(extra_config or {})}
    if config_from_hf(config) != cfg:
        raise ConfigError(f"extra_config {extra_config!r} changes the encoder; pass inert keys alone")
    check_parameters(shapes, params)
    config["torch_dtype"] = np.dtype(params["embed.tokens"].dtype).name
    tensors: Tensors = {
        stored_name(cfg, name): (np.dtype(params[name].dtype), shape, lambda n=name: np.asarray(params[n]))
        for name, shape in shapes.items()
    }
    if not cfg.projects_embeddings:
        # transformers always has this matrix, and would warn that it is randomly initialized.
        size, stored = cfg.hidden_size, _BELOW["embed.projection"]
        dtype = np.dtype(params["embed.tokens"].dtype)
        tensors[f"{stored}.weight"] = dtype, (size, size), lambda: np.eye(size, dtype=dtype)
        tensors[f"{stored}.bias"] = dtype, (size,), lambda: np.zeros(size, dtype)
    write_checkpoint(folder / CONFIG_FILE, config, folder / WEIGHTS_FILE, tensors)


def config_from_hf(config: Mapping[str, Any], *, ignore_keys: Collection[str] = ()) -> EncoderConfig:
    """Translates a config.json.

    Args:
      config: the JSON object.
      ignore_keys: unknown keys to ignore.

    Raises:
      ConfigError: the model_type is another, or a key is unknown, or its value not supported or malformed.
    """
    if config.get("model_type") != "mobilebert":
        raise ConfigError(
            f"model_type {config.get('model_type')!r:.80} is no encoder that is supported; use mobilebert"
        )
    reader = ConfigReader(config, ignore_keys=ignore_keys)
    reader.only("model_type", ("mobilebert",), "other encoders have other layers")
    reader.only("quantization_config", (None,), "quantized checkpoints are not read; take the float weights")
    reader.only("pruned_heads", (None, {}), "all heads of a layer have to be there")
    reader.only("add_cross_attention", (None, False), "an encoder attends to itself")
    reader.only("position_embedding_type", (None, "absolute"), "positions are learned")
    reader.only("normalization_type", tuple(_NORMS), "MobileBERT has these norms")
    hidden = reader.integer("hidden_size", 512)
    bottleneck, narrow = reader.flag("use_bottleneck", True), reader.integer("intra_bottleneck_size", 128)
    reader.only(
        "true_hidden_size", (None, narrow if bottleneck else hidden), "it follows from the other sizes"
    )
    narrow_attention = reader.flag("use_bottleneck_attention", False)
    # With `use_bottleneck_attention`, the matrix of this flag exists but is never used.
    shared = reader.flag("key_query_shared_bottleneck", True) and not narrow_attention
    cfg = EncoderConfig(
        vocab_size=reader.integer("vocab_size", 30522),
        embedding_size=reader.integer("embedding_size", 128),
        hidden_size=hidden,
        layers=reader.integer("num_hidden_layers", 24),
        heads=reader.integer("num_attention_heads", 4),
        ffn_size=reader.integer("intermediate_size", 512),
        window_tokens=reader.integer("max_position_embeddings", 512),
        bottleneck_size=narrow if bottleneck else 0,
        share_bottleneck=bottleneck and shared,
        bottleneck_attention=bottleneck and narrow_attention,
        ffn_blocks=reader.integer("num_feedforward_networks", 4),
        trigram_input=reader.flag("trigram_input", True),
        norm="layer" if reader.text("normalization_type", "no_norm") == "layer_norm" else "no_norm",
        norm_eps=reader.number("layer_norm_eps", 1e-12),
        activation=read_activation(reader, "hidden_act", "relu"),
        type_vocab_size=reader.integer("type_vocab_size", 2),
    )
    reader.finish(inert_keys=_INERT_KEYS)
    return cfg


def _config_to_hf(cfg: EncoderConfig) -> dict[str, Any]:
    return {
        "architectures": ["MobileBertModel"],
        "model_type": cfg.model_type,
        "vocab_size": cfg.vocab_size,
        "embedding_size": cfg.embedding_size,
        "hidden_size": cfg.hidden_size,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "intermediate_size": cfg.ffn_size,
        "max_position_embeddings": cfg.window_tokens,
        "use_bottleneck": bool(cfg.bottleneck_size),
        "intra_bottleneck_size": cfg.width,
        "true_hidden_size": cfg.width,
        "use_bottleneck_attention": cfg.bottleneck_attention,
        "key_query_shared_bottleneck": cfg.share_bottleneck,
        "num_feedforward_networks": cfg.ffn_blocks,
        "trigram_input": cfg.trigram_input,
        "normalization_type": {ours: theirs for theirs, ours in _NORMS.items()}[cfg.norm],
        "layer_norm_eps": cfg.norm_eps,
        "hidden_act": write_activation(cfg.activation),
        "type_vocab_size": cfg.type_vocab_size,
        # True would need a matrix for the pooler.
        "classifier_activation": False,
    }


def stored_name(cfg: EncoderConfig, name: str) -> str:
    """The name of our parameter `name` in transformers' `MobileBertModel`."""
    ending = "bias" if name.endswith("bias") else "weight"
    name = name.removesuffix("_bias").removesuffix(".bias").removesuffix(".scale")
    if name in _BELOW:
        return f"{_BELOW[name]}.{ending}"
    _, layer, name = name.split(".", 2)
    if name.startswith("ffn."):
        _, block, name = name.split(".")
        within = _LAST_BLOCK[name] if int(block) == cfg.ffn_blocks - 1 else _BLOCK[name].format(block)
    else:
        within = _WITHIN[name]
    return f"encoder.layer.{layer}.{within}.{ending}"


def _locate(cfg: EncoderConfig, weights: SafetensorsFolder) -> dict[str, str]:
    """The stored name of every parameter; raises CheckpointError for other tensors of the encoder."""
    names = weights.names()
    embedding = stored_name(cfg, "embed.tokens")
    # One prefix for the whole folder. If none fits, the usual one, for the message below.
    prefix = next((each for each in _PREFIXES if each + embedding in names), _PREFIXES[0])
    located = {name: prefix + stored_name(cfg, name) for name in encoder_shapes(cfg)}
    stored = set(located.values())
    extra = {name for name in names - stored if not _never_read(cfg, name.removeprefix(prefix), name)}
    weights.require_complete(stored - names, extra, "a mobilebert model")
    return located


def _never_read(cfg: EncoderConfig, within: str, name: str) -> bool:
    """Whether a stored tensor does not belong to the encoder, or is not used by it."""
    unused = {"embeddings.position_ids"}
    if not cfg.projects_embeddings:
        unused |= {f"{_BELOW['embed.projection']}.{ending}" for ending in ("weight", "bias")}
    if cfg.bottleneck_attention and ".bottleneck.attention." in within:
        return True
    return name.startswith(_HEADS) or within in unused
