"""A case: what the worker is asked to use."""

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One copy of a victim.

    Attributes:
      use: its name in `uses.USES`.
      path: the copy's folder, beside those of all victims.
      deep: whether to go all the way to an answer.
      forged: whether checksums were made to fit what was changed, so that nobody can tell.
    """

    use: str
    path: Path
    deep: bool = False
    forged: bool = False

    @property
    def victims(self) -> Path:
        """The folder of all victims."""
        return self.path.parent
