"""The process of the `jaxllm` command: what Ctrl-C does, from its first moment to its last.

This module imports nothing but what Python has loaded anyway, so that the handler stands before the imports
that take most of a start. Where the handler finds an import under way, the process ends at once: an exception
inside of NumPy's or JAX's loading leaves them half there, which ends in crashes. Everywhere else it raises
KeyboardInterrupt, so that what is being written vanishes, and commands may go on (`jaxllm chat`). Nothing is
torn down behind an interrupt: compilers and readers still run in threads of their own, which do not outlive
what they use.
"""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

INTERRUPTED = 130
_IMPORTING = "<frozen importlib._bootstrap>"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line (`serving.cli.main`): exits 130 where it was interrupted, and prints nothing
    then."""
    # Whoever started this process may have had it ignore Ctrl-C (`nohup`, a shell's background).
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        from serving import cli

        cli.main(argv)
    except SystemExit as end:
        if end.code != INTERRUPTED:
            # The command has done its work: an interrupt from here on would only disturb the end.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise
    except KeyboardInterrupt:
        pass
    _end(INTERRUPTED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Takes SIGINT."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            _end(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def _end(code: int) -> None:
    """Ends the process here and now, what was printed flushed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
