"""Interrupts at every line of a call, errors of every file operation: contexts go on from before or after."""

import contextlib
import errno
import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from jaxllm.contexts.codecs import RAW
from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.serving.contexts.context import Context
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.store import ContextStore
from jaxllm.serving.engine.request import GenerationConfig
from tests.faults import FailingDevice
from tests.interrupting import Interrupt, run_apart

ROOT = Path(__file__).parents[3]
# Of each deed; 0 for all of them, which takes a quarter of an hour.
PLACES = int(os.environ.get("JAXLLM_TEST_PLACES", "8"))


# All files that a call of a context runs through in this process.
FILES = (
    *(
        f"/serving/contexts/{name}.py"
        for name in (
            "background", "catalog", "chunk_io", "chunks", "context", "layout", "manager", "memory",
            "options", "record", "restore", "saving", "segment", "store",
        )
    ),
    *(
        f"/serving/{name}.py"
        for name in (
            "engine/decoding", "engine/request", "engine/run", "engine/step",
            "ground/text_stream",
        )
    ),
    "/jaxllm/files/atomic.py",
)  # fmt: skip
_FIRST, _NEXT = [*range(20, 57)], [7, 9, 11]


def _say(contexts: Contexts, context: Context) -> None:
    context.generate(_NEXT, max_tokens=20, ignore_eos=True).result()


def _slide(contexts: Contexts, context: Context) -> None:
    window = contexts.engine.options.context_tokens
    context.generate([5] * (window - 40), max_tokens=4, ignore_eos=True, slide=True).result()


def _outgrow(contexts: Contexts, context: Context) -> None:
    window = contexts.engine.options.context_tokens
    context.generate(_NEXT, max_tokens=window, ignore_eos=True, slide=True).result()


def _close(contexts: Contexts, context: Context) -> None:
    answer = context.generate(_NEXT, max_tokens=20, ignore_eos=True)
    next(answer)
    answer.close()


def _drop(contexts: Contexts, context: Context) -> None:
    next(context.generate(_NEXT, max_tokens=20, ignore_eos=True))


def _pin(contexts: Contexts, context: Context) -> None:
    context.pin(True)
    context.pin(False)


# What is done to a context, by name.
DEEDS: Mapping[str, Callable[[Contexts, Context], object]] = MappingProxyType(
    {
        "say": _say,
        "slide": _slide,
        "outgrow": _outgrow,
        "close": _close,
        "drop": _drop,
        "pin": _pin,
        "create": lambda contexts, _: contexts.create("calendar"),
        "delete": lambda _, context: context.delete(),
    }
)


class Victim:
    """A context with a past, another one beside it, and a deed that is about to be done to the first."""

    def __init__(self, contexts: Contexts) -> None:
        self.contexts = contexts
        self.context, self.other = (Context(contexts, contexts.create("mail")) for _ in range(2))
        for each in (self.other, self.context, self.other):
            each.generate(_FIRST if each.tokens == () else [3], max_tokens=6, ignore_eos=True).result()
        contexts.store.wait()
        self.before = self.context.tokens

    def check(self, deed: str, *, told: bool = True) -> None:
        """That both contexts go on from a state before the deed, or after it, or from within an answer;
        unless an error `told` that it failed, there is more than was there before."""
        gc.collect()
        contexts = self.contexts
        # Whoever dropped an answer, or had no room for its chunks, is told of it by the next call.
        try:
            contexts.ready(self.context.name)
        except JaxllmError:
            told = True
        names = {each.name for each in contexts.store.records()}
        assert self.other.name in names
        if self.context.name not in names:
            assert deed == "delete"
        else:
            after = self.context.tokens
            if deed in ("slide", "outgrow"):
                chunk = contexts.engine.options.kv_chunk_tokens
                assert after == self.before or after[:chunk] == self.before[:chunk]
            else:
                assert after[: len(self.before)] == self.before
            assert told or deed in ("pin", "create") or after != self.before
            goes_on(contexts, self.context)
        goes_on(contexts, self.other)
        chunks = contexts.memory._chunks.values()
        # What both contexts have, because they begin alike, counts once.
        sizes = {id(e.blobs): e.size_bytes for own in chunks for e in own.values()}
        assert contexts.memory.resident_bytes == sum(sizes.values())
        assert contexts.store.verify() == []
        # Nothing is left that no record names.
        for record in contexts.store.records():
            folder = contexts.store.root / f"app-{record.app}" / record.name
            left = {each.name for each in folder.iterdir()}
            assert left == set(record.segments)

    def delete(self) -> None:
        """Makes room for the next."""
        for each in self.contexts.store.records():
            self.contexts.delete(each.name)


def goes_on(contexts: Contexts, context: Context) -> None:
    """Checks that a context whose chunks are kept as they are answers as an engine that is given all of its
    tokens."""
    before = context.tokens
    said = context.generate([2], max_tokens=3, ignore_eos=True, slide=True).result()
    config = GenerationConfig(max_tokens=3, ignore_eos=True)
    assert list(context.tokens[-3:]) == said.tokens
    assert contexts.engine.generate(list(context.tokens[:-3]), config).tokens == said.tokens
    assert before == () or context.tokens[-4] == 2


def places(total: int, count: int) -> list[int]:
    """Of so many places `count`, evenly, the first and the last among them; all of them for 0."""
    if not count or total <= count:
        return list(range(1, total + 1))
    return sorted({1 + round(place * (total - 1) / (count - 1)) for place in range(count)})


@contextlib.contextmanager
def nobody_to_tell() -> Iterator[None]:
    """What `__del__` raises is not an error of the test: interrupts may come there, too."""
    before, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = before


def test_interrupts_come_in_files_that_exist():
    assert [file for file in FILES if not Path(f"{ROOT}{file}").exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("deed", DEEDS)
def test_an_interrupt_leaves_a_context_before_a_call_or_after_it(kept, deed):
    """It comes out as the interrupt, and whoever is next is answered at once."""
    size = kept()._chunk_io[100].chunk_bytes(RAW)
    # A call evicts what another context has.
    contexts = kept(budget_bytes=9 * size)
    victim = Victim(contexts)
    with Interrupt(FILES, None) as whole:
        DEEDS[deed](contexts, victim.context)
    victim.check(deed, told=False)
    victim.delete()
    # What was there before is not looked at for garbage at each place.
    gc.freeze()
    with nobody_to_tell():
        for place in places(whole.lines, PLACES):
            victim = Victim(contexts)
            came = False
            with Interrupt(FILES, place) as interrupt:
                try:
                    run_apart(lambda: DEEDS[deed](contexts, victim.context))  # noqa: B023
                except KeyboardInterrupt:
                    came = True
            assert came == interrupt.told, interrupt.where
            try:
                victim.check(deed)
            except Exception as error:
                raise AssertionError(f"after an interrupt at {interrupt.where}") from error
            victim.delete()
    gc.unfreeze()
    contexts.close()
    with pytest.raises(ConfigError, match="was closed"):
        contexts.create("mail")
    with ContextStore(contexts.store.root) as store:
        assert store.verify() == []
        assert store.records() == []


@pytest.mark.slow
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("deed", ["say", "slide", "pin", "create", "delete"])
def test_a_failing_device_loses_nothing_and_is_told(kept, deed, error):
    contexts = kept()
    victim, root = Victim(contexts), contexts.store.root
    with FailingDevice(root, None, error=error) as whole:
        DEEDS[deed](contexts, victim.context)
        contexts.store.wait()
    for place in places(whole.operations, PLACES):
        victim = Victim(contexts)
        told = False
        with FailingDevice(root, place, error=error) as device:
            try:
                DEEDS[deed](contexts, victim.context)
            except JaxllmError:
                told = True
            contexts.store.wait()
        try:
            victim.check(deed, told=told)
        except Exception as failure:
            raise AssertionError(f"after {errno.errorcode[error]} of {device.hit}") from failure
        victim.delete()
