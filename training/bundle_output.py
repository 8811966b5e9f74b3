"""Describes the bundle that a job writes."""

import dataclasses
from pathlib import Path

from jaxllm.bundle import WeightFormat
from jaxllm.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class BundleOutput:
    """The bundle that a job writes.

    Attributes:
      path: of the file; written whole or not at all.
      weights: width of the matrices; None keeps the checkpoint's own.
      name: the model's name, for people; its own by default.

    Raises:
      CheckpointError: the folder of the file does not exist.
    """

    path: Path
    weights: WeightFormat | None = None
    name: str = ""

    def __post_init__(self) -> None:
        require_folder_of(Path(self.path))


def require_folder_of(path: Path) -> None:
    """Raises CheckpointError unless the folder of a file that is to be written exists."""
    if not path.parent.is_dir():
        raise CheckpointError(f"{path.parent}: no such folder; create it first")
