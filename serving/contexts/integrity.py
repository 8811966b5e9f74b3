"""Reads everything in a store, and classifies damage by its remedy."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from jaxllm.errors import CheckpointError, Unreadable
from jaxllm.serving.contexts.catalog import Catalog, Damage
from jaxllm.serving.contexts.encryption import Vault
from jaxllm.serving.contexts.layout import written
from jaxllm.serving.contexts.record import Record
from jaxllm.serving.contexts.segment import Segment, mismatched_chunks, read_rows
from jaxllm.serving.host.direct_io import Storage


@dataclasses.dataclass(frozen=True)
class ChunkDamage:
    """Damage of a context's chunks.

    Attributes:
      corrupt: chunks whose content differs from what was written.
      unread: chunks that storage cannot read.
      reason: error of the first of these.
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
    """Damage of a context's rows, which cannot be recomputed; None for none."""
    try:
        read_rows(folder, record, storage, vault)
    except CheckpointError as error:
        proved = not isinstance(error, Unreadable)
        return Damage(app=record.app, name=record.name, reason=str(error), proved=proved)
    return None


def verify(
    catalog: Catalog,
    storage: Storage,
    vault: Vault | None,
    commit: Callable[[Record], object] | None = None,
) -> list[Damage]:
    """Finds the damage of all contexts; see `ContextStore.verify`.

    Args:
      catalog: catalog of the store.
      storage: storage options of segments.
      vault: keys of encrypted contexts.
      commit: stores a record, for a repair; None to change nothing.

    Raises:
      CheckpointError: a damaged file cannot be moved or written.
    """
    found = []
    with written(catalog.root):
        catalog.find_all()
        whole = catalog.damage.get(catalog.path)
        if whole is not None and commit is not None and whole.proved:
            found.append(catalog.mend(catalog.path))
            catalog.find_all()
    for path, damage in list(catalog.damage.items()):
        if commit is not None and damage.proved:
            with written(path):
                damage = catalog.mend(path)
        found.append(damage)
    for record in list(catalog.records.values()):
        folder = catalog.folder(record)
        if (of_rows := row_damage(folder, record, storage, vault)) is not None:
            found.append(of_rows)
        chunks = chunk_damage(folder, record, storage, vault)
        if chunks.corrupt:
            lost = tuple(sorted(chunks.corrupt))
            found.append(Damage(app=record.app, name=record.name, chunks=lost))
            if commit is not None:
                commit(record.lose(chunks.corrupt))
        if chunks.unread:
            found.append(Damage(app=record.app, name=record.name, reason=chunks.reason, proved=False))
    if commit is not None:
        catalog.sweep()
    return sorted(found, key=lambda each: (each.app, each.name))
