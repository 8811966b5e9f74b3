"""A store that grows over many lives, each of which ends by a kill at some moment, and what must be true
then.

A life has no engine: it imports nothing when it begins, and makes its chunks by rule, so that a thousand
take minutes and each chunk can be told from all others. It does what calls do: tokens are noted, chunks are
encoded by one thread and written by another, older ones at fewer bits; contexts begin with chunks of others,
slide, are pinned, deleted and rewritten as one segment.
"""

import contextlib
import dataclasses
import functools
import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.contexts.codecs import WIDTHS
from jaxllm.serving.contexts import saving
from jaxllm.serving.contexts.record import Linked, Origin, Record
from jaxllm.serving.contexts.saving import ChunkEncoder, agreeing_record
from jaxllm.serving.contexts.store import ContextStore
from tests.faults import KillingDevice
from tests.serving.contexts.killed import SERVER, Told, live_and_die

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
    """One life: killed so long after the store has opened, or at an operation; then the store is looked at.

    Args:
      told: of the store so far.
      root: of the store.
      seed: of what is done.
      after_s: until the kill; None for one at an operation.
      at: number of the file operation, or statement of the catalog, that does not come.

    Raises:
      AssertionError: something older was lost, or something is left that no record names.
    """
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
    """Deeds of one life.

    Args:
      said: told before and after each.
      phases: what is being done now, for whoever kills it.
      store: that has opened.
      draw: of the deeds.
    """

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
