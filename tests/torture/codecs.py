"""Formats of files as documents that can be changed with every checksum made right again."""

import hashlib
import json
import sqlite3
import struct
import tomllib
from pathlib import Path
from typing import Any, Protocol

import xxhash

from jaxllm.bundle.layout import HEADER, MAGIC
from tests.serving.contexts import mutations


class Codec(Protocol):
    """A format."""

    def document(self, raw: bytes) -> Any:
        """The part of a file that is a document; None where none can be read."""
        ...

    def with_document(self, raw: bytes, document: Any) -> bytes:
        """The file with another document in its place, and checksums that fit it."""
        ...

    def body(self, raw: bytes) -> tuple[int, int]:
        """Where the bytes that are no document begin and end."""
        ...

    def signed(self, raw: bytes) -> bytes:
        """The file with checksums that fit its body."""
        ...


def sign_program(folder: Path) -> None:
    """Makes a program folder's manifest tell the checksums of its files as they are."""
    path = folder / "program.json"
    if path.is_symlink() or not path.is_file():
        return
    try:
        manifest = json.loads(path.read_bytes())
        for name, facts in manifest["files"].items():
            if (folder / name).is_symlink() or not (folder / name).is_file():
                continue
            raw = (folder / name).read_bytes()
            facts.update(size_bytes=len(raw), xxh3_128=xxhash.xxh3_128_hexdigest(raw))
        path.write_bytes(as_json(manifest))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        # The mutation left nothing to sign.
        return


def as_json(document: Any) -> bytes:
    """Any document as JSON, lone surrogates and all."""
    return json.dumps(document, separators=(",", ":")).encode()


class Raw:
    """Bytes of which nothing is known."""

    def document(self, raw: bytes) -> Any:
        return None

    def with_document(self, raw: bytes, document: Any) -> bytes:
        return raw

    def body(self, raw: bytes) -> tuple[int, int]:
        return 0, 0

    def signed(self, raw: bytes) -> bytes:
        return raw


class Json(Raw):
    """A file of one JSON value."""

    def document(self, raw: bytes) -> Any:
        try:
            return json.loads(raw)
        except ValueError:
            return None

    def with_document(self, raw: bytes, document: Any) -> bytes:
        return as_json(document)


class CheckedJson(Raw):
    """A JSON text with its checksum beside it."""

    def document(self, raw: bytes) -> Any:
        try:
            return json.loads(json.loads(raw)["record"])
        except (ValueError, LookupError, TypeError):
            return None

    def with_document(self, raw: bytes, document: Any) -> bytes:
        text = as_json(document)
        return as_json({"xxh3_128": xxhash.xxh3_128_hexdigest(text), "record": text.decode()})


class JsonLines(Raw):
    """A JSON value a line."""

    def document(self, raw: bytes) -> Any:
        try:
            return [json.loads(line) for line in raw.splitlines()]
        except ValueError:
            return None

    def with_document(self, raw: bytes, document: Any) -> bytes:
        return b"".join(as_json(each) + b"\n" for each in document)


class Toml(Raw):
    """A recipe."""

    def document(self, raw: bytes) -> Any:
        try:
            return tomllib.loads(raw.decode())
        except ValueError:
            return None

    def with_document(self, raw: bytes, document: Any) -> bytes:
        lines = (f"{json.dumps(key)} = {_toml(value)}" for key, value in document.items())
        return "\n".join(lines).encode(errors="replace")


def _toml(value: Any) -> str:
    """A value inline; what TOML cannot say (null, large numbers) is said as in JSON, and then is no TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {_toml(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


class Signed(Raw):
    """Bytes of which nothing is known, but that another file has their checksum."""

    def body(self, raw: bytes) -> tuple[int, int]:
        return 0, len(raw)


class BundleFile(Raw):
    """A bundle: header, segments, and the manifest, whose checksums of segments can be made right."""

    def document(self, raw: bytes) -> Any:
        try:
            _, _, _, offset, size, _ = HEADER.unpack(raw[: HEADER.size])
            return json.loads(raw[offset : offset + size])
        except Exception:
            return None

    def with_document(self, raw: bytes, document: Any) -> bytes:
        _, version, _, offset, _, _ = HEADER.unpack(raw[: HEADER.size])
        text = as_json(document)
        header = HEADER.pack(MAGIC, version, 0, offset, len(text), hashlib.sha256(text).digest())
        return header + raw[HEADER.size : offset] + text

    def body(self, raw: bytes) -> tuple[int, int]:
        manifest = self.document(raw)
        return (HEADER.size, HEADER.unpack(raw[: HEADER.size])[3]) if manifest is not None else (0, 0)

    def signed(self, raw: bytes) -> bytes:
        manifest = self.document(raw)
        if manifest is None:
            return raw
        for each in manifest["segments"]:
            inside = raw[each["offset"] : each["offset"] + each["size_bytes"]]
            each["xxh3_128"] = xxhash.xxh3_128_hexdigest(inside)
        return self.with_document(raw, manifest)


class Safetensors(Raw):
    """The header of a safetensors file, and its tensors' bytes."""

    def document(self, raw: bytes) -> Any:
        size = int.from_bytes(raw[:8], "little")
        try:
            return json.loads(raw[8 : 8 + size]) if size < len(raw) else None
        except ValueError:
            return None

    def with_document(self, raw: bytes, document: Any) -> bytes:
        text = as_json(document)
        return len(text).to_bytes(8, "little") + text + raw[8 + int.from_bytes(raw[:8], "little") :]

    def body(self, raw: bytes) -> tuple[int, int]:
        return min(len(raw), 8 + int.from_bytes(raw[:8], "little")), len(raw)


class SegmentFile(Raw):
    """Chunks of a stored context."""

    def document(self, raw: bytes) -> Any:
        try:
            return mutations.segment_document(raw)
        except (ValueError, struct.error):
            return None

    def with_document(self, raw: bytes, document: Any) -> bytes:
        return mutations.with_segment_document(raw, document)

    def body(self, raw: bytes) -> tuple[int, int]:
        return (mutations.segment_body(raw), len(raw)) if self.document(raw) is not None else (0, 0)

    def signed(self, raw: bytes) -> bytes:
        return mutations.with_signed_blobs(raw)


class CatalogFile(Raw):
    """The records of a store's contexts."""

    def document(self, raw: bytes) -> Any:
        try:
            return mutations.catalog_document(raw)
        except (ValueError, LookupError, TypeError, sqlite3.Error):
            return None

    def with_document(self, raw: bytes, document: Any) -> bytes:
        return mutations.with_catalog_document(raw, document)
