"""The process inside which mutated files are used: a JSON line in, a JSON line out, for ever."""

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.torture.process import Case

# Above what JAX reserves without using it; an allocation that a file asks for beyond it fails.
_MOST_ADDRESSES_BYTES = 16 << 30


def main() -> None:
    """Does cases until its input ends."""
    out = os.fdopen(os.dup(1), "w")
    # Whatever libraries print is no answer.
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_ADDRESSES_BYTES, _MOST_ADDRESSES_BYTES))
    from tests.torture.uses import USES

    while line := sys.stdin.readline():
        asked = json.loads(line)
        case = Case(**{**asked, "path": Path(asked["path"])})
        use = USES[case.use]
        began, before = time.perf_counter(), _peak_bytes()
        ending, says = _ended(use, case)
        took_s = round(time.perf_counter() - began, 3)
        answer = {"ending": ending, "says": says, "took_s": took_s, "grew_bytes": _peak_bytes() - before}
        out.write(json.dumps(answer) + "\n")
        out.flush()


def _ended(use: Callable[[Case], None], case: Case) -> tuple[str, str]:
    from jaxllm.errors import JaxllmError

    try:
        use(case)
    except JaxllmError as error:
        lines = str(error).splitlines() or [""]
        if len(lines) > 1:
            return "uncaught", f"an error of {len(lines)} lines: {lines[0]:.160}"
        return "refused", f"{type(error).__name__}: {lines[0]:.160}"
    except AssertionError as error:
        return "wrong", f"{error!s:.300} {_place(error)}"
    except BaseException as error:
        return "uncaught", f"{type(error).__name__}: {error!s:.200} {_place(error)}"
    return "ok", ""


def _place(error: BaseException) -> str:
    """The last line of our own that the error passed."""
    root = str(Path(__file__).parents[2])
    frames = traceback.extract_tb(error.__traceback__)
    ours = [each for each in frames if each.filename.startswith(root) and "/tests/" not in each.filename]
    last = (ours or frames)[-1]
    return f"@ {last.filename.removeprefix(root + '/')}:{last.lineno}"


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
