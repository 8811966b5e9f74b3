"""An image as input of a text model; imports no JAX."""

import dataclasses

import numpy as np

from jaxllm.models.encoder.image_input import tiles_of


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
