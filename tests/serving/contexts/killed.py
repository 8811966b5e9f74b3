"""A process that uses a store until it is killed, and what it says of itself until then."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any

# Children of a process that has everything imported and no thread: each begins at once.
SERVER = multiprocessing.get_context("forkserver")
# Until it is open.
_PATIENCE_S = 120


def said_until_killed(
    live: Callable[..., None],
    *arguments: Any,
    after_s: float | None,
    killed: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Runs a process, and kills it at some moment.

    Args:
      live: called there with where it says what it does, and with `arguments`, and never ends by itself. It
        says ("open",) first, and ("failed", why) where it cannot go on.
      arguments: for it.
      after_s: from when it is open to its kill; None for one that kills itself.
      killed: called when it was killed, before what it said is read.

    Returns:
      What it said after ("open",).

    Raises:
      AssertionError: it failed, or ended by itself.
    """
    SERVER.set_forkserver_preload([live.__module__])
    ours, theirs = SERVER.Pipe(duplex=False)
    child = SERVER.Process(target=live, args=(theirs, *arguments))
    child.start()
    theirs.close()
    try:
        assert ours.poll(_PATIENCE_S), "the store does not open"
        opened = ours.recv()
        assert opened == ("open",), opened
        time.sleep(after_s or 0)
        said = _rest(ours) if after_s is None else []
    finally:
        # One that has failed already says why below.
        with contextlib.suppress(ProcessLookupError):
            if child.pid is not None:
                os.kill(child.pid, signal.SIGKILL)
        child.join()
    killed()
    said = said or _rest(ours)
    failed = [each for each in said if each[0] == "failed"]
    assert not failed, failed
    assert child.exitcode == -signal.SIGKILL, f"it ended by itself: exit code {child.exitcode}"
    return said


def _rest(ours: Any) -> list[Any]:
    """All that is still to be read; the last message may be cut off by the kill."""
    said: list[Any] = []
    with contextlib.suppress(EOFError, OSError):
        while True:
            said.append(ours.recv())
    ours.close()
    return said
