"""Reads untrusted images: formats by name, limited bytes and pixels, nothing from the network."""

import base64
import binascii
import io
import warnings
from typing import TYPE_CHECKING, Any

from jaxllm.errors import ConfigError, one_line

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
