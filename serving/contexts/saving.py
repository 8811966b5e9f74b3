"""Saves chunks after a call: chooses their widths by density, encodes them in a thread, writes them to
storage, compacts small segments.

Chunks get their memory before the answer ends: they count in the budget, and a chunk table has their
addresses. A thread fills it. Readers of a context's chunks, and writers of the cache that they are encoded
from, wait first (`ChunkEncoder.wait`); so does writing to storage. A kill meanwhile has the same effect as a
kill before the write: chunks are recomputed from the tokens, which are on storage.
"""

import collections
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from jaxllm.contexts.codecs import RAW, STATE, WIDTHS
from jaxllm.contexts.eviction import Resident
from jaxllm.contexts.recompute import LOST
from jaxllm.contexts.tolerance import allocate, chunk_mass, sightings
from jaxllm.errors import BudgetExceeded, CheckpointError, JaxllmError, Unreadable, one_line
from jaxllm.serving.contexts.layout import written
from jaxllm.serving.contexts.memory import ChunkAccess, Stored
from jaxllm.serving.contexts.options import ContextOptions, Writing
from jaxllm.serving.contexts.record import Linked, Record
from jaxllm.serving.contexts.segment import Chunks, file_bytes
from jaxllm.serving.contexts.store import ContextStore, WriteQueue
from jaxllm.serving.engine.request import Session, common_prefix, slid

_LOG = logging.getLogger("jaxllm")
# A context with more segments than this is rewritten as one.
_MAX_SEGMENTS = 8
# Tolerance for products of ratios and bytes just below an integer.
ROUNDING = 1e-6


class ChunkWriter:
    """Writes chunks to a store at the time given by `writing` (see `ContextOptions`).

    The tokens of a call are written at its end in any case, and flushed unless chunks are written in the
    background. Chunks that are written at eviction are not flushed: they can be recomputed. `failed` is
    called in the writing thread with a context's name and the error if chunks cannot be written.
    """

    def __init__(
        self, store: ContextStore, writing: Writing, failed: Callable[[str, JaxllmError], object]
    ) -> None:
        self._store, self._writing, self._failed = store, writing, failed
        if writing == "background":
            store.write_later()

    def keep(
        self,
        record: Record,
        changed: Set[int],
        coded: Mapping[int, Stored],
        linked: Linked,
        ready: Callable[[], object] | None,
    ) -> Record:
        """Stores a context after a call.

        Args:
          record: record of the context.
          changed: numbers of its chunks that are new, or whose width differs from storage.
          coded: encoded chunks by number, including all of `changed`.
          linked: chunks that another context has on storage (see `ContextStore.link`).
          ready: waits until the bytes of `coded` are encoded; None if they are.

        Returns:
          The stored record, or the future one (see `ContextStore.commit_later`).

        Raises:
          BudgetExceeded, CheckpointError: see `ContextStore.commit`.
        """
        if self._writing not in ("background", "ahead"):
            return self._store.commit(record.lose(changed))
        chunks = {n: coded[n] for n in coded if n in changed}
        make_room(self._store, record, chunks)
        if self._writing == "background":
            before = self._store.record(record.name)
            self._store.note(agreeing_record(before, record.tokens, record.origin.chunk_tokens))
            return self._store.commit_later(
                record, chunks, self._failed, self._compacted, linked=linked, ready=ready
            )
        return self._compacted(self._store.commit(record, chunks, linked=linked).name)

    def _compacted(self, name: str) -> Record:
        """Compacts a context whose call is stored, as far as possible."""
        try:
            return compact(self._store, name)
        except BudgetExceeded:
            # No space for two copies: the context stays in many segments.
            return self._store.record(name)
        except CheckpointError:
            # An older chunk is damaged, or the device failed: this call is stored nevertheless.
            with contextlib.suppress(JaxllmError):
                return self._store.repair(name)
            return self._store.record(name)

    def left(self, chunks: Sequence[Resident]) -> None:
        """Writes evicted chunks that are not on storage. Unwritten ones are recomputed later."""
        for name in dict.fromkeys(each.context for each in chunks):
            if self._writing == "background":
                # Until they are written they stay in memory anyway.
                self._store.wait(name)
            if self._writing != "at-eviction":
                continue
            with contextlib.suppress(JaxllmError):
                record = self._store.record(name)
                # A chunk marked lost on storage was in memory only.
                fresh = {
                    each.chunk: (each.bits, each.blobs)
                    for each in chunks
                    if each.context == name and record.bits[each.chunk : each.chunk + 1] == (LOST,)
                }
                if fresh:
                    bits = tuple(fresh[n][0] if n in fresh else width for n, width in enumerate(record.bits))
                    self._store.commit(dataclasses.replace(record, bits=bits), fresh, flush=False)


class ChunkEncoder(WriteQueue):
    """Encodes the chunks of calls in a thread. At most one call waits, because its cache stays in memory
    meanwhile: the end of the next one waits for it.

    Attributes:
      failed: contexts whose encoding failed: their chunks in memory are invalid.
    """

    def __init__(self) -> None:
        super().__init__(most=0, thread="jaxllm-encoding")
        self.failed: collections.deque[str] = collections.deque()

    def later(
        self,
        chunk_io: ChunkAccess,
        name: str,
        cache: Any,
        chunks: Mapping[int, int],
        stored: Mapping[int, Stored],
    ) -> tuple[Mapping[int, Stored], Callable[[], None]]:
        """Begins to encode chunks of a context; for the arguments see `ChunkAccess.encode`. The cache must
        not be written until they are encoded.

        Returns:
          The chunks to store, and a function that waits until they are encoded, and raises JaxllmError if
          that failed.
        """
        coming, errors = chunk_io.room(chunks), []

        def encode() -> None:
            try:
                chunk_io.encode(cache, chunks, stored, into=coming)
            except Exception as error:
                errors.append(error)
                self.failed.append(name)

        def ready() -> None:
            self.wait(name)
            for error in errors:
                if isinstance(error, JaxllmError):
                    raise error
                reason = one_line(error)
                raise CheckpointError(f"chunks of the context {name} cannot be encoded ({reason})")

        self.put(name, encode)
        return coming, ready


def compact(store: ContextStore, name: str) -> Record:
    """Rewrites a context's chunks as one segment if they are spread over many.

    Raises:
      ContextGone: there is no such context.
      CheckpointError: a chunk cannot be read, or the new segment cannot be written.
      BudgetExceeded: the device has no space for both.
    """
    record = store.record(name)
    return record if len(store.own_segments(record)) <= _MAX_SEGMENTS else _rewritten(store, name)


def make_room(store: ContextStore, record: Record, chunks: Chunks) -> None:
    """Makes room for new chunks of a context within the quotas: if they would exceed one, contexts whose
    segments contain obsolete chunks are rewritten, those of the same app first. For arguments see
    `ContextStore.commit`.

    Raises:
      BudgetExceeded: they still exceed a quota.
    """
    if store.beyond_quota(record, chunks) is None:
        return
    # Files being written count twice until they are complete.
    store.wait()
    for each in sorted(store.records(), key=lambda each: (each.app != record.app, each.used)):
        if (broken := store.beyond_quota(record, chunks)) is None:
            return
        own, sizes = store.own_segments(each), each.origin.layer_bytes
        # The size of one segment with its own chunks.
        chunks_of = {
            n: (each.bits[n], [np.broadcast_to(np.uint8(0), size) for size in sizes[each.bits[n]]])
            for n in _own_chunks(each, own)
        }
        needed = file_bytes(chunks_of, encrypted=store.vault is not None)
        if broken[0] in (None, each.app) and sum(own.values()) > needed:
            # An unreadable one is repaired when it is used.
            with contextlib.suppress(JaxllmError):
                _rewritten(store, each.name)
    if (broken := store.beyond_quota(record, chunks)) is not None:
        raise BudgetExceeded(broken[1])


def seal(store: ContextStore) -> None:
    """Seals a store that was opened with keys, before it is used: encrypts plain files, after which plain
    and older data is refused (see `Vault`). If a context cannot be read or written now, logs a warning:
    the store stays unsealed, and the next start tries again.

    Raises:
      BudgetExceeded, CheckpointError: the ledger cannot be written.
    """
    vault = store.vault
    if vault is None or vault.is_sealed:
        return
    left = [f"{each.name} of {each.app} ({each.reason})" for each in store.unread()]
    for record in store.records():
        name, folder, plain = record.name, store.folder(record), vault.plain
        try:
            # These reads note plain files.
            rows = store.rows(name)
            try:
                chunks = store.read_chunks(name)
            except Unreadable:
                raise
            except CheckpointError:
                # Damaged ones are lost, and recomputed when the context is used.
                store.repair(name)
                chunks = store.read_chunks(name)
            if folder in plain:
                store.commit(store.record(name), chunks, rows=rows)
                plain.discard(folder)
        except JaxllmError as error:
            left.append(f"{name} of {record.app} ({one_line(error)})")
    if left:
        _LOG.warning(
            "%s: plain contexts are still read, because not all could be encrypted: %s",
            store.root,
            "; ".join(left)[:1000],
        )
        return
    with written(vault.folder):
        for record in store.records():
            vault.wrote(store.folder(record), record.used)
        vault.seal()


def _rewritten(store: ContextStore, name: str) -> Record:
    record = store.record(name)
    return store.commit(record, store.read_chunks(name, _own_chunks(record, store.own_segments(record))))


def _own_chunks(record: Record, own: Mapping[str, int]) -> list[int]:
    """The chunks of a context in segments that no other context shares: shared ones are stored once."""
    return [n for n, file in enumerate(record.files) if file in own]


# Records after a call: the width of each chunk is chosen by its density.


def sink_record(
    before: Record, chunk_io: ChunkAccess, *, mass: np.ndarray, first: int, cached_tokens: int
) -> Record:
    """The record of a context that keeps only its first chunk, with its attention so far; arguments as for
    `grown_record`."""
    got, seen = _attended(before, chunk_io, mass, first, cached_tokens)
    return dataclasses.replace(
        before, bits=before.bits[:1], mass=tuple(got[:1].tolist()), seen=tuple(seen[:1].tolist())
    )


def grown_record(
    before: Record,
    chunk_io: ChunkAccess,
    options: ContextOptions,
    *,
    tokens: Sequence[int],
    mass: np.ndarray,
    first: int,
    cached_tokens: int,
) -> Record:
    """A context's record after a call (LLMS, section 3.2).

    Args:
      before: the record before the call.
      chunk_io: access to chunks of the context's level.
      options: limits of chunks' bytes.
      tokens: all tokens of the context now.
      mass: `[>= cached_tokens]`, attention mass of each position in this call.
      first: position of the first token that the call fed.
      cached_tokens: number of tokens in the cache; all of their whole chunks are stored.

    Returns:
      The record with the new widths of chunks, none above its stored width.
    """
    got, seen = _attended(before, chunk_io, mass, first, cached_tokens)
    count = len(got)
    bits = np.full(count, chunk_io.widths[0])
    if chunk_io.widths != (RAW,):
        # More bits do not restore what fewer bits lost.
        most = np.full(count, max(WIDTHS))
        known = before.bits[:count]
        most[: len(known)] = [max(WIDTHS) if each == LOST else each for each in known]
        bits = np.minimum(bits, most)
        if len(chunk_io.widths) > 1:
            bits = allocate(
                got / np.maximum(seen, 1),
                most_bytes(chunk_io, options, count),
                sizes={width: chunk_io.chunk_bytes(width) for width in WIDTHS},
                newest=options.newest_chunks,
                kept=chunk_io.kept,
                most=most,
            )
    return dataclasses.replace(
        before,
        tokens=tuple(tokens),
        bits=tuple(bits.tolist()),
        mass=tuple(got.tolist()),
        seen=tuple(seen.tolist()),
    )


def ended_record(
    before: Record,
    resident: Mapping[int, int],
    chunk_io: ChunkAccess,
    options: ContextOptions,
    *,
    session: Session,
    tokens: Sequence[int],
    first: int,
) -> Record:
    """A context's record after a call that may have been interrupted anywhere.

    Keeps the chunks of the common prefix of the cache and `tokens`; without a cache (lost by an error), the
    earlier chunks that still agree with `tokens`. If states have consumed more than `tokens`, as after a stop
    string, the stored states stay, and the next call continues from them.

    Args:
      before: the record before the call.
      resident: width of each chunk in memory, by number.
      session: session of the call, with its cache, if there is one, and the tokens in it.
      chunk_io, options, tokens, first: see `grown_record`.
    """
    size, states = chunk_io.chunk_tokens, session.state_tokens
    if session.cache is None:
        return agreeing_record(before, tokens, size)
    if states is not None:
        if not states or len(session.tokens) != states or session.tokens != list(tokens[:states]):
            return agreeing_record(before, tokens, size)
        bits = (*[RAW] * (states // size), STATE)
        none = (0.0,) * len(bits)
        return dataclasses.replace(
            before, tokens=tuple(tokens), bits=bits, mass=none, seen=none, state_tokens=states
        )
    # With the widths of chunks that are only in memory.
    widths = tuple(resident.get(n, LOST) if each == LOST else each for n, each in enumerate(before.bits))
    return grown_record(
        dataclasses.replace(before, bits=widths),
        chunk_io,
        options,
        tokens=tokens,
        mass=chunk_io.mass(session.cache),
        first=first,
        cached_tokens=_agreed(session.tokens, tokens),
    )


def slid_record(record: Record, *, chunk_tokens: int, most: int) -> Record:
    """The record after dropping the middle of a context before a call: its first chunk and its newest
    tokens, `most` together. The newest are recomputed at their new positions (see
    `jaxllm.serving.engine.request`)."""
    tokens = slid(record.tokens, sink_tokens=chunk_tokens, most=most)
    return record.cut(0 if record.state_tokens else 1, tokens)


def agreeing_record(before: Record, tokens: Sequence[int], chunk_tokens: int) -> Record:
    """The record of a context after its tokens changed, with the chunks whose tokens are the same."""
    common = _agreed(before.tokens, tokens)
    kept = len(before.bits) if 0 < before.state_tokens <= common else common // chunk_tokens
    return before.cut(kept, tokens)


def most_bytes(chunk_io: ChunkAccess, options: ContextOptions, chunks: int) -> int:
    """The maximum bytes of `chunks` chunks of a context, for any widths."""
    if len(chunk_io.widths) == 1:
        return chunks * chunk_io.chunk_bytes(chunk_io.widths[0]) + chunk_io.state_bytes
    wanted = int(options.ratio * chunk_io.reference_bytes * chunks + ROUNDING)
    return min(wanted, chunks * max(chunk_io.chunk_bytes(bits) for bits in WIDTHS))


def least_ratio(chunk_io: ChunkAccess) -> float:
    """The ratio of chunks at their narrowest; 0 for a codec with one width, which ignores ratios."""
    if len(chunk_io.widths) == 1:
        return 0.0
    return chunk_io.chunk_bytes(min(WIDTHS)) / chunk_io.reference_bytes


def _attended(
    before: Record, chunk_io: ChunkAccess, mass: np.ndarray, first: int, cached_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """The attention mass of each whole chunk so far, and its maximum possible mass, `[chunks]` each."""
    size, cfg = chunk_io.chunk_tokens, chunk_io.runner.cfg
    count = cached_tokens // size
    heads = [cfg.units(layer).kv_heads * cfg.group for layer in range(cfg.layers)]
    got = chunk_mass(mass, count, size)
    seen = sightings(first, cached_tokens, count, size, heads=heads, windows=cfg.attention_windows)
    known = min(count, len(before.mass))
    got[:known] += before.mass[:known]
    seen[:known] += before.seen[:known]
    return got, seen


def _agreed(cached: Sequence[int], tokens: Sequence[int]) -> int:
    """The length of the common prefix of two sequences."""
    count = min(len(cached), len(tokens))
    return count if list(cached[:count]) == list(tokens[:count]) else common_prefix(cached, tokens)
