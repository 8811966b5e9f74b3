"""Screens programs of unknown origin in another process with limits of time and memory.

programs and their limits, pickled -> python -m serving.programs.screening -> errors, as JSON
"""

import contextlib
import hashlib
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping

from jaxllm.errors import ProgramError, one_line
from serving.programs.allowance import Allowance

# CPU seconds of the other process to start and per program; a busy machine may take `_BUSY` times as long.
_START_S, _PROGRAM_S, _BUSY = 60, 20, 4
_MEMORY_BYTES = 16 << 30

Program = tuple[bytes, Allowance]


class Screening:
    """Checks programs, and remembers the harmless ones. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._harmless: set[bytes] = set()

    def require_harmless(self, programs: Mapping[str, Program]) -> None:
        """Checks the programs, by name, that were not checked before.

        Raises:
          ProgramError: one of them is malformed, has operations that no exported program has, or exceeds its
            limits.
        """
        with self._lock:
            digests = {name: _digest(each) for name, each in programs.items()}
            new = [name for name in programs if digests[name] not in self._harmless]
            if not new:
                return
            for name, wrong in zip(new, _screened([programs[each] for each in new]), strict=True):
                if wrong:
                    raise ProgramError(f"{name}: {wrong}; export the model again")
                self._harmless.add(digests[name])


# Shared by all engines of this process.
screening = Screening()


def main() -> None:
    """Runs the other process."""
    # Imported here, because it is slow.
    from serving.programs.inspection import inspect

    programs: list[Program] = pickle.load(sys.stdin.buffer)
    _limit(_START_S + _PROGRAM_S * len(programs))
    found = []
    for program, allowed in programs:
        try:
            inspect(program, allowed)
            found.append("")
        except ProgramError as error:
            found.append(str(error))
        except Exception as error:  # Whatever JAX and MLIR raise for what they cannot read.
            found.append(f"malformed ({type(error).__name__}: {one_line(error)})")
    json.dump(found, sys.stdout)


def _screened(programs: list[Program]) -> list[str]:
    """The error of each program; empty for a harmless one."""
    # The same import path as this process's, without the working folder.
    paths = os.pathsep.join(each or os.getcwd() for each in sys.path)
    environment = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            input=pickle.dumps(programs),
            capture_output=True,
            env=environment,
            timeout=_BUSY * (_START_S + _PROGRAM_S * len(programs)),
            check=False,
        )
    except subprocess.TimeoutExpired:
        which = "it" if len(programs) == 1 else "it, or a program beside it,"
        return [f"the check of {which} does not end"] * len(programs)
    except OSError as error:
        raise ProgramError(
            f"programs are checked in another process, which cannot be started ({error.strerror})"
        ) from error
    try:
        found = json.loads(done.stdout)
    except ValueError:
        found = None
    if done.returncode or not isinstance(found, list) or len(found) != len(programs):
        said = one_line(done.stderr.decode(errors="replace")[-300:])
        why = f"its check ended a process ({done.returncode}: {said})"
        return [why] * len(programs) if len(programs) == 1 else [_alone(each) for each in programs]
    return [one_line(each) if each else "" for each in found]


def _alone(program: Program) -> str:
    """The error of a program that was checked together with one that ends processes."""
    return _screened([program])[0]


def _limit(seconds: int) -> None:
    """Limits the time and memory of this process, where the system can."""
    try:
        import resource
    except ImportError:
        return
    for kind, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        # A lower limit may be set already; macOS has no limit of memory.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (most, most))


def _digest(program: Program) -> bytes:
    raw, allowed = program
    return hashlib.sha256(hashlib.sha256(raw).digest() + repr(allowed).encode()).digest()


if __name__ == "__main__":
    main()
