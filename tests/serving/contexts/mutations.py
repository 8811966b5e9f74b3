"""Changes of a store's records and segments, with every checksum made right again: what no checksum tells."""

import contextlib
import copy
import json
import os
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from jaxllm.serving.contexts import segment
from jaxllm.serving.contexts.catalog import _checksum
from jaxllm.serving.contexts.database import LOG_SUFFIX
from jaxllm.serving.contexts.layout import CATALOG, app_of
from jaxllm.serving.contexts.record import Record, decoded
from jaxllm.serving.host.direct_io import PAGE

JUNK: tuple[Any, ...] = (
    {}, [], "", "x", [0], [[]], {"a": 0}, None, True, False, 0, 1, 2, 3, 4, 8, 16, -1, 0.5, 1e308, -1e308,
    1e-300, float("nan"), float("inf"), 1 << 24, 1 << 31, 1 << 53, 1 << 62, 10**400, "../x", "../../x",
    "a\0b", "\ud800", "float32", "raw", "0.kv", "1.kv", "00.kv", "x.kv", "record",
)  # fmt: skip


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


def with_other_blob(draw: random.Random, raw: bytes) -> bytes:
    """A segment with another byte in one blob, and that blob's checksum."""
    table = segment_document(raw)
    *_, size, _ = segment._HEAD.unpack(raw[: segment._HEAD.size])
    begin = segment._HEAD.size + size
    begin += -begin % PAGE
    layer, place = draw.randrange(len(table["checksums"])), draw.randrange(len(table["chunks"]))
    for each in range(layer + 1):
        sizes = [table["blob_bytes"][str(bits)][each] for _, bits, _ in table["chunks"]]
        if each < layer:
            begin += sum(sizes) + -sum(sizes) % PAGE
    begin += sum(sizes[:place])
    changed = bytearray(raw)
    changed[begin + draw.randrange(sizes[place])] ^= draw.randrange(1, 256)
    blob = bytes(changed[begin : begin + sizes[place]])
    table["checksums"][layer][place] = xxhash.xxh3_64_hexdigest(blob)
    return with_segment_document(bytes(changed), table)


def places(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a document."""
    within = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for step, child in within:
        yield (*at, step)
        yield from places(child, (*at, step))


def other_document(draw: random.Random, document: Any) -> Any:
    """A document with one to three places changed or taken away."""
    document = copy.deepcopy(document)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        found = list(places(document))
        if not found:
            return draw.choice(JUNK)
        # A first step that is as likely as any other: rows do not drown the rest.
        first = draw.choice(sorted({each[0] for each in found}, key=repr))
        *way, last = draw.choice([each for each in found if each[0] == first])
        parent = document
        for step in way:
            parent = parent[step]
        if draw.random() < 0.1:
            del parent[last]
        else:
            parent[last] = _other_value(draw, document, parent[last], found)
    return document


def mutate(draw: random.Random, path: Path, name: str) -> str:
    """Changes a segment, or the record of a context in a catalog; what was done."""
    how = draw.random()
    if path.name == CATALOG:
        document = catalog_document(path.read_bytes())
        changed = {name: other_document(draw, document[name])}
        path.write_bytes(with_catalog_document(path.read_bytes(), changed))
        return f"has {changed!r:.200}"
    if how < 0.1:
        return become(draw, path)
    raw = path.read_bytes()
    if how < 0.25:
        changed = bytearray(raw)
        for _ in range(draw.randint(1, 8)):
            changed[draw.randrange(len(raw))] ^= draw.randrange(1, 256)
        path.write_bytes(changed)
        return "bytes"
    if how < 0.45:
        path.write_bytes(with_other_blob(draw, raw))
        return "blob"
    document = other_document(draw, segment_document(raw))
    path.write_bytes(with_segment_document(raw, document))
    return f"has {document!r:.200}"


def become(draw: random.Random, path: Path) -> str:
    """Puts another kind of file in the place of one; which."""
    kind = draw.choice(("gone", "empty", "cut", "folder", "link", "pipe"))
    raw = path.read_bytes()
    path.unlink()
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "cut":
        path.write_bytes(raw[: draw.randrange(len(raw))])
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind == "pipe":
        os.mkfifo(path)
    return kind


def _other_value(draw: random.Random, document: Any, old: Any, found: list[tuple[Any, ...]]) -> Any:
    how = draw.random()
    if isinstance(old, int | float) and not isinstance(old, bool) and how < 0.5:
        return draw.choice((old + 1, old - 1, -old, old * 2, old * 10**6, old * 10**12))
    if isinstance(old, list) and old and how < 0.5:
        return draw.choice((old[: draw.randrange(len(old))], [*old, old[-1]], old[::-1]))
    if how < 0.65:
        value = document
        for step in draw.choice(found):
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                break
        return copy.deepcopy(value)
    return draw.choice(JUNK)
