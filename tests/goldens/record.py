"""Records goldens: `python -m tests.goldens.record [--everywhere] [CASE ...]`.

Without cases it records all of them; a name's beginning stands for all that have it. Record only where
answers are meant to change, and say in the commit why they do. `--everywhere` records nothing: it runs the
cases under every instruction set of this processor, without native kernels and on two threads, and says which
differ.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # Compiled as users have it, as the tests that compare are.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0"

# First: it sets JAX up as all tests have it.
import tests.conftest  # noqa: F401
from jaxllm.kernels import native
from tests.goldens.cases import CASES, Models, reason_to_skip
from tests.goldens.opening import Answer

FOLDER = Path(__file__).parent


def read_golden(name: str) -> list[Answer] | None:
    """What a case answered when it was recorded; None if it was not."""
    return _read(name.split("-")[0]).get(name)


def recorded_names() -> set[str]:
    """Of all cases that there are goldens of."""
    return {name for path in FOLDER.glob("*.json") for name in _read(path.stem)}


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--everywhere", action="store_true")
    parser.add_argument("--compare", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    names = [name for name in CASES if name.startswith(tuple(asked.cases))] if asked.cases else list(CASES)
    if asked.everywhere:
        sys.exit(_everywhere(asked.cases))
    differing = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAXLLM_CACHE"] = f"{folder}/cache"
        models = Models(Path(folder))
        for name in names:
            if (reason := reason_to_skip(name)) is not None:
                print(f"{name}: skipped, {reason}")
                continue
            began = time.perf_counter()
            answers = json.loads(json.dumps(CASES[name](models)))
            same = read_golden(name) == answers
            print(f"{name}: {'same' if same else 'other'}, {time.perf_counter() - began:.1f} s", flush=True)
            if not same:
                differing.append(name)
                if not asked.compare:
                    _write(name, answers)
        models.close()
    sys.exit(f"{len(differing)} differ: {' '.join(differing)}" if asked.compare and differing else 0)


def _everywhere(cases: Sequence[str]) -> int:
    """Compares under all kernels of this processor; the number of those that differ."""
    failed = 0
    for kernels, threads in [*((each, 1) for each in (*native.kernels().choices, "xla")), ("", 2)]:
        print(f"kernels {kernels or 'as they are'}, {threads} threads", flush=True)
        chosen = {"JAXLLM_KERNELS": kernels} if kernels else {}
        environment = {**os.environ, **chosen, "JAXLLM_THREADS": str(threads)}
        command = [sys.executable, "-m", "tests.goldens.record", "--compare", *cases]
        failed += subprocess.run(command, env=environment, check=False).returncode != 0
    return failed


def _read(group: str) -> dict[str, list[Answer]]:
    path = FOLDER / f"{group}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _write(name: str, answers: list[Answer]) -> None:
    """One answer a line, so that a change of one is seen as such."""
    group = name.split("-")[0]
    found = {**_read(group), name: answers}
    cases = []
    for each in sorted(found.keys() & CASES.keys()):
        lines = ",\n".join(f"  {json.dumps(answer)}" for answer in found[each])
        cases.append(f"{json.dumps(each)}: [\n{lines}\n]")
    (FOLDER / f"{group}.json").write_text("{\n" + ",\n".join(cases) + "\n}\n")


if __name__ == "__main__":
    main()
