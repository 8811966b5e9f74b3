"""Images of requests: reads untrusted files, cuts them into tiles, and puts their rows into prompts. No JAX.

Formats are named, bytes and pixels limited, and nothing comes from the network. Tiles are cut with Pillow as
transformers' SmolVLMImageProcessor does.
"""

import base64
import binascii
import dataclasses
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from jaxllm.errors import ConfigError, one_line
from jaxllm.models.encoder.image_input import IMAGE, ImageInput, image_text, tiles_of
from jaxllm.serving.ground.prompt_embeddings import PromptEmbeddings
from jaxllm.text.droppable import PromptTokens
from jaxllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

# Formats that every Pillow supports; others are many, and rarely used.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
IMAGE_BYTES = 8 << 20
# A decoded pixel needs 3 bytes, and 16 for a moment if it may be transparent.
IMAGE_PIXELS = 24_000_000
# Limit per request, and of what one context can contain.
IMAGES = 8
# Maximum aspect ratio: a longer image is thinner than a pixel once it is resized.
_MOST_RATIO = 200
_DATA = "data:"


@dataclasses.dataclass(frozen=True, eq=False)
class Tiles:
    """An image in tiles.

    Attributes:
      grid: rows and columns of tiles; (0, 0) for only the whole image.
      pixels: `[n, size, size, 3]` uint8; the last tile is the whole image.
    """

    grid: tuple[int, int]
    pixels: np.ndarray


def image_bytes(url: Any) -> bytes:
    """The content of an image's URL, which must contain it: `data:image/png;base64,...`.

    Raises:
      ConfigError: it is another URL, which is never opened, or malformed, or of too many bytes.
    """
    if not isinstance(url, str) or url[: len(_DATA)].lower() != _DATA:
        kind = url.partition(":")[0][:20] if isinstance(url, str) else type(url).__name__
        raise ConfigError(
            f"an image's url must hold the image (data:image/png;base64,...), got one of {kind!r}: nothing "
            "is fetched for a caller; read the file yourself and send its bytes in base64"
        )
    head, comma, text = url[len(_DATA) :].partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ConfigError("an image's data: url must be in base64, as data:image/png;base64,...")
    if len(text) > 4 * (IMAGE_BYTES // 3 + 1):
        raise _too_large(len(text) // 4 * 3)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigError(
            f"an image's data: url is not base64 ({one_line(error)}); encode it again"
        ) from error


def open_image(content: bytes) -> "Image":
    """Decodes an image, in RGB, rotated by its Exif orientation; transparent parts are white.

    Raises:
      ConfigError: it is broken, of another format, too large, or Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ConfigError("images are read by Pillow; run: pip install 'jaxllm[images]'") from error
    if len(content) > IMAGE_BYTES:
        raise _too_large(len(content))
    try:
        with warnings.catch_warnings():
            # Pillow's own bound of pixels is a warning; ours is below it.
            warnings.simplefilter("ignore")
            # The size is known before anything is decoded.
            with Image.open(io.BytesIO(content), formats=FORMATS) as found:
                _require_size(*found.size)
                return _opaque(ImageOps.exif_transpose(found), Image)
    except UnidentifiedImageError as error:
        raise ConfigError(
            f"an image is none of {', '.join(FORMATS)}, or its head is broken; convert it"
        ) from error
    except ConfigError:
        raise
    except Exception as error:  # A decoder of a broken file may raise anything.
        raise ConfigError(f"an image is broken ({one_line(error):.100}); send it whole") from error


def image_part(content: bytes) -> dict[str, Any]:
    """The message part of an image's file."""
    return {"type": "image", "image": content}


def read_image_file(path: Path) -> bytes:
    """The bytes of an image's file, which `open_image` decodes.

    Raises:
      ConfigError: it cannot be read.
    """
    try:
        with Path(path).open("rb") as file:
            return file.read(IMAGE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: the image cannot be read ({error.strerror}); check the path") from error


def with_places(text: str, images: int) -> str:
    """A text to continue with a placeholder for each image: before it, unless it has placeholders."""
    return text if IMAGE in text else IMAGE * images + text


def split_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Splits messages into those for chat templates, and the files of their images in order.

    Args:
      messages: JSON objects, whose contents may be lists of parts: `{"type": "text", "text": TEXT}` and
        parts from `image_part`.

    Raises:
      ConfigError: a part has another type.
    """
    plain, files = [], []
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            content = [_part(each, index, files) for each in content]
        plain.append({**message, "content": content} if "content" in message else dict(message))
    return plain, files


def tiles(image: "Image", of: ImageInput) -> Tiles:
    """The tiles of an image in RGB."""
    from PIL.Image import Resampling

    size, by = of.tile, Resampling(of.resample)
    grid = of.grid(image.height, image.width)

    def resized(image: "Image", height: int, width: int) -> "Image":
        return image.resize((width, height), resample=by)

    image = resized(image, *of.resized(image.height, image.width))
    if not of.splits:
        return Tiles(grid, np.asarray(resized(image, size, size))[None])
    image = resized(image, *of.filled(image.height, image.width))
    pixels = np.asarray(image)
    found = [
        pixels[row * size : (row + 1) * size, column * size : (column + 1) * size]
        for row in range(grid[0])
        for column in range(grid[1])
    ]
    found.append(np.asarray(resized(image, size, size)) if found else pixels)
    return Tiles(grid, np.stack(found))


def normalized(pixels: np.ndarray, of: ImageInput) -> np.ndarray:
    """Pixels `[n, size, size, 3]` uint8 as the encoder reads them, `[n, 3, size, size]` float32."""
    scaled = (pixels.astype(np.float64) * of.scale).astype(np.float32)
    mean, std = np.asarray(of.mean, np.float32), np.asarray(of.std, np.float32)
    return np.ascontiguousarray(((scaled - mean) / std).transpose(0, 3, 1, 2))


def _opaque(found: "Image", module: Any) -> "Image":
    """In RGB, over white, as transformers converts images."""
    if "A" in found.getbands() or found.info.get("transparency") is not None:
        found = found.convert("RGBA")
        white = module.new("RGBA", found.size, (255, 255, 255, 255))
        found = module.alpha_composite(white, found)
    return found.convert("RGB")


def _require_size(width: int, height: int) -> None:
    if width * height > IMAGE_PIXELS:
        raise ConfigError(
            f"an image has {width} x {height} pixels, more than {IMAGE_PIXELS:,}; make it smaller"
        )
    if max(width, height) > _MOST_RATIO * max(1, min(width, height)):
        raise ConfigError(f"an image of {width} x {height} pixels is too narrow to be read; cut it")


def _too_large(size: int) -> ConfigError:
    return ConfigError(
        f"an image has {size:,} bytes, more than {IMAGE_BYTES:,}; compress it or make it smaller"
    )


def _part(part: Any, index: int, files: list[bytes]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image" and isinstance(part.get("image"), bytes):
        files.append(part["image"])
        return {"type": "image"}
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    raise ConfigError(f"message {index} has a part of the type {kind!r:.40}; parts are texts and images")


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
) -> tuple[PromptTokens, PromptEmbeddings]:
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
        text = image_text(image.grid, image.tile_rows)
        own = np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)
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
    rows = PromptEmbeddings(np.concatenate(at), np.concatenate([each.rows for each in images]))
    return whole, rows


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
            "engine with EngineOptions(prompt_embeddings=True)"
        )
    return encoder
