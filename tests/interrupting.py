"""Interrupts at chosen lines: what Ctrl-C does to whoever is running, wherever it comes.

    with Interrupt(files, at=None) as all_of_it: act()       counts the lines
    with Interrupt(files, at=17) as one: act()               raises KeyboardInterrupt at the 17th

Lines are counted as they are run, in this thread and in the files that are named. The end of a `with` is not
counted, nor is a line without an instruction, such as `try:`: Python looks for signals after calls, at jumps
backward and where functions begin, so that nothing can come between the last line inside and the call of
`__exit__`. An interrupt there would leave a lock held, as would one at a `try:`, which no handler covers.
"""

import dis
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
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
        if event == "line" and frame.f_lasti not in _uninterrupted(frame.f_code):
            self.lines += 1
            if self.lines == self._at:
                name = frame.f_code.co_filename.rpartition("/")[2]
                self.where = f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
                self.told = not any(each == "__del__" for each in _callers(frame))
                raise KeyboardInterrupt
        return self._trace


@functools.cache
def _uninterrupted(code: CodeType) -> frozenset[int]:
    """Offsets of instructions that do nothing, and of those that begin to leave a `with`: a call of
    `__exit__`, or an error."""
    steps, found = [*dis.get_instructions(code)], set[int]()
    for number, step in enumerate(steps):
        following = steps[number : number + 4]
        names = [each.opname for each in following]
        if names[0] == "NOP" or names[:2] == ["PUSH_EXC_INFO", "WITH_EXCEPT_START"]:
            found.add(step.offset)
        nothing = [each.argval for each in following[:3]] == [None] * 3
        if nothing and names[:3] == ["LOAD_CONST"] * 3 and names[3:] in (["CALL"], ["PRECALL"]):
            # Where the statement returns a value, it is put below first.
            swapped = number and steps[number - 1].opname == "SWAP"
            found.add(steps[number - 1 if swapped else number].offset)
    return frozenset(found)


def _callers(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back
