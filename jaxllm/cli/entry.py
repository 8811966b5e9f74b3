"""Runs the process of the `jaxllm` command, and handles Ctrl-C from start to exit.

This module imports only what Python has already loaded, so that the handler is installed before the slow
imports. During an import the handler ends the process at once: an exception while NumPy or JAX are imported
leaves them incomplete, which ends in crashes. Everywhere else it raises KeyboardInterrupt, so that unfinished
files are removed and commands may continue (`jaxllm chat`). Python drops exceptions raised in a finalizer or
a garbage collector callback: the interrupt is then sent again until it is not dropped. After an interrupt
nothing is torn down: threads of compilers and readers still run and must not outlive their resources. At the
end of a command threads are joined and exit handlers run; then the process ends at once, too.
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType

INTERRUPTED = 130
_AGAIN_S = 0.001
_IMPORTING = "<frozen importlib._bootstrap>"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line (`jaxllm.cli.main.main`; see `run_process`)."""

    def command() -> None:
        # Imported after the handler of Ctrl-C is installed.
        from jaxllm.cli import main as cli

        cli.main(argv)

    run_process(command)


def run_process(command: Callable[[], None]) -> None:
    """Runs `command` and ends the process: exits 130 after an interrupt, printing nothing."""
    # The parent process may have disabled Ctrl-C (`nohup`, background jobs of a shell).
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
        signal.signal(signal.SIGALRM, _interrupt)
        sys.unraisablehook = _dropped
    try:
        command()
    except SystemExit as end:
        if end.code != INTERRUPTED:
            # The command has ended: an interrupt from here on would only disturb the exit.
            _ignore_interrupts()
            if not isinstance(end.code, int):
                raise
            _finish(end.code)
    except KeyboardInterrupt:
        pass
    _end(INTERRUPTED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Handles SIGINT and the timer that sends it again."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            _end(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def _dropped(unraisable: "sys.UnraisableHookArgs") -> None:
    """Sends an interrupt again that Python has dropped; reports other exceptions as Python does."""
    if unraisable.exc_type is KeyboardInterrupt:
        # Delayed: this hook runs where exceptions are dropped.
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    else:
        sys.__unraisablehook__(unraisable)


def _ignore_interrupts() -> None:
    for number in (signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)


def _finish(code: int) -> None:
    """Ends the process as Python does, but without tearing down modules and objects: for JAX that costs a
    tenth of a second."""
    # Join threads, as Python does before the functions of atexit.
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]: multiprocessing calls it, too
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (OSError, ValueError, AttributeError):
        # Python reports the error and chooses the exit code.
        sys.exit(code)
    os._exit(code)


def _end(code: int) -> None:
    """Flushes the output streams and ends the process at once."""
    _ignore_interrupts()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (
            OSError,
            ValueError,
            RuntimeError,
            AttributeError,
        ):  # A closed pipe, or in the middle of a print.
            continue
    os._exit(code)


if __name__ == "__main__":
    main()
