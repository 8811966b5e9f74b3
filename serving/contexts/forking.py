"""Forks contexts: makes a new one of the first tokens of another, which stays as it is."""

import contextlib
import dataclasses

from jaxllm.errors import CheckpointError, ContextGone, JaxllmError
from jaxllm.kv.recompute import LOST
from serving.contexts.manager import Contexts
from serving.contexts.record import Record
from serving.contexts.segment import Chunks


def fork(contexts: Contexts, record: Record, tokens: int) -> Record:
    """A new context of the same app and level, with a context's first tokens and copies of their whole
    chunks. Chunks that cannot be copied are computed again.

    Args:
      contexts: of all apps.
      record: of the context, whose origin is the engine's (see `Contexts.record`).
      tokens: number of its tokens that the new one has.

    Returns:
      The new context's record.

    Raises:
      BudgetExceeded: the app may own no more contexts, or there is no room.
      CheckpointError: it cannot be written.
    """
    count = min(tokens // record.origin.chunk_tokens, len(record.bits))
    made = contexts.create(record.app, level=record.origin.level)
    try:
        chunks = _stored(contexts, record, count)
        first = dataclasses.replace(
            made,
            tokens=record.tokens[:tokens],
            bits=tuple(chunks[n][0] if n in chunks else LOST for n in range(count)),
            mass=record.mass[:count],
            seen=record.seen[:count],
        )
        return contexts.store.commit(first, chunks)
    except BaseException:
        with contextlib.suppress(JaxllmError):
            contexts.delete(made.name)
        raise


def _stored(contexts: Contexts, record: Record, count: int) -> Chunks:
    """The first chunks of a context that are on storage."""
    tokens = count * record.origin.chunk_tokens
    try:
        contexts.store.wait(record.name)
        there = contexts.store.record(record.name)
        if there.tokens[:tokens] != record.tokens[:tokens]:
            return {}
        wanted = [chunk for chunk, bits in enumerate(there.bits[:count]) if bits != LOST]
        opened = contexts.store.open(record.name, wanted)
        return {
            chunk: (there.bits[chunk], [opened.read(layer, [chunk])[0] for layer in range(opened.layers)])
            for chunk in wanted
        }
    except (CheckpointError, ContextGone):
        # Damaged, or deleted since the record was read: its tokens are enough.
        return {}
