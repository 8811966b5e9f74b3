"""Cuts images into tiles of pixels, as transformers' SmolVLMImageProcessor does with Pillow."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.models.encoder.image_input import ImageInput

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclasses.dataclass(frozen=True, eq=False)
class Tiles:
    """An image in tiles.

    Attributes:
      grid: rows and columns of tiles; (0, 0) for only the whole image.
      pixels: `[n, size, size, 3]` uint8; the last tile is the whole image.
    """

    grid: tuple[int, int]
    pixels: np.ndarray


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
