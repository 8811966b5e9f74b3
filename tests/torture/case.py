"""A case: what the worker is asked to use."""

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One copy of a victim, or one call.

    Attributes:
      use: its name in `uses.USES`.
      path: the copy's folder, beside those of all victims.
      deep: whether to go all the way to an answer.
      forged: whether checksums were made to fit what was changed, so that nobody can tell.
      deed: of a call, what is done and, where a device fails, how.
      place: of a call, how much of it is done when something happens, as a share.
    """

    use: str
    path: Path
    deep: bool = False
    forged: bool = False
    deed: str = ""
    place: float = 0.0

    @property
    def victims(self) -> Path:
        """The folder of all victims."""
        return self.path.parent
