"""Interrupts calls of contexts at any line, and lets any of their file operations fail, in processes of their
own: whatever comes, contexts go on from before the call or after it."""

import concurrent.futures
import dataclasses
import errno
import functools
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxllm.contexts.codecs import RAW
from jaxllm.errors import JaxllmError
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.options import ContextOptions
from tests.faults import FailingDevice
from tests.interrupting import Interrupt
from tests.serving.contexts.interrupts import DEEDS, FILES, Victim, nobody_to_tell
from tests.torture.case import Case
from tests.torture.outcome import Tally
from tests.torture.process import Victim as Process
from tests.torture.victims import WITHOUT_FILES

_ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC}
# Deeds that read and write; the others end before the device is asked, or are made of these.
_FAILING = ("say", "slide", "pin", "create", "delete")


def interrupt_calls(
    victims: Path,
    scratch: Path,
    tally: Tally,
    *,
    interrupts: int,
    seed: int,
    lanes: int = 1,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Interrupts so many calls, each at a line of its own.

    Args:
      victims: the folder that `make_victims` wrote.
      scratch: for processes.
      tally: counts what came of it.
      interrupts: how many.
      seed: of the lines.
      lanes: processes at a time.
      tick: called after each.
    """
    _spread(victims, scratch, tally, _Draw("interrupt", [*DEEDS], interrupts, seed), lanes, tick)


def fail_calls(
    victims: Path,
    scratch: Path,
    tally: Tally,
    *,
    faults: int,
    seed: int,
    lanes: int = 1,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Lets a file operation of so many calls fail; arguments are those of `interrupt_calls`."""
    deeds = [f"{deed} {error}" for deed in _FAILING for error in _ERRORS]
    _spread(victims, scratch, tally, _Draw("fault", deeds, faults, seed), lanes, tick)


def use_interrupt(case: Case) -> None:
    """Does a deed that is interrupted at a line, and looks at what is left."""
    contexts, whole = _contexts(case.victims, case.path), functools.partial(Interrupt, FILES)
    place = _place(case, case.deed, contexts, whole)
    victim, came = Victim(contexts), False
    with nobody_to_tell(), whole(place) as interrupt:
        try:
            DEEDS[case.deed](contexts, victim.context)
        except KeyboardInterrupt:
            came = True
    assert came == interrupt.told, f"at {interrupt.where} it does not come out"
    with nobody_to_tell():
        _check(victim, case.deed, f"after an interrupt at {interrupt.where}", told=True)


def use_fault(case: Case) -> None:
    """Does a deed during which a file operation fails, and looks at what is left."""
    contexts = _contexts(case.victims, case.path)
    name, error = case.deed.split()
    device = functools.partial(FailingDevice, contexts.store.root, error=_ERRORS[error])
    place = _place(case, name, contexts, device)
    victim, told = Victim(contexts), False
    with device(place) as failing:
        try:
            DEEDS[name](contexts, victim.context)
        except JaxllmError:
            told = True
    _check(victim, name, f"after {error} of {failing.hit}", told=told)


@dataclasses.dataclass(frozen=True)
class _Draw:
    """Cases to draw: `count` deeds of these in turn, at points that `seed` decides."""

    use: str
    deeds: Sequence[str]
    count: int
    seed: int


def _spread(
    victims: Path,
    scratch: Path,
    tally: Tally,
    drawn: _Draw,
    lanes: int,
    tick: Callable[[], None],
) -> None:
    use, deeds, count, seed = drawn.use, drawn.deeds, drawn.count, drawn.seed
    draw = random.Random(f"{seed}:{use}")
    planned = [(deed, draw.random()) for deed in itertools.islice(itertools.cycle(deeds), count)]

    def run(lane: int) -> None:
        process = Process(scratch / f"process-{lane}")
        try:
            for deed, place in planned[lane::lanes]:
                case = Case(use=use, path=victims / f"{use}-{lane}", deed=deed, place=place)
                tally.add(use, f"{seed}:{deed}:{place}", process.ask(case))
                tick()
        finally:
            process.close()

    with concurrent.futures.ThreadPoolExecutor(lanes) as pool:
        for each in [pool.submit(run, lane) for lane in range(lanes)]:
            each.result()


def _place(case: Case, deed: str, contexts: Contexts, counting: Callable[[None], Any]) -> int:
    """The number of the line or operation that a case means."""
    totals = _totals(case.path)
    if case.deed not in totals:
        victim = Victim(contexts)
        with counting(None) as whole:
            DEEDS[deed](contexts, victim.context)
        victim.delete()
        totals[case.deed] = whole.lines if isinstance(whole, Interrupt) else whole.operations
    return 1 + int(case.place * totals[case.deed])


@functools.cache
def _totals(folder: Path) -> dict[str, int]:
    """How many places each deed has, found once in a process."""
    return {}


def _check(victim: Victim, deed: str, when: str, *, told: bool) -> None:
    try:
        victim.check(deed, told=told)
        victim.delete()
    except Exception as error:
        # The next case is not to suffer from this one.
        victim.contexts.close()
        _contexts.cache_clear()
        raise AssertionError(f"{when}: {error!r:.200}") from error


@functools.cache
def _contexts(victims: Path, folder: Path) -> Contexts:
    """Contexts of this process, with memory for a few chunks, so that calls evict each other's."""
    from tests.torture.uses import context_engine

    engine = context_engine(victims / WITHOUT_FILES / "model.jaxllm")
    folder.mkdir(exist_ok=True)
    options = ContextOptions(folder=folder / f"store-{len(list(folder.iterdir()))}")
    sized = Contexts(engine, options)
    size = sized._chunk_io[100].chunk_bytes(RAW)
    sized.close()
    return Contexts(engine, dataclasses.replace(options, budget_bytes=9 * size))
