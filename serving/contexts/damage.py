"""Finds damage in a store: reads all of it, and sorts what is wrong by what can be done about it."""

import dataclasses
from pathlib import Path

from jaxllm.errors import CheckpointError, Unreadable
from serving.contexts.encryption import Vault
from serving.contexts.record import Record
from serving.contexts.row_file import read_rows
from serving.contexts.segment import Segment
from serving.contexts.stored import mismatched_chunks
from serving.host.direct_io import Storage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Damage:
    """Damage of a stored context.

    Attributes:
      app, name: of the context; an empty name for all contexts of the app.
      chunks: damaged chunks, which are computed again when the context is used.
      reason: further damage.
      lost: whether the context cannot be used.
      proved: whether the content is damaged. Otherwise storage refuses it now, or a newer version or another
        program made it: nothing of it is repaired.
      aside: where a repair has moved damaged files, relative to the store; empty where it moved none.
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
    """Damage of a context's chunks.

    Attributes:
      corrupt: chunks whose content differs from what was written.
      unread: chunks that storage refuses.
      reason: why the first of these was refused.
    """

    corrupt: frozenset[int]
    unread: frozenset[int]
    reason: str = ""


def chunk_damage(folder: Path, record: Record, storage: Storage, vault: Vault | None = None) -> ChunkDamage:
    """Reads all chunks of a context; encrypted ones with the keys in a vault."""
    corrupt: set[int] = set()
    unread: set[int] = set()
    reason = ""
    for name in record.segments:
        own = {chunk for chunk, file in enumerate(record.files) if file == name}
        try:
            with Segment(folder / name, storage, vault) as segment:
                corrupt |= mismatched_chunks(record, name, segment) | (own & set(segment.verify()))
        except Unreadable as error:
            unread |= own
            reason = reason or str(error)
        except CheckpointError:
            corrupt |= own
    return ChunkDamage(frozenset(corrupt), frozenset(unread - corrupt), reason)


def row_damage(folder: Path, record: Record, storage: Storage, vault: Vault | None = None) -> Damage | None:
    """Damage of a context's rows, which nothing can make again; None for none."""
    try:
        read_rows(folder, record, storage, vault)
    except CheckpointError as error:
        proved = not isinstance(error, Unreadable)
        return Damage(app=record.app, name=record.name, reason=str(error), proved=proved)
    return None
