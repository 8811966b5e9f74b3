"""A process that uses a store until it is killed, what it says of itself until then, and what must be true
afterwards: nothing older is lost, and nothing is left that no record names."""

import collections
import contextlib
import dataclasses
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxllm.contexts.recompute import LOST
from jaxllm.kv.chunks import CHUNK_TOKENS
from jaxllm.serving.contexts.record import Record
from jaxllm.serving.contexts.store import ContextStore

# Children of a process that has everything imported and no thread: each begins at once.
SERVER = multiprocessing.get_context("forkserver")
# Until it is open.
_PATIENCE_S = 120


@dataclasses.dataclass
class Told:
    """What is known of a store from outside, over all lives.

    Attributes:
      tokens: of each context, as its last deed left it.
      deeds: that ended.
      checked: answers, or after kills chunks, that were found to be what they should.
      within: how many kills came within a phase.
      lives: that were ended.
    """

    tokens: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    deeds: int = 0
    checked: int = 0
    within: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    lives: int = 0


def live_and_die(
    told: Told,
    life: Callable[..., None],
    root: Path,
    *arguments: Any,
    after_s: float | None,
    killed: Callable[[], None] = lambda: None,
    holds: Callable[[ContextStore, Record], int] | None = None,
) -> None:
    """One life, that is killed at some moment after its store has opened; then the store is looked at.

    Args:
      told: of the store so far.
      life: of a process: it says ("open",), and of each deed ("begin", what, context, the tokens that it
        will have; ... if nobody knows) and ("end", context, its tokens; None if it is gone). It never ends by
        itself; where it cannot go on it says ("failed", why).
      root: of the store.
      arguments: for the life, after these.
      after_s: from when it is open to its kill; None for one that kills itself.
      killed: called when it was killed, before what it said is read.
      holds: checks the chunks of a record; how many. Without it the store verifies them.

    Raises:
      AssertionError: it failed, something older was lost, or something is left that no record names.
    """
    under_way: tuple[Any, ...] = ("", "", None)
    for what, *rest in _said_until_killed(life, (root, *arguments), after_s, killed):
        if what == "begin":
            under_way = tuple(rest)
            continue
        told.deeds += 1
        told.checked += under_way[0] == "check"
        told.tokens |= {rest[0]: rest[1]}
        if rest[1] is None:
            del told.tokens[rest[0]]
        under_way = ("", "", None)
    told.lives += 1
    _look(told, root, under_way, holds)


def _look(
    told: Told, root: Path, under_way: tuple[Any, ...], holds: Callable[[ContextStore, Record], int] | None
) -> None:
    with ContextStore(root) as store:
        assert store.damage() == []
        store.sweep()
        there = {record.name: record for record in store.records()}
        wanted = {"catalog.sqlite", "catalog.sqlite-wal", "lock"}
        for record in there.values():
            wanted |= {f"app-{record.app}/{record.name}/{each}" for each in record.segments}
        left = {str(each.relative_to(root)) for each in root.rglob("*") if each.is_file()}
        assert left == wanted, "files that no record names"
        for record in there.values():
            assert LOST not in record.bits
            told.checked += holds(store, record) if holds is not None else 0
        if holds is None or told.lives % 16 == 0:
            assert store.verify() == []
    deed, name, coming = under_way
    for each, tokens in told.tokens.items():
        # What was under way may have ended before that was said.
        if each != name:
            assert there[each].tokens == tokens, f"{each} is not what it was"
        elif each not in there:
            assert deed == "delete"
        else:
            now = there[each].tokens
            assert now in (tokens, coming) or (coming is ... and _goes_on(tokens, now)), f"{each} is neither"
    assert len(set(there) - set(told.tokens)) <= (deed == "new"), "contexts that nobody made"
    told.tokens = {each: record.tokens for each, record in there.items()}


def _goes_on(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether a context holds what it held before, or slid: then its first chunk, and of its newest tokens
    those that an answer left."""
    slid = (
        before[:CHUNK_TOKENS] == after[:CHUNK_TOKENS]
        and before[kept:] == after[CHUNK_TOKENS : CHUNK_TOKENS + len(before) - kept]
        for kept in range(CHUNK_TOKENS, len(before) + 1)
    )
    return after[: len(before)] == before or any(slid)


def _said_until_killed(
    life: Callable[..., None],
    arguments: tuple[Any, ...],
    after_s: float | None,
    killed: Callable[[], None],
) -> list[Any]:
    """What a life said after ("open",), until it was killed."""
    SERVER.set_forkserver_preload([life.__module__])
    ours, theirs = SERVER.Pipe(duplex=False)
    child = SERVER.Process(target=life, args=(theirs, *arguments))
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
    ours.close()
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
    return said
