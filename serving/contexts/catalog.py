"""The catalog of a store: the records of its contexts, in one SQLite file; and the damage of a store.

A context is a row: its name, its app, and its record, encrypted if there are keys (`encryption`), with a
checksum over all. The row of a deleted context stays, without a record, until its files are removed; so a
folder without a row was lost by the catalog or copied by somebody: it is listed, and never removed. Nothing
else has rows: quotas are sums over files and records, and contexts share segments by links.

A row changes by one statement. New segments are flushed before it, and old ones are removed after `flush`;
so at any time the row names existing segments.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from jaxllm.errors import BudgetExceeded, CheckpointError, ConfigError, ContextGone, JaxllmError, Unreadable
from jaxllm.files.atomic import atomic_file, sync
from jaxllm.serving.contexts import layout
from jaxllm.serving.contexts.encryption import KeyErased, Vault, require_form
from jaxllm.serving.contexts.record import MAX_USED, Record, decoded, encoded
from jaxllm.serving.contexts.segment import OpenSegments, Segment, mismatched_chunks, read_rows
from jaxllm.serving.host.storage import Storage

KIND, VERSION = 0x4A58434E, 1
_SCHEMA = """
CREATE TABLE contexts (
    name TEXT NOT NULL UNIQUE,  -- of the context
    app TEXT NOT NULL,          -- name of its app's folder
    sealed INTEGER NOT NULL,    -- whether the record is encrypted
    record BLOB,                -- NULL of a deleted context
    checksum BLOB NOT NULL      -- of all of these
);
"""
_SELECT = "SELECT rowid, name, app, sealed, record, checksum FROM contexts"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Damage:
    """Damage of a stored context.

    Attributes:
      app, name: app and name of the context; empty for the catalog itself.
      chunks: damaged chunks, which are recomputed when the context is used.
      reason: further damage.
      lost: whether the context cannot be used.
      proved: whether the content is certainly damaged. Otherwise storage refuses it now, or its origin is
        unknown, and it is not repaired.
      aside: new place of damaged files after a repair, relative to the store; empty for none.
    """

    app: str
    name: str
    chunks: tuple[int, ...] = ()
    reason: str = ""
    lost: bool = False
    proved: bool = True
    aside: str = ""


def require_store(root: Path) -> bool:
    """Checks that a folder is a store, or can become one (missing or empty); changes nothing.

    Returns:
      Whether it has a catalog.

    Raises:
      ConfigError: it is neither, or a store of another version.
      OSError: it cannot be read.
    """
    try:
        names = sorted(os.listdir(root))
    except FileNotFoundError:
        return False
    if layout.CATALOG in names:
        return layout.require_kind(root / layout.CATALOG, KIND, VERSION)
    if any(map(layout.is_app_folder, names)):
        raise ConfigError(
            f"{root} has contexts, and their catalog, {layout.CATALOG}, is missing: restore it from a copy, "
            "or use another folder; the files stay as they are"
        )
    if others := [name for name in names if name != layout.LOCK and not layout.UNFINISHED.fullmatch(name)]:
        raise ConfigError(
            f"{root} is not a store of contexts, and not empty (it has {others[0]!a:.80}): use an empty "
            "folder"
        )
    return False


class Catalog:
    """The contexts of a store.

    Attributes:
      root: the store's folder.
      path: the catalog's file.
      records: records by name.
      record_bytes: size of each row, by name.
      damage: damage of rows, by the context's folder; that of the catalog itself by its path.
      deleted: folders of deleted contexts whose files are not removed yet, by name.
      erased: folders of contexts whose key was erased.
    """

    def __init__(self, root: Path, segments: OpenSegments, vault: Vault | None = None) -> None:
        """Opens the catalog in a store's folder, created if missing; `vault` has the keys of encrypted
        contexts.

        Raises:
          ConfigError: the whole catalog is damaged, of another version, or another program's file.
          OSError: it cannot be made or read.
        """
        self.root, self._segments, self._vault = root, segments, vault
        self.path = root / layout.CATALOG
        self.records: dict[str, Record] = {}
        self.record_bytes: dict[str, int] = {}
        self.damage: dict[Path, Damage] = {}
        self.deleted: dict[str, Path] = {}
        self.erased: set[Path] = set()
        # SQLite's errors of the file; and the row of a damage, by its path.
        self._faults = ""
        self._row_ids: dict[Path, int] = {}
        self._database = layout.Database(self.path, _SCHEMA, kind=KIND, version=VERSION)

    def close(self) -> None:
        """Closes the file."""
        self._database.close()

    def folder(self, record: Record) -> Path:
        """A context's folder."""
        return self.root / layout.folder_name(record.app) / record.name

    def next_use(self) -> int:
        """The number of the store's next use."""
        # Also above records in the ledger but not in the catalog: repeated numbers prove nothing.
        known = 0 if self._vault is None else self._vault.most_used
        return min(MAX_USED, 1 + max([known, *(each.used for each in list(self.records.values()))]))

    def find_all(self) -> None:
        """Reads all rows, and compares them with the folders. Known records stay.

        Raises:
          JaxllmError: the device failed.
          OSError: storage refuses to list folders.
        """
        self.damage.clear()
        self.erased.clear()
        self._faults = self._database.faults()
        if self._faults:
            self._note(self.path, "", "", CheckpointError(f"{self.path} is damaged: {self._faults}"))
        elif self._database.log_lost:
            reason = "the end of its log cannot be read; the last changes may be missing"
            self._note(self.path, "", "", Unreadable(f"{self.path}: {reason}"))
        seen = {self._find(row) for row in self._rows()}
        for record in list(self.records.values()):
            if (folder := self.folder(record)) not in seen:
                reason = f"{self.path} has lost the record of the context {record.name}"
                self._note(folder, record.app, record.name, CheckpointError(reason))
                seen.add(folder)
        for path in layout.context_folders(self.root):
            if path not in seen and not layout.is_empty(path):
                reason = (
                    f"{path} has files of a context that the catalog does not know: the catalog was damaged, "
                    "or is older, or the folder was copied; they stay until you remove them"
                )
                self._note(path, layout.app_of(path.parent.name), path.name, Unreadable(reason))

    def find_again(self, name: str, app: str | None) -> Record | None:
        """Retries an unreadable context, and returns its record; None if there is none.

        Raises:
          ContextGone: its key was erased.
          CheckpointError: it is still unreadable, and the app owns the context, or `app` is None.
        """
        for path, before in list(self.damage.items()):
            if before.name == name and before.lost and app in (None, before.app):
                for row in self._row(name):
                    self.damage.pop(path, None)
                    self.erased.discard(path)
                    self._find(row)
                if path in self.erased:
                    raise ContextGone(f"the context {name} is gone: its app's key was erased")
                self._require_found(path, f"the context {name} cannot be used: ")
        return self.records.get(name)

    def put(self, record: Record, *, flush: bool = True) -> None:
        """Writes a context's record. Without `flush` it survives a kill, but a power cut may restore the one
        before.

        Raises:
          BudgetExceeded, CheckpointError: it cannot be written.
          OSError: the ledger of an encrypted context cannot be written.
        """
        folder, vault = self.folder(record), self._vault
        self._require_whole()
        body = encoded(record)
        if vault is not None:
            body = vault.new_seal(folder.parent.name).head(body, record.name)
            if flush:
                vault.expect(folder)
        values = (record.name, folder.parent.name, int(vault is not None), body)
        self._database.run(
            "INSERT INTO contexts VALUES (?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
            "sealed = excluded.sealed, record = excluded.record, checksum = excluded.checksum",
            *values, _checksum(*values),
        )  # fmt: skip
        self.record_bytes[record.name] = len(body)
        if flush:
            self._database.flush()
            if vault is not None:
                vault.wrote(folder, record.used)
        self.damage.pop(folder, None)

    def delete(self, record: Record) -> None:
        """Deletes a context durably; its row stays until `remove`.

        Raises:
          BudgetExceeded, CheckpointError: it cannot be written.
        """
        folder = self.folder(record)
        self._require_whole()
        try:
            self._mark_deleted(folder)
        except BudgetExceeded:
            # A full device has space for a few pages after its chunks are removed; if that fails, too, they
            # are recomputed.
            for each in record.segments:
                self.discard(folder / each)
            self._mark_deleted(folder)

    def _mark_deleted(self, folder: Path) -> None:
        self._database.run(
            "UPDATE contexts SET sealed = 0, record = NULL, checksum = ? WHERE name = ?",
            _checksum(folder.name, folder.parent.name, 0, None), folder.name,
        )  # fmt: skip
        self._database.flush()

    def settle(self, name: str, folder: Path) -> None:
        """Reloads a context from storage, ignoring what is known of it, and removes segments that no record
        names.

        Raises:
          CheckpointError: its record cannot be read.
        """
        rows = self._row(name)
        known = self.records.pop(name, None)
        try:
            for row in rows:
                self.damage.pop(folder, None)
                self._find(row)
        except BaseException:
            if known is not None:
                self.records[name] = known
            raise
        self._require_found(folder)
        if (record := self.records.get(name)) is None:
            # The context is gone, even if its folder stays for now.
            with contextlib.suppress(OSError, JaxllmError):
                if rows:
                    self.remove(name, folder)
                else:
                    # An unfinished context: a folder with files is not this store's.
                    folder.rmdir()
            return
        try:
            # Old segments may be removed once the row is flushed.
            self._database.flush()
            names = os.listdir(folder)
        except (JaxllmError, FileNotFoundError):
            return
        except OSError as error:
            raise layout.not_read(folder, error) from error
        for each in {*filter(layout.SEGMENT.fullmatch, names)} - record.own_files:
            self.discard(folder / each)

    def mend(self, folder: Path) -> Damage:
        """Rewrites a context's row if its record is known, else sets aside its folder, with the row in it; a
        damaged catalog is rebuilt from its readable rows.

        Returns:
          The damage, and the new place of the files.

        Raises:
          OSError, JaxllmError: they cannot be moved.
        """
        damage = self.damage[folder]
        if folder == self.path:
            aside = self._rebuild()
        elif not damage.lost:
            self.put(self.records[damage.name])
            return damage
        else:
            self._segments.forget(folder)
            row_id = self._row_ids[folder]
            rows = self._database.run(f"{_SELECT} WHERE rowid = ?", row_id)
            if self.path in folder.parents:
                # The row names no folder.
                folder = self.root / layout.folder_name("unknown") / layout.new_name()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with atomic_file(folder / layout.RECORD) as file:
                os.fchmod(file.fileno(), 0o600)
                plain = [[each.hex() if isinstance(each, bytes) else each for each in row] for row in rows]
                file.write(layout.RECORD_HEAD + json.dumps(plain).encode() + b"}")
            aside = layout.set_aside(self.root, folder)
            self._database.run("DELETE FROM contexts WHERE rowid = ?", row_id)
            self._database.flush()
        self.damage = {path: each for path, each in self.damage.items() if each is not damage}
        return dataclasses.replace(damage, aside=str(aside.relative_to(self.root)))

    def discard(self, path: Path) -> None:
        """Removes a segment that no record names. One that stays does no harm; foreign files stay."""
        self._segments.forget(path)
        with contextlib.suppress(OSError, JaxllmError):
            layout.require_real(path.parent)
            if layout.is_own(path):
                path.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Removes the files of deleted contexts, and empty folders of unfinished ones.

        Raises:
          CheckpointError: the removal cannot be flushed.
        """
        for name, folder in list(self.deleted.items()):
            self.remove(name, folder)
        with contextlib.suppress(OSError):
            for path in layout.context_folders(self.root):
                if path.name not in self.records and path not in self.damage and layout.is_empty(path):
                    path.rmdir()

    def remove(self, name: str, folder: Path) -> None:
        """Removes the files of a deleted context, then its folder and its app's if they are empty, and its
        row.

        Raises:
          CheckpointError: they cannot be removed now; `sweep` tries again.
        """
        self._segments.forget(folder)
        self.deleted[name] = folder
        layout.require_real(folder)
        with layout.written(folder):
            # Before the row: otherwise leftover files would be unknown.
            with contextlib.suppress(FileNotFoundError):
                layout.remove_own(folder)
            with contextlib.suppress(OSError):
                folder.parent.rmdir()
            sync(folder.parent if folder.parent.exists() else self.root)
            if self._vault is not None:
                self._vault.forget(folder)
        self._database.run("DELETE FROM contexts WHERE name = ? AND record IS NULL", name)
        self.deleted.pop(name, None)
        self.record_bytes.pop(name, None)

    def _require_whole(self) -> None:
        if self._faults:
            raise CheckpointError(
                f"{self.path} is damaged, and nothing is written to it: `jaxllm contexts repair {self.root}` "
                "keeps what can be read"
            )

    def _require_found(self, folder: Path, prefix: str = "") -> None:
        """Raises the error of a context that cannot be used."""
        if (damage := self.damage.get(folder)) is not None and damage.lost:
            raise (CheckpointError if damage.proved else Unreadable)(f"{prefix}{damage.reason}")

    def _row(self, name: str) -> list[tuple[Any, ...]]:
        return self._database.run(f"{_SELECT} WHERE name = ?", name)

    def _rows(self) -> list[tuple[Any, ...]]:
        """All rows; for a damaged catalog the readable ones, from both ends."""
        if not self._faults:
            return self._database.run(f"{_SELECT} ORDER BY rowid")
        found: dict[int, tuple[Any, ...]] = {}
        for beyond, order, at in ((">", "ASC", -1 << 63), ("<", "DESC", (1 << 63) - 1)):
            with contextlib.suppress(CheckpointError):
                next_id = f"SELECT rowid FROM contexts WHERE rowid {beyond} ? ORDER BY rowid {order} LIMIT 1"
                while (ids := self._database.run(next_id, at)) and ids[0][0] not in found:
                    ((at,),) = ids
                    with contextlib.suppress(CheckpointError):
                        (found[at],) = self._database.run(f"{_SELECT} WHERE rowid = ?", at)
        return list(found.values())

    def _rebuild(self) -> Path:
        """Rebuilds the catalog from its readable rows; returns the path of the damaged one."""
        rows = self._rows()
        temporary = self.path.with_name(f".{self.path.name}.jaxllm-{secrets.token_hex(6)}.tmp")
        fresh = layout.Database(temporary, _SCHEMA, kind=KIND, version=VERSION)
        for _, *row in rows:
            with contextlib.suppress(CheckpointError):
                fresh.run("INSERT INTO contexts VALUES (?, ?, ?, ?, ?)", *row)
        fresh.close()
        self._database.close()
        place = self.root / layout.QUARANTINE / "catalog" / secrets.token_hex(8)
        place.mkdir(mode=0o700, parents=True)
        aside = place / layout.CATALOG
        try:
            os.link(self.path, aside)
        except OSError:
            # No hard links on this file system.
            shutil.copyfile(self.path, aside)
        os.replace(temporary, self.path)
        for each in (place, self.root):
            sync(each)
        self._database, self._faults = layout.Database(self.path, _SCHEMA, kind=KIND, version=VERSION), ""
        return aside

    def _find(self, row: tuple[Any, ...]) -> Path:
        """Reads a row, and records its damage. A known record stays. Returns the context's folder."""
        row_id, name, app, sealed, body, checksum = row
        right = layout.is_name(name) and isinstance(app, str) and layout.is_app_folder(app)
        folder = self.root / app / name if right else self.path / str(name)[:32]
        try:
            if not right or _checksum(name, app, sealed, body) != checksum:
                raise CheckpointError(f"{self.path}: the record of the context {name!a:.40} is corrupt")
            layout.require_real(folder)
            if body is None:
                self.deleted[name] = folder
                return folder
            require_form(folder / layout.RECORD, self._vault, encrypted=bool(sealed))
            plain = body
            if self._vault is not None and sealed:
                plain, _ = self._vault.opened_head(app, body, name)
            record = decoded(plain, layout.app_of(app), name)
            if self._vault is not None:
                self._vault.require_newest(folder, record.used)
        except CheckpointError as error:
            if isinstance(error, KeyErased):
                self.erased.add(folder)
            self._row_ids[folder] = row_id
            self._note(folder, layout.app_of(str(app)), str(name), error)
        else:
            self.record_bytes[name] = len(body)
            self.records.setdefault(name, record)
        return folder

    def _note(self, path: Path, app: str, name: str, error: CheckpointError) -> None:
        known = self.records.get(name)
        lost = bool(name) and (known is None or self.folder(known) != path)
        proved = not isinstance(error, Unreadable)
        self.damage[path] = Damage(app=app, name=name, reason=str(error), lost=lost, proved=proved)


def _checksum(name: str, app: str, sealed: int, body: bytes | None) -> bytes:
    digest = xxhash.xxh3_128(repr((name, app, sealed, body is None)).encode(errors="surrogatepass"))
    digest.update(body or b"")
    return digest.digest()


def verify(
    catalog: Catalog,
    storage: Storage,
    vault: Vault | None,
    commit: Callable[[Record], object] | None = None,
) -> list[Damage]:
    """Finds the damage of all contexts (see `ContextStore.verify`); repairs it if `commit` is given, which
    stores a record.

    Raises:
      CheckpointError: a damaged file cannot be moved or written.
    """
    found = []
    with layout.written(catalog.root):
        catalog.find_all()
        whole = catalog.damage.get(catalog.path)
        if whole is not None and commit is not None and whole.proved:
            found.append(catalog.mend(catalog.path))
            catalog.find_all()
    for path, damage in list(catalog.damage.items()):
        if commit is not None and damage.proved:
            with layout.written(path):
                damage = catalog.mend(path)
        found.append(damage)
    for record in list(catalog.records.values()):
        folder, whole = catalog.folder(record), Damage(app=record.app, name=record.name)
        try:
            # They cannot be recomputed.
            read_rows(folder, record, storage, vault)
        except CheckpointError as error:
            proved = not isinstance(error, Unreadable)
            found.append(dataclasses.replace(whole, reason=str(error), proved=proved))
        corrupt, unread, reason = chunk_damage(folder, record, storage, vault)
        if corrupt:
            found.append(dataclasses.replace(whole, chunks=tuple(sorted(corrupt))))
            if commit is not None:
                commit(record.lose(corrupt))
        if unread:
            found.append(dataclasses.replace(whole, reason=reason, proved=False))
    if commit is not None:
        catalog.sweep()
    return sorted(found, key=lambda each: (each.app, each.name))


def chunk_damage(
    folder: Path, record: Record, storage: Storage, vault: Vault | None = None
) -> tuple[set[int], set[int], str]:
    """Reads all chunks of a context. Returns those whose content differs from what was written, those that
    storage cannot read, and the error of the first of these."""
    corrupt: set[int] = set()
    unread: set[int] = set()
    reason = ""
    for name in record.segments:
        own = {chunk for chunk, file in enumerate(record.files) if file == name}
        try:
            with Segment(folder / name, storage, vault) as segment:
                corrupt |= mismatched_chunks(record, name, segment) | (own & segment.verify())
        except Unreadable as error:
            unread |= own
            reason = reason or str(error)
        except CheckpointError:
            corrupt |= own
    return corrupt, unread - corrupt, reason
