"""Reads and writes the encoder of images of a bundle: its weights, and how images are cut for it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.bundle.layout import Part
from jaxllm.bundle.reader import Bundle
from jaxllm.errors import BundleError, ConfigError
from jaxllm.models.encoder.image_input import ImageInput
from jaxllm.models.encoder.siglip import ImageEncoderConfig, image_encoder_shapes

_PART = "image-encoder"
_FLOATS = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StoredImageEncoder:
    """An encoder of images with all data for its use.

    Attributes:
      cfg: its shape.
      input: size and splits of its input images.
      params: float arrays, those of `image_encoder_shapes(cfg)`.

    Raises:
      ConfigError: the fields do not fit each other.
    """

    cfg: ImageEncoderConfig
    input: ImageInput
    params: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        shapes = image_encoder_shapes(self.cfg)
        if wrong := self.params.keys() ^ shapes.keys():
            raise ConfigError(f"the parameters and the config disagree on {min(wrong)}")
        for name, shape in shapes.items():
            value = self.params[name]
            if tuple(value.shape) != shape or value.dtype.name not in _FLOATS:
                raise ConfigError(
                    f"parameter {name} must be floats of shape {list(shape)}, got {value.dtype.name} "
                    f"{list(value.shape)}"
                )
        if self.input.tile != self.cfg.image_size or self.cfg.channels != 3:
            raise ConfigError(
                f"tiles of {self.input.tile} pixels and 3 channels do not fit an encoder of images of "
                f"{self.cfg.image_size} and {self.cfg.channels}"
            )

    @property
    def size_bytes(self) -> int:
        """Bytes of its parameters as stored."""
        return sum(each.nbytes for each in self.params.values())


def image_encoder_parts(encoder: StoredImageEncoder) -> dict[str, Part]:
    """The part of a bundle with an encoder of images, for `write_bundle`."""
    facts = {"config": encoder.cfg.to_json(), "input": encoder.input.to_json()}
    return {
        _PART: Part(
            facts, {name: np.asarray(encoder.params[name]) for name in image_encoder_shapes(encoder.cfg)}
        )
    }


def has_image_encoder(bundle: Bundle) -> bool:
    """Whether a bundle has an encoder of images."""
    return _PART in bundle.layout.parts


def read_image_encoder_part(bundle: Bundle) -> StoredImageEncoder | None:
    """The encoder of images of a bundle, its arrays views of the file; None if it has none.

    Raises:
      BundleError: it is corrupt, malformed, or does not fit the bundle's model.
    """
    part = bundle.load_part(_PART)
    if part is None:
        return None
    try:
        found = StoredImageEncoder(
            cfg=ImageEncoderConfig(**part.facts["config"]),
            input=ImageInput.from_json(part.facts["input"]),
            params=part.arrays,
        )
        _check_fit(bundle, found)
    except (KeyError, TypeError, ConfigError) as error:
        raise BundleError(
            f"{bundle.path}: its encoder of images is malformed ({error!s:.300}); prepare it again"
        ) from error
    return found


def image_encoder_facts(bundle: Bundle) -> dict[str, Any]:
    """The encoder of images of a bundle, for display; empty if it has none."""
    found = read_image_encoder_part(bundle)
    if found is None:
        return {}
    return {
        "image_encoder": {
            "tile_pixels": found.input.tile,
            "rows_per_tile": found.cfg.rows,
            "longest_side": found.input.longest,
            "bytes": found.size_bytes,
        }
    }


def _check_fit(bundle: Bundle, found: StoredImageEncoder) -> None:
    if found.cfg.row_size != bundle.cfg.hidden_size:
        raise ConfigError(
            f"its rows have {found.cfg.row_size} numbers, the model takes {bundle.cfg.hidden_size}"
        )
    if found.input.image_id >= bundle.cfg.vocab_size:
        raise ConfigError(f"the token {found.input.image_id} of images is outside the vocabulary")
