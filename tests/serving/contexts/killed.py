"""Processes that use contexts until they are killed, what they say of themselves until then, and what must be
true afterwards: nothing older is lost, and nothing is left that no record names.

One kind of life is an app over an engine, which each opens as a device does after a crash. Another has no
engine: it makes its chunks by rule, so that a thousand take minutes and each chunk can be told from all
others. It does what calls do: tokens are noted, chunks are encoded by one thread and written by another,
older ones at fewer bits; contexts begin with chunks of others, slide, are pinned, deleted and rewritten as
one segment.
"""

import collections
import contextlib
import dataclasses
import functools
import multiprocessing
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm import Engine
from jaxllm.contexts.codecs import WIDTHS
from jaxllm.contexts.recompute import LOST
from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.kv.chunks import CHUNK_TOKENS
from jaxllm.serving.contexts import saving
from jaxllm.serving.contexts.context import Context
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.contexts.record import Linked, Origin, Record
from jaxllm.serving.contexts.saving import ChunkEncoder, agreeing_record
from jaxllm.serving.contexts.store import ContextStore
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.options import EngineOptions
from tests.faults import KillingDevice

# Children of a process that has everything imported and no thread: each begins at once.
SERVER = multiprocessing.get_context("forkserver")
# Until it is open.
_PATIENCE_S = 120


@dataclasses.dataclass
class Told:
    """What is known of a store from outside, over all lives: the tokens of each context, as its last deed
    left it; how many deeds ended, and lives; how many answers, or after kills chunks, were found to be what
    they should; and how many kills came within a phase."""

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


# An app over an engine


# What many contexts begin with.
_COMMON = tuple(range(40, 40 + 2 * CHUNK_TOKENS))


def use_contexts(
    said: Connection, root: Path, bundle: Path, options: EngineOptions, seed: int, cache: Path
) -> None:
    """Uses contexts for ever; in `cache` lives find each other's compiled buckets."""
    os.environ["JAXLLM_CACHE"] = os.fspath(cache)
    try:
        draw = random.Random(seed)
        # Contexts of a few chunks are rewritten as one segment, too.
        saving._MAX_SEGMENTS = 2
        engine = Engine.open(bundle, options=options)
        contexts = Contexts(engine, ContextOptions(folder=root, budget_bytes=1 << 18))
        said.send(("open",))
        while True:
            _act(said, contexts, draw)
    except Exception as error:
        said.send(("failed", repr(error)))


def _act(said: Connection, contexts: Contexts, draw: random.Random) -> None:
    records = contexts.store.records()
    if len(records) < 2:
        deed = "new"
    elif len(records) > _MOST_CONTEXTS:
        deed = "delete"
    else:
        deeds = ["say", "check", "slide", "stream", "pin", "new", "delete"]
        # What comes back is exact with chunks as they are alone.
        exact = contexts.engine.options.kv_codec == "raw"
        deed = draw.choices(deeds, [10, 3 * exact, 2, 2, 2, 2, 1])[0]
    if deed == "new":
        said.send(("begin", deed, "", ()))
        made = contexts.create(draw.choice(_APPS))
        said.send(("end", made.name, made.tokens))
        return
    record = draw.choice(records)
    context = Context(contexts, record)
    # What an answer will say, nobody knows before.
    said.send(("begin", deed, record.name, {"delete": None, "pin": record.tokens}.get(deed, ...)))
    if deed == "delete":
        context.delete()
        said.send(("end", record.name, None))
        return
    if deed == "pin":
        # One context more than its app may pin stays as it is.
        with contextlib.suppress(BudgetExceeded):
            context.pin(draw.random() < 0.3)
    else:
        prompt = [draw.randrange(250) for _ in range(draw.randint(1, 30))]
        if not record.tokens and draw.random() < 0.5:
            prompt = [*_COMMON, *prompt]
        # One that outgrows the window, or a few words.
        count = contexts.engine.options.context_tokens if deed == "stream" else 4
        _say(contexts, context, prompt, count, check=deed == "check", slide=deed in ("slide", "stream"))
    said.send(("end", record.name, context.tokens))


def _say(
    contexts: Contexts, context: Context, prompt: list[int], count: int, *, check: bool, slide: bool
) -> None:
    room = contexts.engine.options.context_tokens - len(context.tokens)
    slide = slide or len(prompt) + 8 > room
    before = context.tokens
    answer = context.generate(prompt, max_tokens=count, ignore_eos=True, slide=slide).result()
    if check and not slide:
        # What came back is what a prefill of the same tokens would have made.
        config = GenerationConfig(max_tokens=4, ignore_eos=True)
        wanted = contexts.engine.generate([*before, *prompt], config).tokens
        if answer.tokens != wanted:
            raise ConfigError(f"{context.name} goes on with {answer.tokens}, not {wanted}")


# A store alone


C = 2
ORIGIN = Origin(
    model="m", level=100, adapter="", codec="channel", chunk_tokens=C, dtype="float16", heads=(5, 4, 5),
    head_width=16,
)  # fmt: skip
# What a life may be in the middle of, more than one at a time.
PHASES = ("encoding", "compacting", "storing at fewer bits", "linking", "parting", "deleting", "noting")
_APPS = ("mail", "calendar")
_MOST_CONTEXTS, _MOST_CHUNKS = 5, 8


def live(told: Told, root: Path, *, seed: int, after_s: float | None = None, at: int | None = None) -> None:
    """One life: killed so long after the store has opened, or at a file operation or statement of the
    catalog, which does not come; then the store is looked at."""
    phases = SERVER.RawArray("i", len(PHASES))

    def killed() -> None:
        told.within.update(phase for phase, running in zip(PHASES, phases, strict=True) if running)

    live_and_die(told, _live, root, phases, seed, at, after_s=after_s, killed=killed, holds=_holds)


def _holds(store: ContextStore, record: Record) -> int:
    opened = store.open(record.name)
    right = [_blobs(*each) for each in zip(record.sources, record.bits, strict=False)]
    for layer in range(len(ORIGIN.heads) if right else 0):
        # Checksums are checked as they are read.
        for n, found in enumerate(opened.read(layer, range(len(right)))):
            assert found.tobytes() == right[n][layer].tobytes(), f"chunk {n} is another"
    return len(right)


class _Life:
    """Deeds of one life; `phases` are what is being done now, for whoever kills it."""

    def __init__(self, said: Connection, phases: Any, store: ContextStore, draw: random.Random) -> None:
        self._said, self._phases, self._store, self._draw = said, phases, store, draw
        self._encoder = ChunkEncoder()
        self._encoder.start()
        store.write_later()
        # Often, not after eight calls.
        saving._MAX_SEGMENTS = 2
        real = saving._rewritten

        def rewritten(store: ContextStore, name: str) -> Record:
            with self._in("compacting"):
                return real(store, name)

        saving._rewritten = rewritten

    def act(self) -> None:
        """Does something."""
        records, draw = self._store.records(), self._draw
        if len(records) < 2 or (len(records) < _MOST_CONTEXTS and draw.random() < 0.15):
            self._said.send(("begin", "new", "", ()))
            made = self._store.create(draw.choice(_APPS), ORIGIN)
            self._said.send(("end", made.name, ()))
            return
        record = draw.choice(records)
        deeds = {"say": 10.0, "slide": 1.0, "pin": 1.0, "delete": 0.3 * (len(records) == _MOST_CONTEXTS)}
        deed = draw.choices(list(deeds), list(deeds.values()))[0]
        if deed == "delete":
            self._said.send(("begin", deed, record.name, None))
            with self._in("deleting"):
                self._store.delete(record.name)
            self._said.send(("end", record.name, None))
        elif deed == "pin":
            self._said.send(("begin", deed, record.name, record.tokens))
            self._store.commit(dataclasses.replace(self._store.record(record.name), pinned=not record.pinned))
            self._said.send(("end", record.name, record.tokens))
        else:
            self._call(record.name, slide=deed == "slide")

    def _call(self, name: str, *, slide: bool) -> None:
        """What `Contexts` does when a call has ended."""
        store, draw = self._store, self._draw
        store.wait(name)
        before = store.record(name)
        tokens = before.tokens
        if slide or len(tokens) > C * _MOST_CHUNKS:
            tokens = tokens[:C]
        if not tokens:
            # All begin alike, so far.
            tokens = tuple(range(C * draw.randint(1, 4)))
        tokens += tuple(draw.randrange(1000) for _ in range(draw.randint(1, 3 * C)))
        self._said.send(("begin", "say", name, tokens))
        agreed = agreeing_record(before, tokens, C)
        bits = self._widths(agreed.bits, len(tokens) // C)
        mass = (0.5,) * len(bits)
        record = dataclasses.replace(before, tokens=tokens, bits=bits, mass=mass, seen=mass)
        fresh = {n: each for n, each in enumerate(bits) if agreed.bits[n : n + 1] != (each,)}
        linked = self._linked(record, fresh) if not before.tokens else {}
        fresh = {n: each for n, each in fresh.items() if n not in linked}
        chunk_io = _Io(record, functools.partial(self._in, "encoding"))
        coming, encoded = self._encoder.later(chunk_io, name, None, fresh, {})  # pyright: ignore
        with self._in("noting"):
            store.note(agreed)
        narrowed = {n for n in fresh if n < len(agreed.bits)}
        own = store.own_segments(before)
        shared = {n for n in narrowed if before.files[n] not in own}
        during = [*["storing at fewer bits"] * bool(narrowed), *["parting"] * bool(shared)]

        def ready() -> None:
            encoded()
            for each in during:
                self._phases[PHASES.index(each)] = 1

        def written(name: str) -> None:
            for each in during:
                self._phases[PHASES.index(each)] = 0
            saving.compact(store, name)

        store.commit_later(record, coming, _never, written, linked=linked, ready=ready)
        self._said.send(("end", name, tokens))

    def _widths(self, before: Sequence[int], count: int) -> tuple[int, ...]:
        """Of all chunks: some of those that are there get fewer bits."""
        narrower = {bits: [each for each in WIDTHS if each <= bits] for bits in WIDTHS}
        kept = [self._draw.choice(narrower[bits]) if self._draw.random() < 0.2 else bits for bits in before]
        return (*kept, *(self._draw.choice(WIDTHS) for _ in range(count - len(kept))))

    def _linked(self, record: Record, fresh: Mapping[int, int]) -> Linked:
        """Chunks that another context of the app has, at its widths."""
        for each in self._store.records(record.app):
            if each.name != record.name and each.tokens:
                with self._in("linking"):
                    self._store.wait(each.name)
                    return self._store.link(record, each.name, dict(fresh))
        return {}

    @contextlib.contextmanager
    def _in(self, phase: str) -> Iterator[None]:
        at = PHASES.index(phase)
        self._phases[at] = 1
        try:
            yield
        finally:
            self._phases[at] = 0


class _Io:
    """Encodes chunks by rule (see `ChunkIO`)."""

    def __init__(self, record: Record, within: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._record, self._within = record, within

    def room(self, chunks: Mapping[int, int]) -> dict[int, tuple[int, list[np.ndarray]]]:
        sizes = ORIGIN.layer_bytes
        return {n: (bits, [np.zeros(size, np.uint8) for size in sizes[bits]]) for n, bits in chunks.items()}

    def encode(self, _: object, chunks: Mapping[int, int], __: object, *, into: Mapping[int, Any]) -> None:
        with self._within():
            for n, bits in chunks.items():
                for blob, wanted in zip(into[n][1], _blobs(self._record.sources[n], bits), strict=True):
                    blob[:] = wanted
                    time.sleep(0)


def _blobs(source: str, bits: int) -> list[np.ndarray]:
    """A chunk of its tokens and width."""
    pattern = np.frombuffer(bytes.fromhex(source), np.uint8) ^ np.uint8(bits)
    return [np.resize(pattern, size) + np.uint8(layer) for layer, size in enumerate(ORIGIN.layer_bytes[bits])]


def _live(said: Connection, root: Path, phases: Any, seed: int, at: int | None) -> None:
    """Uses the store until it is killed."""
    try:
        with ContextStore(root) as store:
            store.sweep()
            life = _Life(said, phases, store, random.Random(seed))
            said.send(("open",))
            with KillingDevice(root, at):
                while True:
                    life.act()
    except Exception as error:
        said.send(("failed", f"{error!r} at {traceback.format_tb(error.__traceback__)[-3:]}"))


def _never(name: str, error: Exception) -> None:
    raise AssertionError(f"{name}: {error}")
