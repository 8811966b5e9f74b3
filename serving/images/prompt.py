"""Puts images into prompts: their tokens and their rows. Imports no JAX."""

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.models.encoder.image_input import IMAGE, image_text, tiles_of
from jaxllm.serving.ground.prompt_rows import PromptRows
from jaxllm.text.droppable import PromptTokens
from jaxllm.text.tokenizer import Tokenizer

AnyEncoder = TypeVar("AnyEncoder")


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedImage:
    """An image as input of a text model.

    Attributes:
      grid: rows and columns of its tiles (see `ImageInput.grid`).
      rows: `[tiles · R, D]` float32, embeddings; never changed.
      image_id: the prompt token for an image, and for each row.
    """

    grid: tuple[int, int]
    rows: np.ndarray
    image_id: int

    @property
    def tile_rows(self) -> int:
        """Rows of each tile (R)."""
        return len(self.rows) // tiles_of(self.grid)


def with_images(
    tokenizer: Tokenizer, prompt: PromptTokens, images: Sequence[EncodedImage]
) -> tuple[PromptTokens, PromptRows]:
    """A prompt with one placeholder token per image replaced by the image's tokens, and their rows. These
    tokens cannot be dropped.

    Args:
      tokenizer: tokenizer of the model.
      prompt: output of the chat template, with one `<image>` for each image.
      images: images in order, at least one.

    Raises:
      ConfigError: the number of images differs from the template's.
    """
    ids, image_id = np.asarray(prompt.ids), images[0].image_id
    places = np.flatnonzero(ids == image_id)
    if len(places) != len(images):
        raise ConfigError(
            f"the prompt has {len(places)} places for images ({IMAGE}), and {len(images)} images come with "
            "it: send them in a user's message, to a model whose chat template knows images"
        )
    parts, offsets, at, first, count = [], [], [], 0, 0
    for place, image in zip(places.tolist(), images, strict=True):
        own = image_ids(tokenizer, image)
        parts += [ids[first:place], own]
        offsets += [
            prompt.offsets[first:place],
            np.repeat(prompt.offsets[place : place + 1], len(own), axis=0),
        ]
        count += place - first
        at.append(count + np.flatnonzero(own == image_id))
        if len(at[-1]) != len(image.rows):
            raise ConfigError(
                f"the tokens of an image have {len(at[-1])} places for its {len(image.rows)} rows: the "
                "tokenizer is of another model; prepare it again"
            )
        count, first = count + len(own), place + 1
    parts.append(ids[first:])
    offsets.append(prompt.offsets[first:])
    whole = dataclasses.replace(
        prompt, ids=np.concatenate(parts).astype(np.int32), offsets=np.concatenate(offsets)
    )
    rows = PromptRows(np.concatenate(at), np.concatenate([each.rows for each in images]))
    return whole, rows


def image_ids(tokenizer: Tokenizer, image: EncodedImage) -> np.ndarray:
    """The prompt tokens of an image."""
    text = image_text(image.grid, image.tile_rows)
    return np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)


def require_encoder(encoder: AnyEncoder | None, name: str, *, served: bool = True) -> AnyEncoder:
    """Checks and returns the image encoder of a model.

    Args:
      encoder: encoder of the model; None for none.
      name: name of the model.
      served: whether the model was opened for prompt embeddings.

    Raises:
      ConfigError: there is none, or the model was not opened for it.
    """
    if encoder is None:
        raise ConfigError(
            f"{name} has no encoder of images; send texts alone, or use a bundle that `jaxllm prepare` made "
            "of a SmolVLM folder"
        )
    if not served:
        raise ConfigError(
            f"{name} was opened without images: serve it with images = true (the default), or open the "
            "engine with EngineOptions(prompt_rows=True)"
        )
    return encoder
