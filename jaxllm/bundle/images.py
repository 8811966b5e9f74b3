"""Reads and writes the encoder of images of a bundle: its weights, and how images are cut for it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.bundle.layout import Part
from jaxllm.bundle.reader import Bundle, Fields, PartFormat, require_parameters
from jaxllm.errors import ConfigError
from jaxllm.models.encoder.image_input import ImageInput
from jaxllm.models.encoder.siglip import ImageEncoderConfig, image_encoder_shapes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StoredImageEncoder:
    """An encoder of images with all data for its use.

    Attributes:
      input: size and splits of its input images.
      params: float arrays, those of `image_encoder_shapes(cfg)`.

    Raises:
      ConfigError: the fields do not fit each other.
    """

    cfg: ImageEncoderConfig
    input: ImageInput
    params: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        require_parameters(image_encoder_shapes(self.cfg), self.params)
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
    arrays = {name: np.asarray(encoder.params[name]) for name in image_encoder_shapes(encoder.cfg)}
    return {_IMAGES.name: Part(facts, arrays)}


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


def _read(bundle: Bundle, fields: Fields) -> StoredImageEncoder:
    found = StoredImageEncoder(
        cfg=ImageEncoderConfig(**fields.facts["config"]),
        input=ImageInput.from_json(fields.facts["input"]),
        params=fields.rest(),
    )
    if found.cfg.row_size != bundle.cfg.hidden_size:
        raise ConfigError(
            f"its rows have {found.cfg.row_size} numbers, the model takes {bundle.cfg.hidden_size}"
        )
    if found.input.image_id >= bundle.cfg.vocab_size:
        raise ConfigError(f"the token {found.input.image_id} of images is outside the vocabulary")
    return found


_IMAGES = PartFormat("image-encoder", "encoder of images", "prepare it again", _read)
read_image_encoder_part, has_image_encoder = _IMAGES.read, _IMAGES.is_in
