"""Rewrites contexts whose chunks are spread over many segments, so that they are read in one piece."""

from jaxllm.kv.recompute import LOST
from serving.contexts.record import Record
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
    if len(record.segments) <= _MOST_SEGMENTS:
        return record
    opened = store.open(name)
    chunks = {
        chunk: (bits, [opened.read(layer, [chunk])[0] for layer in range(opened.layers)])
        for chunk, bits in enumerate(record.bits)
        if bits != LOST
    }
    return store.commit(record, chunks)
