"""Says how an image becomes the tiles that an encoder reads, and which tokens of a prompt stand for them, as
SmolVLM's processor has both."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxllm.layer_configs import require, require_int

# A side is never longer, whatever a folder asks for.
MAX_SIDE = 4096
IMAGE, AROUND, WHOLE_IMAGE = "<image>", "<fake_token_around_image>", "<global-img>"
# Filters of Pillow, by number.
FILTERS = range(6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageInput:
    """How images are cut into tiles.

    Attributes:
      tile: height and width of a tile in pixels: the encoder's images.
      longest: the longer side that an image is resized to before it is cut.
      splits: whether it is cut; else one tile is the whole image.
      mean, std: of a pixel's channels, from 0 to 1.
      scale: of a pixel's bytes.
      resample: Pillow's filter, by number.
      image_id: the token that stands for a row.
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
        """From what `to_json` made.

        Raises:
          ConfigError: a field is out of its domain.
          KeyError, TypeError: it has other fields.
        """
        return cls(**{**facts, "mean": tuple(facts["mean"]), "std": tuple(facts["std"])})

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width that an image is resized to first: the longer side is `longest`."""
        return _longer_side(height, width, self.longest)

    def filled(self, height: int, width: int) -> tuple[int, int]:
        """Height and width that it is then resized to, of whole tiles."""
        tile, ratio = self.tile, width / height
        if width >= height:
            width = math.ceil(width / tile) * tile
            return math.ceil(int(width / ratio) / tile) * tile, width
        height = math.ceil(height / tile) * tile
        return height, math.ceil(int(height * ratio) / tile) * tile

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles that an image is cut into; (0, 0) where it is one tile."""
        if not self.splits:
            return 0, 0
        height, width = self.filled(*self.resized(height, width))
        rows, columns = height // self.tile, width // self.tile
        return (0, 0) if rows == columns == 1 else (rows, columns)


def image_text(grid: tuple[int, int], tile_rows: int) -> str:
    """The text of a prompt that stands for an image of a grid of tiles, with `tile_rows` rows a tile: of each
    tile its place and its rows, then those of the whole image."""
    rows, columns = grid
    told = ""
    for row in range(rows):
        for column in range(columns):
            told += f"{AROUND}<row_{row + 1}_col_{column + 1}>" + IMAGE * tile_rows
        told += "\n"
    told += "\n" if rows else ""
    return f"{told}{AROUND}{WHOLE_IMAGE}{IMAGE * tile_rows}{AROUND}"


def tiles_of(grid: tuple[int, int]) -> int:
    """Number of tiles of an image, that of the whole image included."""
    return grid[0] * grid[1] + 1


def _longer_side(height: int, width: int, longest: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    # At most `MAX_SIDE` by `longest`'s own bound.
    return max(height, 1), max(width, 1)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
