"""Formats of files as documents that can be changed with every checksum made right again."""

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any

import xxhash

from jaxllm.bundle.layout import HEADER, MAGIC
from tests.serving.contexts import mutations


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


class Codec:
    """A format; of this one nothing is known but bytes."""

    def read(self, raw: bytes) -> Any:
        """The part of a file that is a document; it may raise anything."""
        return None

    def document(self, raw: bytes) -> Any:
        """See `read`; None where none can be read."""
        try:
            return self.read(raw)
        except Exception:
            return None

    def with_document(self, raw: bytes, document: Any) -> bytes:
        """The file with another document in its place, and checksums that fit it."""
        return raw

    def body(self, raw: bytes) -> tuple[int, int]:
        """Where the bytes that are no document begin and end."""
        return 0, 0

    def signed(self, raw: bytes) -> bytes:
        """The file with checksums that fit its body."""
        return raw


class Json(Codec):
    """A file of one JSON value."""

    def read(self, raw: bytes) -> Any:
        return json.loads(raw)

    def with_document(self, raw: bytes, document: Any) -> bytes:
        return as_json(document)


class CheckedJson(Codec):
    """A JSON text with its checksum beside it."""

    def read(self, raw: bytes) -> Any:
        return json.loads(json.loads(raw)["record"])

    def with_document(self, raw: bytes, document: Any) -> bytes:
        text = as_json(document)
        return as_json({"xxh3_128": xxhash.xxh3_128_hexdigest(text), "record": text.decode()})


class JsonLines(Codec):
    """A JSON value a line."""

    def read(self, raw: bytes) -> Any:
        return [json.loads(line) for line in raw.splitlines()]

    def with_document(self, raw: bytes, document: Any) -> bytes:
        return b"".join(as_json(each) + b"\n" for each in document)


class Toml(Codec):
    """A recipe."""

    def read(self, raw: bytes) -> Any:
        return tomllib.loads(raw.decode())

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


class Signed(Codec):
    """Bytes of which nothing is known, but that another file has their checksum."""

    def body(self, raw: bytes) -> tuple[int, int]:
        return 0, len(raw)


class BundleFile(Codec):
    """A bundle: header, segments, and the manifest, whose checksums of segments can be made right."""

    def read(self, raw: bytes) -> Any:
        _, _, _, offset, size, _ = HEADER.unpack(raw[: HEADER.size])
        return json.loads(raw[offset : offset + size])

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


class Safetensors(Codec):
    """The header of a safetensors file, and its tensors' bytes."""

    def read(self, raw: bytes) -> Any:
        size = int.from_bytes(raw[:8], "little")
        return json.loads(raw[8 : 8 + size]) if size < len(raw) else None

    def with_document(self, raw: bytes, document: Any) -> bytes:
        text = as_json(document)
        return len(text).to_bytes(8, "little") + text + raw[8 + int.from_bytes(raw[:8], "little") :]

    def body(self, raw: bytes) -> tuple[int, int]:
        return min(len(raw), 8 + int.from_bytes(raw[:8], "little")), len(raw)


class SegmentFile(Codec):
    """Chunks of a stored context."""

    def read(self, raw: bytes) -> Any:
        return mutations.segment_document(raw)

    def with_document(self, raw: bytes, document: Any) -> bytes:
        return mutations.with_segment_document(raw, document)

    def body(self, raw: bytes) -> tuple[int, int]:
        return (mutations.segment_body(raw), len(raw)) if self.document(raw) is not None else (0, 0)

    def signed(self, raw: bytes) -> bytes:
        return mutations.with_signed_blobs(raw)


class CatalogFile(Codec):
    """The records of a store's contexts."""

    def read(self, raw: bytes) -> Any:
        return mutations.catalog_document(raw)

    def with_document(self, raw: bytes, document: Any) -> bytes:
        return mutations.with_catalog_document(raw, document)
