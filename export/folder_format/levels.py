"""Defines the levels of a folder of programs: sub-models, and the stored arrays that their programs use."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.config import MAX_DIMENSION, ModelConfig
from jaxllm.errors import ProgramError
from jaxllm.export.folder_format.files import require_ints, require_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Argument:
    """A weight argument of a level's programs: a stored array, and the shape of its leading units."""

    stored: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        require_text("a weight", self.stored)
        require_ints(f"the shape of {self.stored!r:.80}", self.shape or (None,), 1, MAX_DIMENSION)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramLevel:
    """A level: the sub-model, and by name the weight arguments of its programs (none if weights are constants
    in them)."""

    cfg: ModelConfig
    weights: Mapping[str, Argument]

    def views(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The weight arguments of the level's programs by name, as views of the stored arrays.

        Raises:
          ProgramError: an array is missing, or has another shape.
        """
        found = {}
        for name, each in self.weights.items():
            whole = arrays.get(each.stored, np.zeros(0))
            if whole.shape[1:] != each.shape[1:] or len(whole) < each.shape[0]:
                raise ProgramError(
                    f"{name} must be the beginning {list(each.shape)} of {each.stored}, which is missing or "
                    f"another ({list(whole.shape)}); export the model again"
                )
            found[name] = whole[: each.shape[0]]
        return found


def read_level(data: dict[str, Any]) -> ProgramLevel:
    """A level as the manifest's JSON has it."""
    weights = {
        name: Argument(stored=each["stored"], shape=tuple(each["shape"]))
        for name, each in data["weights"].items()
    }
    return ProgramLevel(cfg=ModelConfig.from_json(data["cfg"]), weights=weights)
