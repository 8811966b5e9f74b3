"""Stores responses in an SQLite file next to an app's contexts, encrypted with the app's key as these are."""

import dataclasses
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.serving.contexts.encryption import KeyErased, Vault, require_form
from jaxllm.serving.contexts.layout import Database, folder_name
from jaxllm.serving.server.api.errors import ApiError

RESPONSES = "responses.sqlite"
_KIND, _VERSION = 0x4A585250, 1
_SCHEMA = """
CREATE TABLE responses (
    number INTEGER PRIMARY KEY,  -- in order of age
    app TEXT NOT NULL,
    id TEXT NOT NULL UNIQUE,
    bytes INTEGER NOT NULL,      -- that count against the app's limit
    sealed INTEGER NOT NULL,     -- whether the body is encrypted
    body BLOB NOT NULL,          -- a `StoredResponse` in JSON
    checksum BLOB NOT NULL       -- of all of these
);
CREATE INDEX ages ON responses (app, number, bytes);
"""
_SELECT = "SELECT app, id, bytes, sealed, body, checksum FROM responses"
_DROP_OLDEST = """
DELETE FROM responses WHERE number IN (
    SELECT number FROM (
        SELECT number, row_number() OVER newer AS place, sum(bytes) OVER newer AS total
        FROM responses WHERE app = ? WINDOW newer AS (ORDER BY number DESC)
    ) WHERE place > ? OR total > ?
)
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredResponse:
    """A finished response.

    Attributes:
      id: its id.
      response: the response object, in JSON.
      items: the conversation before it, as a list of items in JSON.
      context: name of the context with the conversation; empty if there are only the items.
      context_tokens: number of the context's tokens after the response.
    """

    id: str
    response: msgspec.Raw
    items: msgspec.Raw
    context: str = ""
    context_tokens: int = 0

    def said(self) -> list[dict[str, Any]]:
        """The items before it and its own, which the next response continues."""
        own = msgspec.json.decode(self.response)["output"]
        for part in (part for item in own if item["type"] == "message" for part in item["content"]):
            # No later response needs log-probabilities.
            part["logprobs"] = []
        return msgspec.json.decode(self.items) + own


class ResponseStore:
    """The responses of all apps. Thread-safe; waits for the device.

    Every response has its whole conversation, so that dropping or deleting one never affects another.

    Attributes:
      close: closes the file; idempotent.
    """

    close: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self, most: int, most_bytes: int, folder: Path | None = None, vault: Vault | None = None
    ) -> None:
        """Opens the store. Raises ConfigError if the file cannot be made or read, is damaged, of another
        version, or another program's. Each app may have `most` responses of `most_bytes`. Without a `folder`,
        that of a store of contexts, they are in memory; without a `vault` they are not encrypted."""
        self._most, self._most_bytes, self._vault = most, most_bytes, vault
        self._durable = folder is not None
        self._path = Path(RESPONSES) if folder is None else folder / RESPONSES
        if folder is not None:
            try:
                database = Database(self._path, _SCHEMA, kind=_KIND, version=_VERSION)
            except OSError as error:
                raise ConfigError(f"{self._path}: cannot store responses ({error.strerror})") from error
            self._run, self.close = database.run, database.close
        else:
            self._run, self.close = _in_memory()
        if vault is not None and not vault.is_sealed:
            # Encrypt the responses of a store that had no keys.
            for (number,) in self._run("SELECT number FROM responses WHERE sealed = 0"):
                ((*row, checksum),) = self._run(f"{_SELECT} WHERE number = ?", number)
                if _checksum(*row) == checksum:
                    app, name, size, _, body = row
                    row = self._row(app, name, size, body)
                    changed = "UPDATE responses SET sealed = ?, body = ?, checksum = ? WHERE number = ?"
                    self._run(changed, *row[3:], _checksum(*row), number)

    def __del__(self) -> None:
        self.close()

    def keep(self, app: str, stored: StoredResponse) -> bool:
        """Stores a response of an app, and drops the app's oldest ones if necessary. Raises JaxllmError or
        OSError if it cannot be written.

        Returns:
          False if it is too large for the limit; then nothing has changed.
        """
        size = len(stored.response) + len(stored.items)
        if size > self._most_bytes:
            return False
        row = self._row(app, stored.id, size, msgspec.json.encode(stored))
        self._run("INSERT INTO responses VALUES (NULL, ?, ?, ?, ?, ?, ?)", *row, _checksum(*row))
        self._run(_DROP_OLDEST, app, self._most, self._most_bytes)
        return True

    def get(self, app: str, name: str, *, param: str = "") -> StoredResponse:
        """A response of an app; `param` is the request's field with its id. Raises ApiError if the app has no
        response with this id, even if another app has, and CheckpointError if it is damaged, or cannot be
        read now."""
        for *row, checksum in self._run(f"{_SELECT} WHERE app = ? AND id = ?", app, name):
            if _checksum(*row) != checksum:
                raise CheckpointError(f"{self._path}: the response {name} is damaged")
            *_, sealed, body = row
            require_form(self._path, self._vault, encrypted=bool(sealed))
            try:
                if sealed and self._vault is not None:
                    body, *_ = self._vault.opened_head(folder_name(app), body, name)
                return msgspec.json.decode(body, type=StoredResponse)
            except KeyErased:
                break
        lost = "" if self._durable else ", or the service was restarted"
        message = f"there is no response {name!r:.80}: it was not stored, deleted, or dropped for newer ones"
        code = "previous_response_not_found" if param else "response_not_found"
        raise ApiError(message + lost, status=404, code=code, param=param)

    def delete(self, app: str, name: str) -> None:
        """Deletes a response of an app; raises ApiError if there is none."""
        self.get(app, name)
        self._run("DELETE FROM responses WHERE app = ? AND id = ?", app, name)

    def _row(self, app: str, name: str, size: int, body: bytes) -> tuple[Any, ...]:
        """A row without its number and checksum, encrypted if there are keys."""
        if self._vault is None:
            return app, name, size, 0, body
        return app, name, size, 1, self._vault.new_seal(folder_name(app)).head(body, name)


def _checksum(*row: Any) -> bytes:
    return xxhash.xxh3_128_digest(repr(row[:-1]).encode() + row[-1])


def _in_memory() -> tuple[Callable[..., list[tuple[Any, ...]]], Callable[[], None]]:
    """What runs statements in a database in memory, and what closes it."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.executescript(_SCHEMA)
    turn = threading.Lock()

    def run(statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with turn:
            return connection.execute(statement, values).fetchall()

    return run, connection.close
