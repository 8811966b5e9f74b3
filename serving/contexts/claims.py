"""Tracks which contexts have running calls, and ends calls abandoned by an error or interrupt."""

import dataclasses
import weakref
from collections.abc import Callable

from jaxllm.serving.contexts.record import Record
from jaxllm.serving.contexts.turn import Turn


@dataclasses.dataclass(eq=False)
class _Claim:
    record: Record
    turn: "weakref.ref[Turn]"


class Claims:
    """The running calls, at most one per context.

    An interrupt may come anywhere, and all methods are idempotent: a call whose turn is over or gone is
    ended at the next look.

    Args:
      let_go: called when a call has ended, with the record by which memory knows its context.
    """

    def __init__(self, let_go: Callable[[Record], None]) -> None:
        self._let_go = let_go
        self._claims: dict[str, _Claim] = {}

    def begin(self, turn: Turn) -> None:
        """Adds a call."""
        self._claims[turn.record.name] = _Claim(turn.record, weakref.ref(turn))

    def changed(self, turn: Turn, record: Record) -> None:
        """Replaces the record by which memory knows the call's context."""
        if self.runs(turn):
            self._claims[turn.record.name].record = record

    def end(self, turn: Turn) -> None:
        """Ends a call; does nothing if it has ended, or another runs in its context."""
        turn.over = True
        claim = self._claims.get(turn.record.name)
        if claim is not None and claim.turn() in (turn, None):
            self._tidy(turn.record.name, claim)

    def runs(self, turn: Turn) -> bool:
        """Whether a call has not ended."""
        claim = self._claims.get(turn.record.name)
        return claim is not None and claim.turn() is turn

    def running(self) -> list[Turn]:
        """The running calls; ends those that are over."""
        found = []
        for name, claim in list(self._claims.items()):
            turn = claim.turn()
            if turn is not None and not turn.over:
                found.append(turn)
            else:
                self._tidy(name, claim)
        return found

    def of(self, name: str) -> Turn | None:
        """The running call of a context, if any."""
        return next((each for each in self.running() if each.record.name == name), None)

    def _tidy(self, name: str, claim: _Claim) -> None:
        self._let_go(claim.record)
        self._claims.pop(name, None)
