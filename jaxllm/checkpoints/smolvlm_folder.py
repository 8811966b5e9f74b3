"""Reads the encoder of images of a SmolVLM folder; its text model is read by `huggingface.py`."""

from pathlib import Path

import numpy as np

from jaxllm.checkpoints.huggingface import CONFIG_FILE
from jaxllm.checkpoints.safetensors_folder import SafetensorsFolder
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files.input_files import read_json
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.encoder.siglip import ImageEncoderConfig, image_encoder_shapes
from jaxllm.models.translate import read_activation
from jaxllm.models.wrappers import read_text_config

_LEAD = "model.vision_model."
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


def read_image_encoder(folder: Path) -> tuple[ImageEncoderConfig, dict[str, np.ndarray]]:
    """The encoder of a SmolVLM folder: its config, and its parameters in float32.

    Raises:
      CheckpointError: the folder is of another model, or its tensors disagree with its config.
      ConfigError: a key is unknown, malformed or not supported.
    """
    config = read_json(Path(folder) / CONFIG_FILE, "give the path of a SmolVLM folder")
    if config.get("model_type") != "smolvlm":
        raise CheckpointError(
            f"{folder} is of model_type {config.get('model_type')!r:.80}; images are read by smolvlm alone"
        )
    outer, section = ConfigReader(config), ConfigReader(config).section("vision_config")
    if section is None:
        raise ConfigError("config key 'vision_config' is missing: it has the shape of the encoder of images")
    reader = ConfigReader(config["vision_config"], "vision_config.")
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
        row_size=read_text_config(config).hidden_size,
    )
    reader.finish(inert_keys={"attention_dropout", "size", "max_image_size", "use_base_siglip"})
    weights = SafetensorsFolder(Path(folder))
    params = {}
    for name, shape in image_encoder_shapes(cfg).items():
        stored = _stored(name)
        if stored not in weights.names():
            raise CheckpointError(f"{folder} lacks {stored} of the encoder of images; download it again")
        square = (cfg.channels, cfg.patch_size, cfg.patch_size)
        own = (cfg.hidden_size, *square) if name == "patches" else shape
        weights.check(stored, own)
        read = weights.read(stored, lambda each: each[:])
        params[name] = read.astype(np.float32).reshape(shape)
    return cfg, params


def _stored(name: str) -> str:
    """The folder's name of a parameter."""
    if name == "connector":
        return "model.connector.modality_projection.proj.weight"
    ending = "bias" if name.endswith("bias") else "weight"
    plain = name.removesuffix("_bias").removesuffix(".bias").removesuffix(".scale")
    if not plain.startswith("layers."):
        return f"{_LEAD}{_BELOW[plain]}.{ending}"
    _, layer, part = plain.split(".", 2)
    return f"{_LEAD}encoder.layers.{layer}.{_WITHIN[part]}.{ending}"
