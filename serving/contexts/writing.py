"""Writes chunks to storage: after a call, when it ends, when they leave memory, or never."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set

from jaxllm.errors import BudgetExceeded, CheckpointError, JaxllmError
from jaxllm.kv.eviction import Resident
from jaxllm.kv.recompute import LOST
from serving.contexts.blobs import Stored
from serving.contexts.compacting import compact, make_room
from serving.contexts.growth import agreeing_record
from serving.contexts.options import Writing
from serving.contexts.record import Record
from serving.contexts.store import ContextStore, Linked


class ChunkWriter:
    """Writes chunks to a store at the time that `writing` says.

    The tokens of a call are written when it ends, whatever `writing` says, and flushed to the device, too,
    unless chunks are written in the background. Chunks that are written when they leave memory are not
    flushed: they can be computed again.

    Args:
      store: gets the chunks.
      writing: see `ContextOptions`.
      failed: called with a context's name and the error where chunks cannot be written in the background, in
        the thread that writes.
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
        ready: Callable[[], object] | None = None,
    ) -> Record:
        """Stores a context as a call leaves it.

        Args:
          record: of the context.
          changed: numbers of its chunks that are new, or of another width than on storage.
          coded: encoded chunks by number, all of `changed` among them.
          linked: chunks that another context has on storage (see `ContextStore.link`).
          ready: waits until `coded` has its bytes, where chunks are written in the background; None where
            it has (see `ContextStore.commit_later`).

        Returns:
          The stored record, or the one that is coming (see `ContextStore.commit_later`).

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
        """Compacts a context whose call is stored, as far as that can be done."""
        try:
            return compact(self._store, name)
        except BudgetExceeded:
            # No room for two copies: the context stays in many segments.
            return self._store.record(name)
        except CheckpointError:
            # An older chunk is damaged, or the device failed: this call is stored all the same.
            with contextlib.suppress(JaxllmError):
                return self._store.repair(name)
            return self._store.record(name)

    def left(self, chunks: Sequence[Resident]) -> None:
        """Writes evicted chunks that are not on storage. Those that cannot be written are computed again."""
        if self._writing == "background":
            # Until they are written they are in memory all the same.
            for name in {each.context for each in chunks}:
                self._store.wait(name)
        if self._writing != "at-eviction":
            return
        for name in dict.fromkeys(each.context for each in chunks):
            with contextlib.suppress(JaxllmError):
                self._write(name, [each for each in chunks if each.context == name])

    def _write(self, name: str, chunks: Sequence[Resident]) -> None:
        record = self._store.record(name)
        # A chunk marked lost on storage was in memory only.
        fresh = {
            each.chunk: (each.bits, each.blobs)
            for each in chunks
            if record.bits[each.chunk : each.chunk + 1] == (LOST,)
        }
        if fresh:
            bits = tuple(fresh[n][0] if n in fresh else width for n, width in enumerate(record.bits))
            self._store.commit(dataclasses.replace(record, bits=bits), fresh, flush=False)
