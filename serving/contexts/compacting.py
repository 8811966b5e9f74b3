"""Rewrites contexts whose chunks are spread over many segments as one, so that they are read in one piece and
older widths of their chunks take no room."""

import contextlib

import numpy as np

from jaxllm.errors import BudgetExceeded, JaxllmError
from jaxllm.kv.recompute import LOST
from serving.contexts.record import Record
from serving.contexts.segment import Chunks, file_bytes
from serving.contexts.store import ContextStore

# A context in more segments than this is rewritten as one.
_MOST_SEGMENTS = 8


def compact(store: ContextStore, name: str) -> Record:
    """Rewrites a context's chunks as one segment, if they are spread over many.

    Raises:
      ContextGone: there is no such context.
      CheckpointError: a chunk cannot be read, or the new segment cannot be written.
      BudgetExceeded: the device has no room for both.
    """
    record = store.record(name)
    return record if len(store.own_segments(record)) <= _MOST_SEGMENTS else _rewritten(store, name)


def make_room(store: ContextStore, record: Record, chunks: Chunks) -> None:
    """Lets new chunks of a context break no quota: where they would, contexts whose segments hold chunks that
    nobody needs any more are rewritten, those of the same app first.

    Args:
      store: of the context.
      record, chunks: see `ContextStore.commit`.

    Raises:
      BudgetExceeded: they break one all the same.
    """
    if store.beyond_quota(record, chunks) is None:
        return
    # What is being written counts twice until it is there.
    store.wait()
    for each in sorted(store.records(), key=lambda each: (each.app != record.app, each.used)):
        if (broken := store.beyond_quota(record, chunks)) is None:
            return
        if broken.app in (None, each.app) and store.stored_bytes(each) > _rewritten_bytes(store, each):
            # One that cannot be read is repaired when it is used.
            with contextlib.suppress(JaxllmError):
                _rewritten(store, each.name)
    if (broken := store.beyond_quota(record, chunks)) is not None:
        raise BudgetExceeded(broken.reason)


def _rewritten(store: ContextStore, name: str) -> Record:
    record = store.record(name)
    with store.opened_apart(name) as opened:
        chunks = {
            chunk: (record.bits[chunk], [opened.read(layer, [chunk])[0] for layer in range(opened.layers)])
            for chunk in _own_chunks(store, record)
        }
    return store.commit(record, chunks)


def _own_chunks(store: ContextStore, record: Record) -> list[int]:
    """The chunks of a context in segments that no other context shares: those that are shared stay once."""
    own = store.own_segments(record)
    return [n for n, file in enumerate(record.files) if file in own]


def _rewritten_bytes(store: ContextStore, record: Record) -> int:
    """The size of the segment of a context's own chunks."""
    sizes = {
        bits: [np.broadcast_to(np.uint8(0), size) for size in record.origin.layer_bytes[bits]]
        for bits in set(record.bits) - {LOST}
    }
    chunks = {n: (record.bits[n], sizes[record.bits[n]]) for n in _own_chunks(store, record)}
    return file_bytes(chunks, encrypted=store.vault is not None)
