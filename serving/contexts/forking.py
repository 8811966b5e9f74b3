"""Forks contexts: makes a new one of the first tokens of another, which stays as it is."""

import contextlib
import dataclasses

from jaxllm.errors import CheckpointError, ContextGone, JaxllmError
from jaxllm.kv.recompute import LOST
from serving.contexts.manager import Contexts
from serving.contexts.record import Record
from serving.contexts.segment import Chunks
from serving.contexts.store import Linked


def fork(contexts: Contexts, record: Record, tokens: int) -> Record:
    """A new context of the same app and level, with a context's first tokens and their whole chunks, which
    both have on storage (see `ContextStore.link`), or copies of them, and a copy of their rows. Chunks that
    cannot be read are computed again.

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
    if record.state_tokens:
        # States are of all their tokens, or of none.
        count = len(record.bits) if tokens >= record.state_tokens else 0
    made = contexts.create(record.app, level=record.origin.level)
    try:
        first = dataclasses.replace(
            made,
            tokens=record.tokens[:tokens],
            source=record.source if tokens else (),
            mass=record.mass[:count],
            seen=record.seen[:count],
            state_tokens=record.state_tokens if count else 0,
        )
        contexts.store.wait(record.name)
        wanted = dict(enumerate(record.bits[:count]))
        linked = contexts.store.link(first, record.name, wanted) if contexts.options.share_beginnings else {}
        chunks = _stored(contexts, record, count, linked)
        widths = {n: wanted[n] for n in linked} | {n: bits for n, (bits, _) in chunks.items()}
        first = dataclasses.replace(first, bits=tuple(widths.get(n, LOST) for n in range(count)))
        rows = contexts.rows_before(record, tokens)
        return contexts.store.commit(first, chunks, linked=linked, rows=rows)
    except BaseException:
        with contextlib.suppress(JaxllmError):
            contexts.delete(made.name)
        raise


def _stored(contexts: Contexts, record: Record, count: int, linked: Linked) -> Chunks:
    """The first chunks of a context that are on storage, but for those that are linked."""
    tokens = record.state_tokens or count * record.origin.chunk_tokens
    try:
        there = contexts.store.record(record.name)
        if there.tokens[:tokens] != record.tokens[:tokens]:
            return {}
        stored = {chunk for chunk, bits in enumerate(there.bits[:count]) if bits != LOST}
        wanted = sorted(stored - linked.keys())
        opened = contexts.store.open(record.name, wanted)
        return {
            chunk: (there.bits[chunk], [opened.read(layer, [chunk])[0] for layer in range(opened.layers)])
            for chunk in wanted
        }
    except (CheckpointError, ContextGone):
        # Damaged, or deleted since the record was read: its tokens are enough.
        return {}
