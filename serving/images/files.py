"""Reads untrusted images: formats by name, limited bytes and pixels, nothing from the network. Takes images
out of messages, and cuts them into tiles as transformers' SmolVLMImageProcessor does with Pillow.
"""

import base64
import binascii
import dataclasses
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.errors import ConfigError, one_line
from jaxllm.models.encoder.image_input import IMAGE, ImageInput

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


def taken_apart(
    messages: Sequence[Mapping[str, Any]], *, parts: bool = False
) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Splits messages into those for chat templates, and the files of their images in order.

    Args:
      messages: JSON objects, whose contents may be lists of parts: `{"type": "text", "text": TEXT}` and
        parts from `image_part`.
      parts: whether all contents become lists of parts, as templates of models with images require; else
        texts stay texts.

    Raises:
      ConfigError: a part has another type.
    """
    plain, files = [], []
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            content = [_part(each, index, files) for each in content]
        elif parts and isinstance(content, str):
            content = [{"type": "text", "text": content}]
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
