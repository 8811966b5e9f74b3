"""Describes what the torture worker is asked to use, and counts how each case ended, and which are faults."""

import collections
import dataclasses
import threading
from pathlib import Path
from typing import Any, Literal

Ending = Literal["ok", "refused", "uncaught", "crash", "hang", "big", "wrong"]
# All but a right result or a refusal in our own words.
FAULTS: tuple[Ending, ...] = ("uncaught", "crash", "hang", "big", "wrong")


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one case ended.

    Attributes:
      ending: "ok" or "refused" (one of the project's own errors), or a fault: another exception, the end of
        the process, no end within the time, more memory than allowed, or something lost or untrue.
      says: the error's first line, and where it was raised.
      took_s: seconds.
      grew_bytes: by which the process's peak of memory rose.
    """

    ending: Ending
    says: str = ""
    took_s: float = 0.0
    grew_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A case that failed, with what repeats it."""

    kind: str
    seed: str
    outcome: Outcome
    case: Any = None

    def to_json(self) -> dict[str, Any]:
        """For a report, and for a file of regressions."""
        told = {"ending": self.outcome.ending, "says": self.outcome.says}
        return {"kind": self.kind, "seed": self.seed, **told, "case": self.case}


class Tally:
    """Counts outcomes by kind, from several threads."""

    def __init__(self) -> None:
        self.counts: dict[str, collections.Counter[str]] = {}
        self.faults: list[Fault] = []
        self._lock = threading.Lock()

    def add(self, kind: str, seed: str, outcome: Outcome, case: Any = None) -> None:
        """Counts one case, and keeps it if it failed."""
        with self._lock:
            self.counts.setdefault(kind, collections.Counter())[outcome.ending] += 1
            if outcome.ending in FAULTS:
                self.faults.append(Fault(kind=kind, seed=seed, outcome=outcome, case=case))

    def total(self, kind: str | None = None) -> int:
        """Cases, of a kind or of all."""
        return sum(sum(each.values()) for name, each in self.counts.items() if kind in (None, name))
