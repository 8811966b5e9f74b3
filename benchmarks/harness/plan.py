"""The sizes of a run, full and quick; and what is told of it to nobody."""

import dataclasses
from typing import Any, Self


def sized(full: Any, *, quick: Any) -> Any:
    """A field of a plan: its value in the whole measurement, and in a quick run."""
    return dataclasses.field(default=full, metadata={"quick": quick})


@dataclasses.dataclass(frozen=True, kw_only=True)
class BasePlan:
    """Sizes of a run, whose defaults are those of the whole measurement."""

    @classmethod
    def quick(cls) -> Self:
        """Fits in about a minute on two cores, for the packaged models."""
        fields = dataclasses.fields(cls)
        return cls(**{each.name: each.metadata["quick"] for each in fields if "quick" in each.metadata})


def silent(stage: str, done: int, total: int) -> None:
    """Progress that is shown to nobody."""
    del stage, done, total


def unheard(message: str) -> None:
    """A message that is told to nobody."""
    del message
