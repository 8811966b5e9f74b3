"""An image as a text model reads it; imports no JAX, for whoever only passes it on."""

import dataclasses

import numpy as np

from jaxllm.models.encoder.image_input import tiles_of


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedImage:
    """An image as a text model reads it.

    Attributes:
      grid: rows and columns of its tiles (see `ImageInput.grid`).
      rows: `[tiles · R, D]` float32, not to be changed.
      image_id: the token of a prompt that stands for an image, and for each row.
    """

    grid: tuple[int, int]
    rows: np.ndarray
    image_id: int

    @property
    def tile_rows(self) -> int:
        """Rows of each tile (R)."""
        return len(self.rows) // tiles_of(self.grid)
