"""Reads encoders of Hugging Face folders: MobileBERT's, and SmolVLM's of images and how these are cut for it.

Pooler, language-model and classifier heads of MobileBERT are ignored. The text model of a SmolVLM folder is
read by `huggingface.py`, tokenizers are by `tokenizer_folder.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.checkpoints.huggingface import Checkpoint
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files.input_files import read_json
from jaxllm.models.config_parts import read_activation
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.encoder.config import EncoderConfig
from jaxllm.models.encoder.image_input import AROUND, IMAGE, MAX_SIDE, WHOLE_IMAGE, ImageInput
from jaxllm.models.encoder.mobilebert import encoder_shapes
from jaxllm.models.encoder.siglip import ImageEncoderConfig, image_encoder_shapes
from jaxllm.text.tokenizer import Tokenizer

# The first is the prefix of a model that was saved with a head.
_PREFIXES = ("mobilebert.", "")
_HEADS = ("cls.", "classifier.", "qa_outputs.", "mobilebert.pooler.", "pooler.")

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


def read_encoder(folder: Path) -> tuple[EncoderConfig, dict[str, np.ndarray]]:
    """The encoder of a MobileBERT folder.

    Args:
      folder: folder with config.json and `model.safetensors`, whole or sharded with its index.

    Returns:
      The config, and all of `encoder_shapes` in the stored type: float32, float16 or bfloat16 (ml_dtypes).

    Raises:
      CheckpointError: a file is missing, truncated or corrupt, or weights are not safetensors, or hold
        tensors of another model or disagree with the config.
      ConfigError: the model_type is another, or a key is unknown, malformed or not supported.
    """
    checkpoint = Checkpoint(folder)
    cfg, weights = config_from_hf(checkpoint.config), checkpoint.weights
    names, embedding = weights.names(), stored_name(cfg, "embed.tokens")
    # One prefix for the whole folder. If none fits, the usual one, for the message below.
    prefix = next((each for each in _PREFIXES if each + embedding in names), _PREFIXES[0])
    located = {name: prefix + stored_name(cfg, name) for name in encoder_shapes(cfg)}
    unused = [*_HEADS, f"{prefix}embeddings.position_ids"]
    if not cfg.projects_embeddings:
        unused.append(f"{prefix}{_BELOW['embed.projection']}.")
    extra = {name for name in names - {*located.values()} if not name.startswith(tuple(unused))}
    if cfg.bottleneck_attention:
        extra = {name for name in extra if ".bottleneck.attention." not in name}
    weights.require_complete({*located.values()} - names, extra, "a mobilebert model")
    for name, shape in encoder_shapes(cfg).items():
        weights.check(located[name], shape)
    return cfg, {name: weights.read(stored, lambda rows: rows[:]) for name, stored in located.items()}


def config_from_hf(config: Mapping[str, Any]) -> EncoderConfig:
    """Translates the JSON object of a config.json.

    Raises:
      ConfigError: the model_type is another, or a key is unknown, or its value not supported or malformed.
    """
    if config.get("model_type") != "mobilebert":
        raise ConfigError(
            f"model_type {config.get('model_type')!r:.80} is no encoder that is supported; use mobilebert"
        )
    reader = ConfigReader(config)
    reader.only("quantization_config", (None,), "quantized checkpoints are not read; take the float weights")
    reader.only("pruned_heads", (None, {}), "all heads of a layer have to be there")
    reader.only("add_cross_attention", (None, False), "an encoder attends to itself")
    reader.only("position_embedding_type", (None, "absolute"), "positions are learned")
    reader.only("normalization_type", ("no_norm", "layer_norm"), "MobileBERT has these norms")
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


def _stem_and_ending(name: str) -> tuple[str, str]:
    """Our name of a parameter without its ending, and transformers' ending."""
    stem = name.removesuffix("_bias").removesuffix(".bias").removesuffix(".scale")
    return stem, "bias" if name.endswith("bias") else "weight"


def stored_name(cfg: EncoderConfig, name: str) -> str:
    """The name of our parameter `name` in transformers' `MobileBertModel`."""
    name, ending = _stem_and_ending(name)
    if name in _BELOW:
        return f"{_BELOW[name]}.{ending}"
    _, layer, name = name.split(".", 2)
    if name.startswith("ffn."):
        _, block, name = name.split(".")
        within = _LAST_BLOCK[name] if int(block) == cfg.ffn_blocks - 1 else _BLOCK[name].format(block)
    else:
        within = _WITHIN[name]
    return f"encoder.layer.{layer}.{within}.{ending}"


# SmolVLM

_LEAD, _CONNECTOR = "model.vision_model.", "model.connector."
# Our name -> the folder's, without `weight` and `bias`.
_IMAGES_BELOW = {
    "patches": "embeddings.patch_embedding",
    "positions": "embeddings.position_embedding",
    "final_norm": "post_layernorm",
}
_IMAGES_WITHIN = {
    "attn_norm": "layer_norm1",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.out_proj",
    "ffn_norm": "layer_norm2",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}


# Files with the image preprocessing: of transformers 4, and of 5.
PREPROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
# Defaults of transformers' SmolVLMImageProcessor.
_DEFAULT_LONGEST, _DEFAULT_TILE, _LANCZOS = 4 * 364, 364, 1
_IMAGENET_HALF = (0.5, 0.5, 0.5)


def has_images(checkpoint: Checkpoint) -> bool:
    """Whether a folder is SmolVLM's, with the file of the image preprocessing."""
    return checkpoint.config.get("model_type") == "smolvlm" and _preprocessing(checkpoint) is not None


def read_image_input(checkpoint: Checkpoint) -> ImageInput:
    """The image splitting of a SmolVLM folder with a `preprocessor_config.json`, or a `processor_config.json`
    of transformers 5.

    Raises:
      CheckpointError: there is no such file, or the tokenizer lacks the tokens of images.
      ConfigError: a key is malformed or has an unsupported value.
    """
    found = _preprocessing(checkpoint)
    if found is None:
        raise CheckpointError(
            f"{checkpoint.folder} does not say how images are cut; copy the model's {PREPROCESSOR_FILES[0]} "
            "into it"
        )
    reader = ConfigReader(found, f"{PREPROCESSOR_FILES[0]}: ")
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        reader.only(name, (True, None), "images are always resized, rescaled and normalized")
    image_id = ConfigReader(checkpoint.config).integer("image_token_id", 128257)
    tokenizer = Tokenizer(checkpoint.tokenizer)
    for text in (IMAGE, AROUND, WHOLE_IMAGE):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1 or (text == IMAGE and ids != [image_id]):
            of = f" of the id {image_id}" if text == IMAGE else ""
            raise CheckpointError(
                f"{checkpoint.folder}: the tokenizer has no token {text}{of}; take its files as their "
                "authors published them"
            )

    def edge(name: str, default: int) -> int:
        section = reader.section(name)
        if section is None:
            return default
        section.require("longest_edge", "images are cut by it")
        return section.integer("longest_edge", default)

    return ImageInput(
        tile=edge("max_image_size", _DEFAULT_TILE),
        longest=min(MAX_SIDE, edge("size", _DEFAULT_LONGEST)),
        splits=bool(reader.flag("do_image_splitting", True)),
        mean=_channels(found, "image_mean"),
        std=_channels(found, "image_std"),
        scale=reader.number("rescale_factor", 1 / 255),
        resample=reader.integer("resample", _LANCZOS),
        image_id=image_id,
    )


def _preprocessing(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The JSON object of the image preprocessing; None if no file has one."""
    for path in (checkpoint.folder / name for name in PREPROCESSOR_FILES):
        whole = read_json(path, "take it as its authors published it") if path.is_file() else {}
        found = whole.get("image_processor", whole)
        if isinstance(found, dict) and "max_image_size" in found:
            return found
    return None


def _channels(found: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    value = found.get(name, _IMAGENET_HALF)
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise ConfigError(f"{PREPROCESSOR_FILES[0]}: {name} must be three numbers, got {value!r:.80}")
    return tuple(value)


def read_image_encoder(checkpoint: Checkpoint) -> tuple[ImageEncoderConfig, dict[str, np.ndarray]]:
    """The encoder of a SmolVLM folder: its config, and its parameters as they are stored.

    Raises:
      CheckpointError: the folder is of another model, or its tensors disagree with its config.
      ConfigError: a key is unknown, malformed or not supported.
    """
    folder, config = checkpoint.folder, checkpoint.config
    if config.get("model_type") != "smolvlm":
        raise CheckpointError(
            f"{folder} is of model_type {config.get('model_type')!r:.80}; images are read by smolvlm alone"
        )
    outer = ConfigReader(config, ignore_keys=checkpoint.ignore_keys)
    reader = outer.section("vision_config")
    if reader is None:
        raise ConfigError("config key 'vision_config' is missing: it has the shape of the encoder of images")
    reader.only("model_type", ("smolvlm_vision",), "it is the only encoder that is read")
    cfg = ImageEncoderConfig(
        image_size=reader.integer("image_size", 224),
        patch_size=reader.integer("patch_size", 32),
        channels=reader.integer("num_channels", 3),
        hidden_size=reader.integer("hidden_size", 1152),
        ffn_size=reader.integer("intermediate_size", 3072),
        layers=reader.integer("num_hidden_layers", 12),
        heads=reader.integer("num_attention_heads", 16),
        activation=read_activation(reader, "hidden_act", "gelu_pytorch_tanh"),
        norm_eps=reader.number("layer_norm_eps", 1e-6),
        shuffle=outer.integer("scale_factor", 2),
        row_size=checkpoint.cfg.hidden_size,
    )
    reader.finish(inert_keys={"attention_dropout", "size", "max_image_size", "use_base_siglip"})
    weights, shapes = checkpoint.weights, image_encoder_shapes(cfg)
    own_names = {name for name in weights.names() if name.startswith((_LEAD, _CONNECTOR))}
    stored_names = {name: _stored(name) for name in shapes}
    wanted = set(stored_names.values())
    # Older folders store numbers of positions, which are counted here.
    extra = own_names - wanted - {f"{_LEAD}embeddings.position_ids"}
    weights.require_complete(wanted - own_names, extra, "an encoder of images")
    patches = (cfg.hidden_size, cfg.channels, cfg.patch_size, cfg.patch_size)
    params = {}
    for name, stored in stored_names.items():
        weights.check(stored, patches if name == "patches" else shapes[name])
        params[name] = weights.read(stored, lambda each: each[:]).reshape(shapes[name])
    return cfg, params


def _stored(name: str) -> str:
    if name == "connector":
        return f"{_CONNECTOR}modality_projection.proj.weight"
    plain, ending = _stem_and_ending(name)
    if not plain.startswith("layers."):
        return f"{_LEAD}{_IMAGES_BELOW[plain]}.{ending}"
    _, layer, part = plain.split(".", 2)
    return f"{_LEAD}encoder.layers.{layer}.{_IMAGES_WITHIN[part]}.{ending}"
