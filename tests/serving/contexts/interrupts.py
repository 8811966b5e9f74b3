"""Runs calls of contexts that are interrupted or fail anywhere, and checks the contexts afterwards."""

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from jaxllm.errors import JaxllmError
from jaxllm.serving.contexts.context import Context
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.engine.request import GenerationConfig

# All files that a call of a context runs through in this process.
FILES = (
    *(
        f"/serving/contexts/{name}.py"
        for name in (
            "answer", "background", "catalog", "chunk_io", "claims", "context", "database", "growth",
            "layout", "loading", "manager", "memory", "options", "record", "restore", "saving", "segment",
            "store", "turn", "turn_ids",
        )
    ),
    *(
        f"/serving/{name}.py"
        for name in (
            "engine/answer", "engine/decoding", "engine/request", "engine/run", "engine/step",
            "ground/sliding", "ground/text_stream",
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
        """That both contexts go on from a state before the deed, or after it, or from within an answer.

        Args:
          deed: that was done, or tried.
          told: whether an error said that it failed; of what went well there is more than was there before.

        Raises:
          AssertionError: it is not so.
        """
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
