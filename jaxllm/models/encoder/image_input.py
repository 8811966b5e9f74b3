"""Defines how an image is split into an encoder's tiles, and its tokens in a prompt, like SmolVLM's
processor."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxllm.layer_configs import require, require_int

# Maximum side, for any folder.
MAX_SIDE = 4096
IMAGE, AROUND, WHOLE_IMAGE = "<image>", "<fake_token_around_image>", "<global-img>"
# Filters of Pillow, by number.
FILTERS = range(6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageInput:
    """Options of splitting images into tiles.

    Attributes:
      tile: height and width of a tile in pixels: the encoder's images.
      longest: longer side after resizing, before splitting.
      splits: whether to split; else one tile is the whole image.
      mean, std: statistics of a pixel's channels, from 0 to 1.
      scale: factor of a pixel's bytes.
      resample: Pillow's filter, by number.
      image_id: the token for a row.
    """

    tile: int
    longest: int
    splits: bool
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    scale: float
    resample: int
    image_id: int

    def __post_init__(self) -> None:
        require_int("tile of images", self.tile, 1, MAX_SIDE)
        require_int("longest side of images", self.longest, 1, MAX_SIDE)
        require_int("image_id", self.image_id, 0, 1 << 31)
        require(type(self.splits) is bool, f"splits must be true or false, got {self.splits!r:.80}")
        require(self.resample in FILTERS, f"resample must be in [0, 5], got {self.resample!r:.80}")
        for name in ("mean", "std"):
            value = getattr(self, name)
            fits = isinstance(value, tuple) and len(value) == 3 and all(map(_is_number, value))
            require(fits, f"{name} of images must be three numbers, got {value!r:.80}")
        require(all(each > 0 for each in self.std), f"std of images must be positive, got {self.std}")
        require(_is_number(self.scale), f"scale of images must be a number, got {self.scale!r:.80}")

    def to_json(self) -> dict[str, Any]:
        """Its fields as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "ImageInput":
        """Reads a dict made by `to_json`.

        Raises:
          ConfigError: a field is out of range.
          KeyError, TypeError: it has other fields.
        """
        return cls(**{**facts, "mean": tuple(facts["mean"]), "std": tuple(facts["std"])})

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after the first resizing: the longer side is `longest`."""
        ratio = width / height
        if width >= height:
            width, height = self.longest, int(self.longest / ratio)
            height += height % 2
        else:
            height, width = self.longest, int(self.longest * ratio)
            width += width % 2
        # At most `MAX_SIDE` by the bound of `longest`.
        return max(height, 1), max(width, 1)

    def filled(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after the second resizing, to whole tiles."""
        tile, ratio = self.tile, width / height
        if width >= height:
            width = math.ceil(width / tile) * tile
            return math.ceil(int(width / ratio) / tile) * tile, width
        height = math.ceil(height / tile) * tile
        return height, math.ceil(int(height * ratio) / tile) * tile

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of an image's tiles; (0, 0) for a single tile."""
        if not self.splits:
            return 0, 0
        height, width = self.filled(*self.resized(height, width))
        rows, columns = height // self.tile, width // self.tile
        return (0, 0) if rows == columns == 1 else (rows, columns)


def image_text(grid: tuple[int, int], tile_rows: int) -> str:
    """The prompt text of an image with a grid of tiles and `tile_rows` rows per tile: for each tile its
    place and its rows, then those of the whole image."""
    rows, columns = grid
    text = ""
    for row in range(rows):
        for column in range(columns):
            text += f"{AROUND}<row_{row + 1}_col_{column + 1}>" + IMAGE * tile_rows
        text += "\n"
    text += "\n" if rows else ""
    return f"{text}{AROUND}{WHOLE_IMAGE}{IMAGE * tile_rows}{AROUND}"


def tiles_of(grid: tuple[int, int]) -> int:
    """Number of tiles of an image, including that of the whole image."""
    return grid[0] * grid[1] + 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
