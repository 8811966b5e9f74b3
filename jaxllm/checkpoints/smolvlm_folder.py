"""Reads the encoder of images of a SmolVLM folder, and how images are cut for it; its text model is read by
`huggingface.py`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.checkpoints.huggingface import Checkpoint
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files.input_files import read_json
from jaxllm.models.config_parts import read_activation
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.encoder.image_input import AROUND, IMAGE, MAX_SIDE, WHOLE_IMAGE, ImageInput
from jaxllm.models.encoder.siglip import ImageEncoderConfig, image_encoder_shapes
from jaxllm.text.tokenizer import Tokenizer

_LEAD, _CONNECTOR = "model.vision_model.", "model.connector."
# Our name -> the folder's, without `weight` and `bias`.
_BELOW = {
    "patches": "embeddings.patch_embedding",
    "positions": "embeddings.position_embedding",
    "final_norm": "post_layernorm",
}
_WITHIN = {
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
    _require_tokens(checkpoint, image_id)
    return ImageInput(
        tile=_edge(found, "max_image_size", _DEFAULT_TILE),
        longest=min(MAX_SIDE, _edge(found, "size", _DEFAULT_LONGEST)),
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


def _edge(found: Mapping[str, Any], name: str, default: int) -> int:
    size = found.get(name, {"longest_edge": default})
    edge = size.get("longest_edge") if isinstance(size, dict) else None
    if type(edge) is not int:
        raise ConfigError(
            f"{PREPROCESSOR_FILES[0]}: {name} must be an object with a longest_edge, got {size!r:.80}"
        )
    return edge


def _channels(found: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    value = found.get(name, _IMAGENET_HALF)
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise ConfigError(f"{PREPROCESSOR_FILES[0]}: {name} must be three numbers, got {value!r:.80}")
    return tuple(value)


def _require_tokens(checkpoint: Checkpoint, image_id: int) -> None:
    tokenizer = Tokenizer(checkpoint.tokenizer)
    for text in (IMAGE, AROUND, WHOLE_IMAGE):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1 or (text == IMAGE and ids != [image_id]):
            raise CheckpointError(
                f"{checkpoint.folder}: the tokenizer has no token {text}"
                + (f" of the id {image_id}" if text == IMAGE else "")
                + "; take its files as their authors published them"
            )


def read_image_encoder(
    checkpoint: Checkpoint, *, widened: bool = True
) -> tuple[ImageEncoderConfig, dict[str, np.ndarray]]:
    """The encoder of a SmolVLM folder: its config, and its parameters, in float32 or (without `widened`) as
    they are stored.

    Raises:
      CheckpointError: the folder is of another model, or its tensors disagree with its config.
      ConfigError: a key is unknown, malformed or not supported.
    """
    folder, config = checkpoint.folder, checkpoint.config
    if config.get("model_type") != "smolvlm":
        raise CheckpointError(
            f"{folder} is of model_type {config.get('model_type')!r:.80}; images are read by smolvlm alone"
        )
    outer, section = ConfigReader(config), ConfigReader(config).section("vision_config")
    if section is None:
        raise ConfigError("config key 'vision_config' is missing: it has the shape of the encoder of images")
    reader = ConfigReader(config["vision_config"], "vision_config.", ignore_keys=checkpoint.ignore_keys)
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
    params = {}
    for name, shape in shapes.items():
        stored = stored_names[name]
        square = (cfg.channels, cfg.patch_size, cfg.patch_size)
        own = (cfg.hidden_size, *square) if name == "patches" else shape
        weights.check(stored, own)
        read = weights.read(stored, lambda each: each[:])
        params[name] = (read.astype(np.float32) if widened else read).reshape(shape)
    return cfg, params


def _stored(name: str) -> str:
    """The folder's name of a parameter."""
    if name == "connector":
        return f"{_CONNECTOR}modality_projection.proj.weight"
    ending = "bias" if name.endswith("bias") else "weight"
    plain = name.removesuffix("_bias").removesuffix(".bias").removesuffix(".scale")
    if not plain.startswith("layers."):
        return f"{_LEAD}{_BELOW[plain]}.{ending}"
    _, layer, part = plain.split(".", 2)
    return f"{_LEAD}encoder.layers.{layer}.{_WITHIN[part]}.{ending}"
