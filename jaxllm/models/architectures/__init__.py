"""Registry of architectures by Hugging Face `model_type`: a name here, or an entry point of the group
`jaxllm.architectures`; and multimodal folders, of which only the text model is read, if it is one of these.

Such a wrapper's config.json has the text model's config as the section `text_config`; its tensors have
longer prefixes, next to those of the encoders of images and sound, which are skipped by name.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.architectures.gemma import GEMMA, GEMMA2, GEMMA3_TEXT, GEMMA4_TEXT
from jaxllm.models.architectures.gpt2 import BART, GPT2, MARIAN, MBART, OPT
from jaxllm.models.architectures.gpt_oss import GPT_OSS
from jaxllm.models.architectures.lfm2 import LFM2
from jaxllm.models.architectures.llama import (
    GRANITE,
    GRANITEMOEHYBRID,
    LLAMA,
    MINISTRAL3,
    MISTRAL,
    MIXTRAL,
    SMOLLM3,
)
from jaxllm.models.architectures.olmo import EXAONE4, OLMO2, OLMO3, OLMOE
from jaxllm.models.architectures.phi import ERNIE4_5, PHI, PHI3, STABLELM
from jaxllm.models.architectures.qwen import (
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_5_MOE_TEXT,
    QWEN3_5_TEXT,
    QWEN3_MOE,
)
from jaxllm.models.architectures.t5 import MT5, SWITCH_TRANSFORMERS, T5
from jaxllm.models.config_reader import ConfigReader, refuse_quantized
from jaxllm.models.translate import Architecture
from jaxllm.registry import Registry

_OWN = (
    BART, ERNIE4_5, EXAONE4, GEMMA, GEMMA2, GEMMA3_TEXT, GEMMA4_TEXT, GPT2, GPT_OSS, GRANITE,
    GRANITEMOEHYBRID, LFM2, LLAMA, MARIAN, MBART, MINISTRAL3, MISTRAL, MIXTRAL, MT5, OLMO2, OLMO3, OLMOE, OPT,
    PHI, PHI3, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT, SMOLLM3, STABLELM,
    SWITCH_TRANSFORMERS, T5,
)  # fmt: skip
ARCHITECTURES: Registry[Architecture] = Registry(
    "jaxllm.architectures", {each.model_type: each for each in _OWN}
)


def architecture(model_type: object) -> Architecture:
    """The architecture of a config.json's `model_type`.

    Raises:
      ConfigError: it is not one of those in `ARCHITECTURES`.
    """
    if isinstance(model_type, str) and model_type in ARCHITECTURES:
        return ARCHITECTURES[model_type]
    raise ConfigError(
        f"model_type {model_type!r} is not supported; supported are {', '.join(ARCHITECTURES)}; use a "
        "checkpoint of one of these, or add one by an entry point of jaxllm.architectures"
    )


# Keys of text models that describe how images enter, or that only training reads.
_INERT_TEXT_KEYS = frozenset(
    {"neftune_noise_alpha", "perceiver_config", "pixel_shuffle_factor", "use_resampler"}
)
# Three axes of position are one for text: rotary embeddings by axes are then plain ones.
_TEXT_ROPE_KEYS = frozenset({"mrope_interleaved", "mrope_section"})
_SECTION = "text_config."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapper:
    """One multimodal `model_type`.

    Attributes:
      text_types: `model_type` of a text model -> that of the architecture that reads it; the first is the
        default.
      layouts: prefixes of the text model's tensors and of its head, one pair per spelling.
      skipped: prefixes of tensors that texts do not need.
      keys: keys of config.json that texts do not need.
      text_defaults: values of the wrapper's class for keys of the text model that differ from its
        architecture's.
    """

    text_types: Mapping[str, str]
    layouts: tuple[tuple[str, str], ...]
    skipped: tuple[str, ...]
    keys: frozenset[str]
    text_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# As transformers 5 writes it, and as version 4 did.
_LAYOUTS = (("model.language_model.", ""), ("language_model.model.", "language_model."))
_TOWER = ("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector.")

_QWEN_KEYS = frozenset({"image_token_id", "video_token_id", "vision_end_token_id", "vision_start_token_id"})
WRAPPERS: dict[str, Wrapper] = {
    "gemma3": Wrapper(
        text_types={"gemma3_text": "gemma3_text"},
        layouts=_LAYOUTS,
        skipped=_TOWER,
        keys=frozenset(
            {
                "boi_token_id", "boi_token_index", "eoi_token_id", "eoi_token_index", "image_token_id",
                "image_token_index", "mm_tokens_per_image",
            }
        ),
    ),
    "gemma4": Wrapper(
        text_types={"gemma4_text": "gemma4_text"},
        layouts=_LAYOUTS[:1],
        skipped=(
            "model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio.",
        ),
        keys=frozenset(
            {
                "audio_config", "audio_token_id", "boa_token_id", "boi_token_id", "eoa_token_id",
                "eoa_token_index", "eoi_token_id", "image_token_id", "video_token_id",
                "vision_soft_tokens_per_image",
            }
        ),
    ),
    "mistral3": Wrapper(
        text_types={"mistral": "mistral", "ministral3": "ministral3"},
        layouts=_LAYOUTS,
        skipped=_TOWER,
        keys=frozenset(
            {
                "image_token_id", "image_token_index", "multimodal_projector_bias", "projector_hidden_act",
                "spatial_merge_size", "vision_feature_layer",
            }
        ),
    ),
    "qwen3_vl": Wrapper(
        text_types={"qwen3_vl_text": "qwen3"},
        layouts=_LAYOUTS[:1],
        skipped=("model.visual.",),
        keys=_QWEN_KEYS,
        text_defaults={"max_position_embeddings": 128000, "rope_theta": 5e5},
    ),
    "qwen3_5": Wrapper(
        text_types={"qwen3_5_text": "qwen3_5_text"},
        layouts=_LAYOUTS[:1],
        # Layers that predict further tokens are not read, either.
        skipped=("model.visual.", "mtp."),
        keys=_QWEN_KEYS,
    ),
    "qwen3_5_moe": Wrapper(
        text_types={"qwen3_5_moe_text": "qwen3_5_moe_text"},
        layouts=_LAYOUTS[:1],
        skipped=("model.visual.", "mtp."),
        keys=_QWEN_KEYS,
    ),
    "smolvlm": Wrapper(
        text_types={"llama": "llama"},
        layouts=(("model.text_model.", ""),),
        skipped=("model.vision_model.", "model.connector."),
        keys=frozenset({"_pad_token_id", "image_seq_len", "image_token_id", "scale_factor", "vocab_size"}),
    ),
}  # fmt: skip


def read_text_config(config: Mapping[str, Any], *, ignore_keys: Collection[str] = ()) -> ModelConfig:
    """The model of a config.json: the text model of a wrapper, or the model itself.

    Args:
      ignore_keys: keys to ignore, see `ConfigReader`; those of the text model start with `text_config.`.

    Raises:
      ConfigError: the model_type or that of the text model is not supported, or a key is unknown, malformed
        or not supported.
    """
    model_type, text = config.get("model_type"), config.get("text_config")
    # A malformed config may have a list there, which no dict can look up.
    wrapper = WRAPPERS.get(model_type) if isinstance(model_type, str) else None
    if wrapper is None:
        if isinstance(text, dict) and not (isinstance(model_type, str) and model_type in ARCHITECTURES):
            raise ConfigError(
                f"the multimodal model_type {model_type!r:.80}, with the text model "
                f"{text.get('model_type')!r:.80}, is not supported; supported are {', '.join(WRAPPERS)}: "
                "use a checkpoint of one of these, or the text model as a folder of its own"
            )
        return architecture(model_type).config_from_hf(config, ignore_keys=ignore_keys)
    reader = ConfigReader(config, ignore_keys=ignore_keys)
    refuse_quantized(reader)
    if not isinstance(text, dict) or not text:
        raise ConfigError(
            f"config key 'text_config' must be the text model's config, got {text!r:.80}; take config.json "
            "as its authors published it"
        )
    kept = {key: value for key, value in text.items() if key not in _INERT_TEXT_KEYS}
    plain = {**wrapper.text_defaults, **kept}
    if config.get("tie_word_embeddings") is not None:
        # The wrapper's key has precedence over the text model's.
        plain["tie_word_embeddings"] = reader.flag("tie_word_embeddings", False)
    reader.finish(inert_keys={*wrapper.keys, "text_config", "vision_config"})
    named = ConfigReader(text, _SECTION).text("model_type", next(iter(wrapper.text_types)))
    if named not in wrapper.text_types:
        raise ConfigError(
            f"{model_type} with the text model {named[:80]!r} is not supported; supported with "
            f"{', '.join(wrapper.text_types)}: use a checkpoint with that text model"
        )
    for name in ("rope_parameters", "rope_scaling"):
        section = plain.get(name)
        if isinstance(section, dict):
            plain[name] = {key: value for key, value in section.items() if key not in _TEXT_ROPE_KEYS}
    family = architecture(wrapper.text_types[named])
    plain["model_type"] = family.model_type
    return family.config_from_hf(plain, ignore_keys=ignore_keys, path=_SECTION)
