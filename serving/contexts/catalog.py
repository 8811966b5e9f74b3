"""The records of a store as they are found on storage, and what is wrong with them.

Finding changes nothing on storage. What is damaged is set aside when it is mended, or when another record
takes its place; a folder without a record is a leftover of a context that was being made or deleted.
"""

import contextlib
import dataclasses
import os
from pathlib import Path

from jaxllm.errors import CheckpointError, JaxllmError, Unreadable
from jaxllm.files.atomic import sync
from serving.contexts.damage import Damage
from serving.contexts.record import Record
from serving.contexts.record_file import MOST_USED, RecordMissing, find_record, stands, write_record
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
      damage: what was found wrong and is not mended, by the context's folder.
      leftovers: folders without a record.
    """

    def __init__(self, root: Path, segments: OpenSegments) -> None:
        """Takes the store's folder, and what of it is open."""
        self.root, self._segments = root, segments
        self.records: dict[str, Record] = {}
        self.damage: dict[Path, Damage] = {}
        self.leftovers: set[Path] = set()

    def folder(self, record: Record) -> Path:
        """Where a context lies."""
        return self.root / folder_name(record.app) / record.name

    def next_use(self) -> int:
        """What counts the store's next use."""
        return min(MOST_USED, 1 + max((each.used for each in self.records.values()), default=0))

    def find_all(self) -> list[ContextFolder]:
        """Reads all records.

        Raises:
          OSError: storage refuses to say which there are.
        """
        folders = list(context_folders(self.root))
        for each in folders:
            self.find(each)
        return folders

    def find(self, folder: ContextFolder) -> None:
        """Reads a context's record, and notes what is wrong with it. A record that is known already stays."""
        known = self.records.get(folder.name)
        own = known is not None and self.folder(known) == folder.path
        whose = Damage(app=folder.app, name=folder.name)
        self.damage.pop(folder.path, None)
        try:
            if folder.problem is not None:
                raise folder.problem
            if known is not None and not own:
                raise CheckpointError(f"{folder.path}: a context of another app has its name")
            found = find_record(folder.path)
        except RecordMissing as error:
            if own or error.foreign:
                self.damage[folder.path] = dataclasses.replace(
                    whose, reason=str(error), lost=not own, proved=own
                )
            else:
                self.leftovers.add(folder.path)
        except CheckpointError as error:
            proved = not isinstance(error, Unreadable)
            self.damage[folder.path] = dataclasses.replace(
                whose, reason=str(error), lost=not own, proved=proved
            )
        else:
            if not own:
                self.records[folder.name] = found.record
            if found.damage:
                self.damage[folder.path] = dataclasses.replace(whose, reason=found.damage)

    def find_again(self, name: str, app: str | None) -> None:
        """Reads a context that could not be read: that may have passed.

        Raises:
          CheckpointError: it has not, and the context is the app's, or of any app where that is None.
        """
        for path, before in list(self.damage.items()):
            if before.name == name and before.lost and app in (None, before.app):
                self.find(ContextFolder(path, before.app, name))
                if (damage := self.damage.get(path)) is not None and damage.lost:
                    kind = CheckpointError if damage.proved else Unreadable
                    raise kind(f"the context {name} cannot be used: {damage.reason}")

    def replace(self, folder: Path, record: Record) -> Path | None:
        """Writes a context's record; one that is damaged is set aside before.

        Returns:
          Where a damaged one is now.

        Raises:
          OSError: it cannot be written.
        """
        damage, aside = self.damage.get(folder), None
        if damage is not None and damage.proved and os.path.lexists(folder / RECORD):
            # One of which a copy is whole stays until the new one is written, which may fail.
            aside = set_aside(self.root, folder / RECORD, keep=stands(folder))
        write_record(folder, record)
        self.damage.pop(folder, None)
        return aside

    def unlist(self, folder: Path) -> None:
        """Removes a context's records; what is in the place of one and is none is set aside. Without its
        records it is no context any more, whatever happens next.

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
        """Takes a context as it is on storage, whatever is known of it, and removes what no record names.

        Raises:
          CheckpointError: its record cannot be read.
        """
        try:
            found = find_record(folder)
        except RecordMissing:
            self.records.pop(name, None)
            self.damage.pop(folder, None)
            # It is gone for good, whatever stays of its folder for now.
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
        for each in {*filter(SEGMENT.fullmatch, names)} - set(found.record.segments):
            self.discard(folder / each)

    def mend(self, folder: Path) -> Damage:
        """Sets aside what is damaged of a context: its record, of which there is another, or all of it.

        Returns:
          What was wrong, and where it was moved.

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
        """Removes a segment that no record names; one that stays, or is none of the store's, does no harm."""
        self._segments.forget(path)
        with contextlib.suppress(OSError):
            if is_own(path):
                path.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Removes folders of contexts that were being made or deleted when a process ended.

        Raises:
          CheckpointError: that cannot be flushed.
        """
        for folder in list(self.leftovers):
            self.remove(folder)
            self.leftovers.discard(folder)

    def remove(self, folder: Path) -> None:
        """Removes the store's files in the folder of a context that has no record any more, and the folder
        and its app's where nothing is left in them.

        Raises:
          CheckpointError: that cannot be flushed.
        """
        self._segments.forget(folder)
        with contextlib.suppress(OSError):
            remove_own(folder)
            folder.parent.rmdir()
        with written(folder):
            sync(folder.parent if folder.parent.exists() else self.root)
