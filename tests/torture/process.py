"""A child process that uses mutated files, so that what kills or holds it up harms nobody else: what it is
asked to use, how each case ended, and which endings are faults."""

import collections
import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[2]
_PATIENCE_S = 60.0
# What a mutated file of some kilobytes may make a process grow by.
_MOST_GROWTH_BYTES = 1 << 30
# A fresh process now and then: none of them is to die of what thousands of cases leave behind.
_MOST_CASES = 400
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


class Victim:
    """A worker that is asked case by case, and replaced when it dies.

    Args:
      scratch: a folder of its own.
      patience_s: after which a case hangs.
    """

    def __init__(self, scratch: Path, patience_s: float = _PATIENCE_S) -> None:
        self.scratch, self._patience_s = scratch, patience_s
        self._process: subprocess.Popen[str] | None = None
        self._cases = 0
        scratch.mkdir(parents=True, exist_ok=True)

    def ask(self, case: Case) -> Outcome:
        """Has one case done."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        self._cases += 1
        process.stdin.write(json.dumps({**vars(case), "path": str(case.path)}) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], self._patience_s)
        if not ready:
            self.close(kill=True)
            return Outcome(ending="hang", took_s=self._patience_s)
        line = process.stdout.readline()
        if not line:
            code = process.wait()
            self.close()
            return Outcome(ending="crash", says=f"exit code {code}")
        outcome = Outcome(**json.loads(line))
        if outcome.grew_bytes > _MOST_GROWTH_BYTES and outcome.ending in ("ok", "refused"):
            return Outcome(
                ending="big", says=outcome.says, took_s=outcome.took_s, grew_bytes=outcome.grew_bytes
            )
        return outcome

    def close(self, *, kill: bool = False) -> None:
        """Ends the process."""
        if self._process is None:
            return
        if kill:
            self._process.kill()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process = None

    def _started(self) -> "subprocess.Popen[str]":
        if self._process is not None and (self._cases >= _MOST_CASES or self._process.poll() is not None):
            self.close()
        if self._process is None:
            self._cases = 0
            env = {
                **os.environ,
                "JAXLLM_CACHE": str(self.scratch / "cache"),
                "JAXLLM_BUCKETS_BYTES": "0",
                "JAX_COMPILATION_CACHE_DIR": str(self.scratch / "compilations"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
                "JAX_PLATFORMS": "cpu",
                "JAXLLM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "PYTHONFAULTHANDLER": "1",
            }
            with (self.scratch / "worker.log").open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.torture.worker"],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                    env=env, text=True, bufsize=1, cwd=ROOT,
                )  # fmt: skip
        return self._process
