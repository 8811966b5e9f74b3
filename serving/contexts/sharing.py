"""Finds chunks that contexts have in common: what is computed from the same tokens by the same model.

Chunks as they are (`raw`) are not computed again: a new context whose first prompt begins as another one does
takes that one's, with the attention that they got. Chunks at fewer bits would change its answer: it computes
its own, and has those that come to the same width in common from the end of its first call on. On storage its
folder has links to the same segments (`ContextStore.link`), and in memory both have the same blobs; a chunk
that one of them stores at fewer bits later is a new one of its own.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence

from jaxllm.errors import JaxllmError
from jaxllm.kv.recompute import LOST
from serving.contexts.memory import ChunkMemory
from serving.contexts.record import Record
from serving.contexts.store import ContextStore
from serving.request import common_prefix


def alike(
    store: ContextStore, record: Record, tokens: Sequence[int], *, across_apps: bool
) -> tuple[Record | None, int]:
    """The context that has the longest beginning of some tokens in whole chunks, and how many these are; the
    chunk of the last token is left out.

    Args:
      store: of the contexts.
      record: of the context whose tokens they are.
      tokens: of it.
      across_apps: whether other apps' contexts count, too.
    """
    best, count = None, 0
    for each in store.records(None if across_apps else record.app):
        same = (each.origin, each.source) == (record.origin, record.source)
        if same and each.name != record.name:
            common = _common_chunks(each, tokens)
            if common > count:
                best, count = each, common
    return best, count


def shared_beginning(
    store: ContextStore, memory: ChunkMemory, record: Record, prompt: Sequence[int], *, across_apps: bool
) -> tuple[Record, str]:
    """Takes the beginning of a new context from another one, whose chunks are not computed then.

    Args:
      store: of the contexts.
      memory: gets the chunks that are in memory.
      record: of the new context, without tokens.
      prompt: its first.
      across_apps: see `alike`.

    Returns:
      The record with the beginning, and the name of the other one; the record as it is and "" where there is
      none.
    """
    best, count = alike(store, record, prompt, across_apps=across_apps)
    if best is None:
        return record, ""
    there = memory.chunks(best.name)
    if any(n not in there for n in range(count)):
        # They are read, so that they must be written.
        store.wait(best.name)
        best = store.record(best.name)
        count = min(count, _common_chunks(best, prompt))
    for n in range(count):
        if n in there and there[n].bits == best.bits[n]:
            memory.share(record.name, there[n])
    first = {field: getattr(best, field)[:count] for field in ("bits", "mass", "seen")}
    tokens = tuple(prompt[: count * record.origin.chunk_tokens])
    return dataclasses.replace(record, tokens=tokens, files=("",) * count, **first), best.name


def share_resident(store: ContextStore, memory: ChunkMemory, name: str, wanted: Iterable[int]) -> None:
    """Takes chunks of a context from others that have them in memory and the same segment on storage.

    Args:
      store: of the contexts.
      memory: of the chunks.
      name: of the context.
      wanted: numbers of the chunks.
    """
    record = store.record(name)
    missing = {n: record.checksums.get(record.files[n]) for n in wanted if n < len(record.files)}
    for other in memory.contexts():
        if other == name or not missing:
            continue
        with contextlib.suppress(JaxllmError):
            theirs = store.record(other)
            if not set(theirs.checksums.values()) & set(missing.values()):
                continue
            for n, each in memory.chunks(other).items():
                if missing.get(n) is None or n >= len(theirs.files):
                    continue
                stored = theirs.checksums.get(theirs.files[n]) == missing[n]
                if stored and each.bits == theirs.bits[n] == record.bits[n]:
                    memory.share(name, each)
                    del missing[n]


def _common_chunks(record: Record, prompt: Sequence[int]) -> int:
    """The first whole chunks that a context has of a prompt, its last token left out."""
    size = record.origin.chunk_tokens
    if record.state_tokens:
        # Its chunks are of no use without its states, which are of all its tokens.
        return 0
    kept = record.bits.index(LOST) if LOST in record.bits else len(record.bits)
    most = size * min(kept, (len(prompt) - 1) // size)
    if most == 0 or list(record.tokens[:size]) != list(prompt[:size]):
        return 0
    return common_prefix(record.tokens[:most], prompt[:most]) // size
