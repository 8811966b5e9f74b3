"""Changes of a store's records and segments, with every checksum made right again: what no checksum tells."""

import contextlib
import itertools
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from jaxllm.serving.contexts import segment
from jaxllm.serving.contexts.catalog import _checksum
from jaxllm.serving.contexts.layout import CATALOG, LOG_SUFFIX, app_of
from jaxllm.serving.contexts.record import Record, decoded
from jaxllm.serving.host.direct_io import PAGE


def rows(raw: bytes) -> dict[str, tuple[str, int, bytes | None]]:
    """The rows of a catalog: app's folder, whether it is encrypted, and record, by name."""
    with contextlib.closing(_opened(raw)) as catalog:
        found = catalog.execute("SELECT name, app, sealed, record FROM contexts").fetchall()
    return {name: (app, sealed, record) for name, app, sealed, record in found}


def with_row(raw: bytes, name: str, app: str, sealed: int, record: bytes | None) -> bytes:
    """A catalog with another row, and its checksum."""
    checksum = _checksum(name, app, sealed, record)
    with contextlib.closing(_opened(raw)) as catalog:
        catalog.execute(
            "INSERT OR REPLACE INTO contexts VALUES (?, ?, ?, ?, ?)", (name, app, sealed, record, checksum)
        )
        changed = catalog.serialize()
    return changed[:18] + raw[18:20] + changed[20:]


def _opened(raw: bytes) -> sqlite3.Connection:
    """A catalog in memory, where there is no log beside it."""
    catalog = sqlite3.connect(":memory:", isolation_level=None)
    catalog.deserialize(raw[:18] + b"\1\1" + raw[20:])
    return catalog


def catalog_document(raw: bytes) -> Any:
    """The records of a catalog, by name."""
    return {name: json.loads(record) for name, (_, _, record) in rows(raw).items() if record is not None}


def with_catalog_document(raw: bytes, document: Any) -> bytes:
    """A catalog with other records of the contexts that it has."""
    there = rows(raw)
    for name, facts in document.items() if isinstance(document, dict) else ():
        if name in there:
            app, sealed, _ = there[name]
            raw = with_row(raw, name, app, sealed, json.dumps(facts, separators=(",", ":")).encode())
    return raw


def record_document(folder: Path) -> Any:
    """The record of a context, by its folder, in a store that is closed."""
    return catalog_document((folder.parent.parent / CATALOG).read_bytes())[folder.name]


def stored_record(root: Path, name: str) -> Record:
    """The record of a context as a kill of the process that has the store open would leave it."""
    with tempfile.TemporaryDirectory() as folder:
        for suffix in ("", LOG_SUFFIX):
            shutil.copy(f"{root / CATALOG}{suffix}", folder)
        with contextlib.closing(sqlite3.connect(Path(folder) / CATALOG)) as catalog:
            ((app, body),) = catalog.execute("SELECT app, record FROM contexts WHERE name = ?", (name,))
    return decoded(body, app_of(app), name)


def change_record(folder: Path, **changes: Any) -> None:
    """Gives the record of a context other fields, in a store that is closed."""
    path = folder.parent.parent / CATALOG
    path.write_bytes(
        with_catalog_document(path.read_bytes(), {folder.name: {**record_document(folder), **changes}})
    )


def segment_document(raw: bytes) -> Any:
    """A segment's table."""
    *_, size, _ = segment._HEAD.unpack(raw[: segment._HEAD.size])
    return json.loads(raw[segment._HEAD.size : segment._HEAD.size + size])


def with_segment_document(raw: bytes, document: Any) -> bytes:
    """A segment with another table, its layers behind it as they were."""
    magic, version, size, _ = segment._HEAD.unpack(raw[: segment._HEAD.size])
    text = json.dumps(document, separators=(",", ":")).encode()
    head = segment._HEAD.pack(magic, version, len(text), xxhash.xxh3_128_digest(text)) + text
    end = segment._HEAD.size + size
    return head + b"\0" * (-len(head) % PAGE) + raw[end + -end % PAGE :]


def segment_body(raw: bytes) -> int:
    """Where the layers of a segment begin."""
    *_, size, _ = segment._HEAD.unpack(raw[: segment._HEAD.size])
    return segment._HEAD.size + size + -(segment._HEAD.size + size) % PAGE


def with_signed_blobs(raw: bytes) -> bytes:
    """A segment whose table has the checksums of its blobs as they are."""
    table, begin = segment_document(raw), segment_body(raw)
    for layer in range(len(table["checksums"])):
        sizes = [table["blob_bytes"][str(bits)][layer] for _, bits, _ in table["chunks"]]
        ends = [begin + end for end in itertools.accumulate(sizes)]
        table["checksums"][layer] = [
            xxhash.xxh3_64_hexdigest(raw[end - size : end]) for end, size in zip(ends, sizes, strict=True)
        ]
        begin = ends[-1] + -sum(sizes) % PAGE
    return with_segment_document(raw, table)


def places(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a document."""
    within = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for step, child in within:
        yield (*at, step)
        yield from places(child, (*at, step))
