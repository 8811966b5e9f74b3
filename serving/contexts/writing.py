"""Writes chunks to storage: when a call ends, when they leave memory, or never."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence, Set

from jaxllm.errors import BudgetExceeded, CheckpointError, JaxllmError
from jaxllm.kv.eviction import Resident
from jaxllm.kv.recompute import LOST
from serving.contexts.blobs import Stored
from serving.contexts.compacting import compact
from serving.contexts.options import Writing
from serving.contexts.record import Record
from serving.contexts.store import ContextStore


class ChunkWriter:
    """Writes chunks to a store at the time that `writing` says.

    The tokens of a call are flushed to the device when it ends, whatever `writing` says. Chunks that are
    written when they leave memory are not flushed: they can be computed again.

    Args:
      store: gets the chunks.
      writing: see `ContextOptions`.
    """

    def __init__(self, store: ContextStore, writing: Writing) -> None:
        self._store, self._writing = store, writing

    def keep(self, record: Record, changed: Set[int], coded: Mapping[int, Stored]) -> Record:
        """Stores a context as a call leaves it.

        Args:
          record: of the context.
          changed: numbers of its chunks that are new, or of another width than on storage.
          coded: encoded chunks by number, all of `changed` among them.

        Raises:
          BudgetExceeded, CheckpointError: see `ContextStore.commit`.
        """
        if self._writing != "ahead":
            return self._store.commit(record.lose(changed))
        record = self._store.commit(record, {n: coded[n] for n in coded if n in changed})
        try:
            return compact(self._store, record.name)
        except BudgetExceeded:
            # No room for two copies: the context stays in many segments.
            return record
        except CheckpointError:
            # An older chunk is damaged, or the device failed: this call is stored all the same.
            with contextlib.suppress(JaxllmError):
                return self._store.repair(record.name)
            return record

    def left(self, chunks: Sequence[Resident]) -> None:
        """Writes evicted chunks that are not on storage. Those that cannot be written are computed again."""
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
