"""Reads everything in a store, and finds damage."""

from collections.abc import Callable

from serving.contexts.catalog import Catalog
from serving.contexts.damage import Damage, chunk_damage, row_damage
from serving.contexts.encryption import Vault
from serving.contexts.record import Record
from serving.contexts.root import written
from serving.host.direct_io import Storage


def verify(
    catalog: Catalog,
    storage: Storage,
    vault: Vault | None,
    commit: Callable[[Record], object] | None = None,
) -> list[Damage]:
    """Finds the damage of all contexts; see `ContextStore.verify`.

    Args:
      catalog: of the store.
      storage: how segments are read.
      vault: has the keys of encrypted ones.
      commit: stores a record, for a repair; None to change nothing.

    Raises:
      CheckpointError: a damaged file cannot be moved or written.
    """
    found = []
    with written(catalog.root):
        folders = catalog.find_all()
    for each in folders:
        if (damage := catalog.damage.get(each.path)) is not None:
            if commit is not None and damage.proved:
                with written(each.path):
                    damage = catalog.mend(each.path)
            found.append(damage)
        record = catalog.records.get(each.name)
        if record is None or each.path != catalog.folder(record):
            continue
        if (of_rows := row_damage(each.path, record, storage, vault)) is not None:
            found.append(of_rows)
        chunks = chunk_damage(each.path, record, storage, vault)
        if chunks.corrupt:
            lost = tuple(sorted(chunks.corrupt))
            found.append(Damage(app=record.app, name=record.name, chunks=lost))
            if commit is not None:
                commit(record.lose(chunks.corrupt))
        if chunks.unread:
            found.append(Damage(app=record.app, name=record.name, reason=chunks.reason, proved=False))
    if commit is not None:
        catalog.sweep()
    return found
