"""Messages with images: a part `{"type": "image", "image": CONTENT}` contains an image's file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.models.encoder.image_input import IMAGE
from jaxllm.serving.images.files import IMAGE_BYTES


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


def _part(part: Any, index: int, files: list[bytes]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image" and isinstance(part.get("image"), bytes):
        files.append(part["image"])
        return {"type": "image"}
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    raise ConfigError(f"message {index} has a part of the type {kind!r:.40}; parts are texts and images")
