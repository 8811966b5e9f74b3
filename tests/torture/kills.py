"""Kills writers of bundles at random moments, and has tests of contexts kill, interrupt and fail more."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from jaxllm.bundle import Bundle
from jaxllm.errors import JaxllmError
from tests.torture.process import ROOT, Outcome, Tally

_PREPARE = """
import sys
from pathlib import Path
from jaxllm.prepare import prepare
print("ready", flush=True)
while True:
    prepare(Path(sys.argv[1]), Path(sys.argv[2]), weights="int8")
"""
# Of all kills, those of writers of bundles.
_WRITERS = 0.1
# Tests that do more of the same on request: their file, their name, the variable, and by how many
# cases an amount is shared.
_ROOMS = {
    "kills": ("test_kills.py", "kills_lose", "JAXLLM_TEST_KILLS", 1),
    "interrupts": ("test_interrupts.py", "an_interrupt", "JAXLLM_TEST_PLACES", 8),
    "faults": ("test_interrupts.py", "a_failing_device", "JAXLLM_TEST_PLACES", 10),
}


def kill(victims: Path, scratch: Path, tally: Tally, *, kills: int, seed: int) -> None:
    """Kills writers of bundles, and services by the tests of contexts: nothing that had ended is lost,
    nothing is half.

    Args:
      victims: the folder that `make_victims` wrote.
      scratch: for bundles.
      tally: counts what came of it.
      kills: how many.
      seed: of the moments.
    """
    writers, draw = max(1, round(kills * _WRITERS)), random.Random(seed)
    for number in range(writers):
        tally.add("kill a writer", f"{seed}:{number}", _writer(victims, scratch / "prepared", draw))
    harm_calls("kills", tally, kills - writers)


def harm_calls(part: str, tally: Tally, amount: int) -> None:
    """Has the tests of contexts kill, interrupt or fail so many calls: each goes on from before or after."""
    file, name, variable, shared = _ROOMS[part]
    command = [sys.executable, "-m", "pytest", "-q", "--timeout=14400", "-k", name]
    done = subprocess.run(
        [*command, f"tests/serving/contexts/{file}"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, variable: str(max(8, amount // shared))},
    )  # fmt: skip
    says = " ".join(re.findall(r"^(?:E  |FAILED).*", done.stdout, re.MULTILINE))[:300] or done.stdout[-300:]
    tally.add(part, variable, Outcome(ending="wrong", says=says) if done.returncode else Outcome(ending="ok"))


def _writer(victims: Path, folder: Path, draw: random.Random) -> Outcome:
    """Kills `prepare` while it writes: the file is whole, and the next writer leaves nothing beside it."""
    folder.mkdir(exist_ok=True)
    out = folder / "model.jaxllm"
    process = subprocess.Popen(
        [sys.executable, "-c", _PREPARE, str(victims / "folder"), str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()
        time.sleep(draw.uniform(0.0, 0.2))
        process.send_signal(draw.choice((signal.SIGKILL, signal.SIGTERM)))
        process.wait()
    try:
        if out.exists():
            with Bundle.open(out) as bundle:
                bundle.verify()
    except JaxllmError as error:
        return Outcome(ending="wrong", says=str(error)[:300])
    from jaxllm.prepare import prepare

    prepare(victims / "folder", out, weights="int8")
    left = sorted(set(os.listdir(folder)) - {out.name})
    return Outcome(ending="wrong", says=f"left behind: {left}") if left else Outcome(ending="ok")
