"""Ctrl-C at any moment of a command: the exit code of an interrupt, no traceback, no crash, no half files."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxllm.cli import entry

ROOT = Path(__file__).parents[3]
# Interrupts itself when the module of that number is looked for; prints how many were, at the end.
AT_AN_IMPORT = """
import atexit, os, signal, sys
from jaxllm.cli.entry import main
class Interrupting:
    looked_for = 0
    def find_spec(self, name, path=None, target=None):
        Interrupting.looked_for += 1
        if Interrupting.looked_for == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
atexit.register(lambda: print(Interrupting.looked_for))
main(sys.argv[2:])
"""


def started(
    *arguments: object, script: str = "from jaxllm.cli.entry import main; main()"
) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
    )  # fmt: skip


def ended(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    # Behind an interrupt the terminal's line may be ended.
    return process.returncode, out, err.removesuffix("\n")


@pytest.fixture(scope="module", autouse=True)
def heard() -> Iterator[None]:
    """Children hear interrupts, even where the suite itself was started to ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_in_the_middle_of_imports(tiny_bundle: Path) -> None:
    ask = "generate", "-m", tiny_bundle, "-p", "hello", "-n", 2
    code, out, err = ended(started(0, *ask, script=AT_AN_IMPORT))
    assert code == 0, err
    # How many modules a whole command looks for.
    imports = int(out.split()[-1])
    for share in (0, 0.1, 0.4, 0.7, 1):
        number = 1 + int(share * (imports - 1))
        process = started(number, *ask, script=AT_AN_IMPORT)
        assert ended(process) == (entry.INTERRUPTED, "", ""), share


def test_who_is_to_ignore_interrupts_does(tiny_bundle: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = started("generate", "-m", tiny_bundle, "-p", "hello", "-n", 2, "--ignore-eos")
    finally:
        signal.signal(signal.SIGINT, before)
    for _ in range(20):
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert (code, err) == (0, "")
    assert out


def test_in_the_middle_of_an_answer(tiny_bundle: Path) -> None:
    process = started(
        "generate", "-m", tiny_bundle, "-p", "hello", "-n", 100_000, "--ignore-eos", "--stop", "~"
    )
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    # A tiny model's window may be full by then.
    assert (code, err) in ((entry.INTERRUPTED, ""), (0, ""))
    assert first + out


# What a command is replaced by -> how the process ends. `stop` interrupts itself.
AS_COMMAND = """
import atexit, os, signal, sys, threading, time, weakref
from pathlib import Path
from jaxllm.cli import entry, main as cli
from jaxllm.files.atomic import atomic_file
class A: pass
class Failing:
    def __del__(self): raise ValueError("of a finalizer")
def stop(*_):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0)
def late():
    time.sleep(0.2)
    print("thread")
def command(arguments):
{}
cli.main = command
entry.main()
"""
COMMANDS = {
    "a file": (
        "with atomic_file(Path(sys.argv[1])) as file: "
        "file.write(b'half'); print('half'); stop(); time.sleep(60)",
        (entry.INTERRUPTED, "half\n", ""),
    ),
    # Python drops exceptions there, the interrupt must not be dropped.
    "a finalizer": (
        "a = A(); kept = weakref.finalize(a, stop); print('began'); del a; time.sleep(60)",
        (entry.INTERRUPTED, "began\n", ""),
    ),
    "another exception in a finalizer": ("Failing(); sys.exit(0)", (0, "", "ValueError: of a finalizer")),
    "behind the end": (
        "atexit.register(lambda: (stop(), print('ended'))); sys.exit(3)", (3, "ended\n", ""),
    ),
    "threads and exit handlers": (
        "atexit.register(print, 'handler'); threading.Thread(target=late).start(); sys.exit(0)",
        (0, "thread\nhandler\n", ""),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("command", "end"), COMMANDS.values(), ids=COMMANDS)
def test_in_the_middle_of(tmp_path: Path, command: str, end: tuple[int, str, str]) -> None:
    code, out, err = ended(started(tmp_path / "out", script=AS_COMMAND.format(f"    {command}")))
    assert (code, out) == end[:2]
    assert err == end[2] if not end[2] else end[2] in err
    # What was being written vanishes as with any other end.
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_an_output_is_shown() -> None:
    script = "from jaxllm.cli.entry import main; main(['--version'])"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode != 0
    assert b"No space left" in done.stderr
