"""Interrupts at chosen lines: what Ctrl-C does to whoever is running, wherever it comes.

    with Interrupt(files, at=None) as all_of_it: act()       counts the lines
    with Interrupt(files, at=17) as one: act()               raises KeyboardInterrupt at the 17th

Lines are counted as they are run, in this thread and in the files that are named.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any


def run_apart(act: Callable[[], None]) -> None:
    """Runs something in a frame that keeps its own exceptions: an interrupt in the end of an `except` leaves
    its exception as the one that is being handled, and the cause of whatever is raised from there on."""

    def frame() -> Iterator[None]:
        act()
        yield

    next(frame())


class Interrupt:
    """Raises KeyboardInterrupt before one line, and no other.

    Attributes:
      lines: that were run.
      where: the line that was interrupted, as "file:number function"; empty where none was.
      told: whether it comes out: what is raised in a `__del__` never does.
    """

    def __init__(self, files: Sequence[str], at: int | None) -> None:
        """Takes ends of file names, and the number of the line, counted from 1; None for none."""
        self._files, self._at = tuple(files), at
        self.lines, self.where, self.told = 0, "", False

    def __enter__(self) -> "Interrupt":
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self._files):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self._at:
                name = frame.f_code.co_filename.rpartition("/")[2]
                self.where = f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
                self.told = not any(each == "__del__" for each in _callers(frame))
                raise KeyboardInterrupt
        return self._trace


def _callers(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back
