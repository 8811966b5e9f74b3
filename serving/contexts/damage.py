"""What is wrong with what a store holds: read in full, and told apart by what may be done about it."""

import dataclasses
from pathlib import Path

from jaxllm.errors import CheckpointError, Unreadable
from serving.contexts.record import Record
from serving.contexts.segment import Segment
from serving.contexts.stored import strange_chunks
from serving.host.direct_io import Storage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Damage:
    """What is wrong with a stored context.

    Attributes:
      app, name: whose and which; no name where it is all of the app's.
      chunks: that are damaged, and are computed again when the context is used.
      reason: what is wrong besides.
      lost: whether the context cannot be used.
      proved: whether what is there is damaged. Otherwise storage refuses it now, or a newer version or
        somebody else made it: nothing of it is repaired.
      aside: where a repair has moved what was damaged, relative to the store; empty for nowhere.
    """

    app: str
    name: str
    chunks: tuple[int, ...] = ()
    reason: str = ""
    lost: bool = False
    proved: bool = True
    aside: str = ""


@dataclasses.dataclass(frozen=True)
class ChunkDamage:
    """What is wrong with a context's chunks.

    Attributes:
      corrupt: those that are not what was written.
      unread: those that storage refuses.
      reason: of the first of these.
    """

    corrupt: frozenset[int]
    unread: frozenset[int]
    reason: str = ""


def chunk_damage(folder: Path, record: Record, storage: Storage) -> ChunkDamage:
    """Reads all chunks of a context."""
    corrupt: set[int] = set()
    unread: set[int] = set()
    reason = ""
    for name in record.segments:
        own = {chunk for chunk, file in enumerate(record.files) if file == name}
        try:
            with Segment(folder / name, storage) as segment:
                corrupt |= strange_chunks(record, name, segment) | (own & set(segment.verify()))
        except Unreadable as error:
            unread |= own
            reason = reason or str(error)
        except CheckpointError:
            corrupt |= own
    return ChunkDamage(frozenset(corrupt), frozenset(unread - corrupt), reason)
