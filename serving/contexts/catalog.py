"""Finds the records of a store, and their damage.

Finding changes nothing on storage. Damaged files are set aside when they are mended, or when another record
takes their place; a folder without a record is a leftover of a context that was being made or deleted.
"""

import contextlib
import dataclasses
import os
from pathlib import Path

from jaxllm.errors import CheckpointError, ContextGone, JaxllmError, Unreadable
from jaxllm.files.atomic import sync
from serving.contexts.damage import Damage
from serving.contexts.encryption import KeyErased, Vault
from serving.contexts.record import Record
from serving.contexts.record_file import MOST_USED, RecordMissing, find_record, is_readable, write_record
from serving.contexts.root import (
    PREVIOUS,
    RECORD,
    SEGMENT,
    ContextFolder,
    context_folders,
    folder_name,
    is_own,
    remove_own,
    set_aside,
    written,
)
from serving.contexts.stored import OpenSegments


class Catalog:
    """The contexts in a store's folder.

    Attributes:
      root: the store's folder.
      records: by name.
      damage: that was found and is not mended, by the context's folder.
      leftovers: folders without a record.
      erased: folders of contexts whose key was erased.
    """

    def __init__(self, root: Path, segments: OpenSegments, vault: Vault | None = None) -> None:
        """Takes the store's folder, its open segments, and the keys of its encrypted contexts."""
        self.root, self._segments, self._vault = root, segments, vault
        self.erased: set[Path] = set()
        self.records: dict[str, Record] = {}
        self.damage: dict[Path, Damage] = {}
        self.leftovers: set[Path] = set()
        # Folders of contexts whose record a power cut may still take.
        self._unflushed: set[Path] = set()

    def folder(self, record: Record) -> Path:
        """A context's folder."""
        return self.root / folder_name(record.app) / record.name

    def next_use(self) -> int:
        """The number of the store's next use."""
        return min(MOST_USED, 1 + max((each.used for each in list(self.records.values())), default=0))

    def find_all(self) -> list[ContextFolder]:
        """Reads all records.

        Raises:
          OSError: storage refuses to list them.
        """
        folders = list(context_folders(self.root))
        for each in folders:
            self.find(each)
        return folders

    def find(self, folder: ContextFolder) -> None:
        """Reads a context's record, and notes its damage. A record that is known already stays."""
        known = self.records.get(folder.name)
        own = known is not None and self.folder(known) == folder.path
        whose = Damage(app=folder.app, name=folder.name)
        self.damage.pop(folder.path, None)
        try:
            if folder.problem is not None:
                raise folder.problem
            if known is not None and not own:
                raise CheckpointError(f"{folder.path}: a context of another app has its name")
            found = find_record(folder.path, self._vault)
        except RecordMissing as error:
            if own or error.foreign:
                self.damage[folder.path] = dataclasses.replace(
                    whose, reason=str(error), lost=not own, proved=own
                )
            else:
                self.leftovers.add(folder.path)
        except CheckpointError as error:
            proved = not isinstance(error, Unreadable)
            if isinstance(error, KeyErased):
                self.erased.add(folder.path)
            self.damage[folder.path] = dataclasses.replace(
                whose, reason=str(error), lost=not own, proved=proved
            )
        else:
            if not own:
                self.records[folder.name] = found.record
            if found.damage:
                self.damage[folder.path] = dataclasses.replace(whose, reason=found.damage)

    def find_again(self, name: str, app: str | None) -> Record | None:
        """Tries again to read a context that could not be read, and returns its record; None where there is
        none.

        Raises:
          ContextGone: its key was erased.
          CheckpointError: it still cannot, and the app owns the context; of any app where `app` is None.
        """
        for path, before in list(self.damage.items()):
            if before.name == name and before.lost and app in (None, before.app):
                self.find(ContextFolder(path, before.app, name))
                if path in self.erased:
                    raise ContextGone(f"the context {name} is gone: its app's key was erased")
                if (damage := self.damage.get(path)) is not None and damage.lost:
                    kind = CheckpointError if damage.proved else Unreadable
                    raise kind(f"the context {name} cannot be used: {damage.reason}")
        return self.records.get(name)

    def replace(self, folder: Path, record: Record, *, flush: bool = True) -> Path | None:
        """Writes a context's record; sets a damaged one aside before. With `flush` it waits for the device;
        the record before it, which stays, is always one that the device has.

        Returns:
          The new path of a damaged one.

        Raises:
          OSError: it cannot be written.
        """
        damage, aside = self.damage.get(folder), None
        if damage is not None and damage.proved and os.path.lexists(folder / RECORD):
            # One with a whole copy stays until the new one is written, which may fail.
            aside = set_aside(self.root, folder / RECORD, keep=is_readable(folder, self._vault))
        write_record(folder, record, self._vault, flush=flush, keep=folder not in self._unflushed)
        if flush:
            self._unflushed.discard(folder)
        else:
            self._unflushed.add(folder)
        self.damage.pop(folder, None)
        return aside

    def remove_records(self, folder: Path) -> None:
        """Removes a context's records, and with them the context, whatever happens next; sets aside other
        kinds of files in their places.

        Raises:
          OSError: they cannot be removed.
        """
        for each in (folder / PREVIOUS, folder / RECORD):
            if each.is_file() and not each.is_symlink():
                each.unlink()
            elif os.path.lexists(each):
                set_aside(self.root, each)
        sync(folder)

    def settle(self, name: str, folder: Path) -> None:
        """Takes a context as it is on storage, whatever was known of it, and removes segments that no record
        names.

        Raises:
          CheckpointError: its record cannot be read.
        """
        try:
            found = find_record(folder, self._vault)
        except RecordMissing:
            self.records.pop(name, None)
            self.damage.pop(folder, None)
            # The context is gone, even where its folder stays for now.
            try:
                self.remove(folder)
            except JaxllmError:
                self.leftovers.add(folder)
            return
        self.records[name] = found.record
        self.damage.pop(folder, None)
        if found.damage:
            self.damage[folder] = Damage(app=found.record.app, name=name, reason=found.damage)
        with written(folder):
            names = os.listdir(folder)
        for each in {*filter(SEGMENT.fullmatch, names)} - found.record.own_files:
            self.discard(folder / each)

    def mend(self, folder: Path) -> Damage:
        """Sets aside a context's damaged record where there is another, else all of the context.

        Returns:
          The damage, and where the files were moved.

        Raises:
          OSError: it cannot be moved.
        """
        damage = self.damage[folder]
        self._segments.forget(folder)
        if damage.lost:
            aside = set_aside(self.root, folder)
            del self.damage[folder]
        else:
            aside = self.replace(folder, self.records[damage.name])
        return dataclasses.replace(damage, aside="" if aside is None else str(aside.relative_to(self.root)))

    def discard(self, path: Path) -> None:
        """Removes a segment that no record names. One that stays does no harm; a file of others stays."""
        self._segments.forget(path)
        with contextlib.suppress(OSError):
            if is_own(path):
                path.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Removes folders of contexts that were being made or deleted when a process ended.

        Raises:
          CheckpointError: the removal cannot be flushed.
        """
        for folder in list(self.leftovers):
            self.remove(folder)
            self.leftovers.discard(folder)

    def remove(self, folder: Path) -> None:
        """Removes the store's files from the folder of a context without a record, and the folder and its
        app's where they are empty then.

        Raises:
          CheckpointError: the removal cannot be flushed.
        """
        self._segments.forget(folder)
        with contextlib.suppress(OSError):
            remove_own(folder)
            folder.parent.rmdir()
        with written(folder):
            sync(folder.parent if folder.parent.exists() else self.root)
