"""Reads and writes a context's record: typed, bounded and checked against its folder.

    record             two equal lines: each a JSON object of a version, a checksum, and the text of the
                       record as JSON; one of them is enough
    record.previous    the record before, used where `record` is lost

In an encrypted record (version 9) the text is encrypted (`encryption`), with its key's id and its salt. Those
of contexts with states are of version 10, and 11 (encrypted). Older ones are read, too: those of versions 6
and 7 (encrypted) lack source and rows, those of versions 4 and 5 (encrypted) also the tokenizer, those of
versions 2 and 3 (encrypted) also the time at which the context was made.

Files that storage refuses or that a newer version wrote raise `Unreadable` and stay in place. Anything else
that is not a record of this folder's context is damaged.
"""

import base64
import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from jaxllm.errors import CheckpointError, ConfigError, Unreadable
from jaxllm.files.atomic import atomic_file
from jaxllm.kv.codecs import CODECS, STATE, ChunkFormat
from jaxllm.kv.recompute import LOST
from jaxllm.text.tokenizer import MAX_TOKEN_ID
from serving.contexts.encryption import SALT_BYTES, NotOpened, Vault
from serving.contexts.record import Origin, Record
from serving.contexts.root import (
    PREVIOUS,
    RECORD,
    SEGMENT,
    folder_name,
    is_name,
    is_own,
    is_unfinished,
    not_read,
    read_bytes,
)

VERSION, SEALED_VERSION = 8, 9
STATE_VERSION, SEALED_STATE_VERSION = 10, 11
_OLDEST_VERSION = 2
# The last version that lacks a field, the field, and what it is there.
_LACKING = (
    (3, "created_s", 0), (5, "tokenizer", ""), (7, "source", []), (7, "rows", ""),
    (SEALED_VERSION, "state_tokens", 0),
)  # fmt: skip
_SEALED_VERSIONS = (3, 5, 7, SEALED_VERSION, SEALED_STATE_VERSION)
MOST_USED = 1 << 53
_COPIES = 2
_MOST_BYTES = 1 << 26
_MOST_TEXT = 1 << 10
_MOST_ATTENTION = 1e18
_MOST_STATE_BYTES = 1 << 31
_DTYPES = ("float32", "float16", "bfloat16")
# Names in the file, where they differ from the fields'.
_FILE_NAMES = {"checksums": "tables"}
_FIELDS = frozenset(_FILE_NAMES.get(field.name, field.name) for field in dataclasses.fields(Record))
_ORIGIN_FIELDS = frozenset(field.name for field in dataclasses.fields(Origin))


@dataclasses.dataclass(frozen=True)
class FoundRecord:
    """A record that was read.

    Attributes:
      record: of the context.
      damage: of the files it was read from; empty for none.
    """

    record: Record
    damage: str = ""


class RecordMissing(CheckpointError):
    """A folder has no record: a context was being made or deleted there when a process ended.

    Attributes:
      foreign: name of a file in it that no store makes; empty for none.
    """

    def __init__(self, folder: Path, foreign: str) -> None:
        other = f", but {foreign!a:.80}, which no store makes" if foreign else ""
        super().__init__(f"{folder} has no record{other}")
        self.foreign = foreign


def write_record(
    folder: Path, record: Record, vault: Vault | None = None, *, flush: bool = True, keep: bool = True
) -> None:
    """Replaces a context's record, whole or not at all; encrypted with a vault.

    Args:
      folder, record: of the context.
      vault: has the keys by which it is encrypted; None for no encryption.
      flush: wait until the device has it.
      keep: keep the record before, in place of the one before that.

    Raises:
      OSError: it cannot be written.
    """
    path = folder / RECORD
    try:
        # A kill may have left the one before alone; the unfinished file that tells of it is removed below.
        _name_previous(folder)
        with atomic_file(path, flush=flush) as file:
            if vault is None:
                file.write(encoded(record))
            else:
                file.write(_sealed(encoded_body(record), folder, vault, states=bool(record.state_tokens)))
            file.flush()
            if flush:
                os.fsync(file.fileno())
            # A kill before the new one gets its name leaves the one before.
            if keep and path.is_file():
                os.replace(path, folder / PREVIOUS)
    except BaseException:
        _name_previous(folder)
        raise


def _name_previous(folder: Path) -> None:
    if not os.path.lexists(folder / RECORD):
        with contextlib.suppress(OSError):
            os.replace(folder / PREVIOUS, folder / RECORD)


def encoded(record: Record) -> bytes:
    """The content of a record's file.

    Raises:
      CheckpointError: see `encoded_body`.
    """
    return signed(encoded_body(record), STATE_VERSION if record.state_tokens else VERSION)


def encoded_body(record: Record) -> str:
    """A record as JSON.

    Raises:
      CheckpointError: it has numbers that are not finite, and could not be read again.
    """
    # Not `asdict`, which copies every token.
    names = [field.name for field in dataclasses.fields(record)]
    facts = {_FILE_NAMES.get(name, name): getattr(record, name) for name in names}
    facts |= {"origin": record.origin.facts(), _FILE_NAMES["checksums"]: dict(record.checksums)}
    if not record.state_tokens:
        del facts["state_tokens"]
    try:
        return json.dumps(facts, separators=(",", ":"), sort_keys=True, allow_nan=False)
    except ValueError as error:
        raise CheckpointError(
            f"the context {record.name} cannot be kept: its attention is not finite"
        ) from error


def _sealed(body: str, folder: Path, vault: Vault, *, states: bool = False) -> bytes:
    seal = vault.new_seal(folder.parent.name)
    text = base64.b64encode(seal.salt + seal.sealed(0, body.encode(), folder.name)).decode()
    return signed(f"{seal.key_id}:{text}", SEALED_STATE_VERSION if states else SEALED_VERSION)


def _unsealed(body: str, folder: Path, vault: Vault | None) -> str:
    if vault is None:
        raise NotOpened(folder)
    key_id, _, text = body.partition(":")
    data = base64.b64decode(text, validate=True)
    seal = vault.seal(folder.parent.name, key_id, data[:SALT_BYTES])
    return seal.opened(0, data[SALT_BYTES:], folder.name).decode()


def signed(body: str, version: int = VERSION) -> bytes:
    """The content of the file of a record whose JSON, encrypted by the version, is `body`."""
    checksum = xxhash.xxh3_128_hexdigest(body.encode(errors="surrogatepass"))
    line = json.dumps({"version": version, "xxh3_128": checksum, "record": body}, separators=(",", ":"))
    return (line + "\n").encode() * _COPIES


def find_record(folder: Path, vault: Vault | None = None) -> FoundRecord:
    """Reads the record in a context's folder, or the one before where it is damaged; encrypted ones with the
    keys in a vault.

    Raises:
      CheckpointError: both are damaged, or one is and the other is missing: the context is lost.
      RecordMissing: both are missing.
      Unreadable: storage refuses, or a newer version wrote it.
    """
    try:
        return _read(folder / RECORD, vault)
    except FileNotFoundError:
        broken = "is missing"
    except Unreadable:
        raise
    except CheckpointError as error:
        broken = f"is damaged ({error})"
    try:
        record = _read(folder / PREVIOUS, vault).record
    except FileNotFoundError:
        if broken == "is missing":
            raise _without_record(folder) from None
        raise CheckpointError(f"its record {broken}, and there is none before") from None
    except Unreadable:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"its record {broken}, and so is the one before ({error})") from error
    if broken == "is missing" and _was_killed(folder):
        # While it was replaced.
        return FoundRecord(record)
    return FoundRecord(record, f"its record {broken}; it is as it was before its last call")


def is_readable(folder: Path, vault: Vault | None = None) -> bool:
    """Whether at least one copy of the record in a context's folder can be read."""
    try:
        _read(folder / RECORD, vault)
    except (FileNotFoundError, CheckpointError):
        return False
    return True


def _without_record(folder: Path) -> CheckpointError:
    try:
        others = [name for name in os.listdir(folder) if not is_own(folder / name)]
    except FileNotFoundError:
        others = []
    except OSError as error:
        return not_read(folder, error)
    return RecordMissing(folder, others[0] if others else "")


def _was_killed(folder: Path) -> bool:
    """Whether a writer of the folder's record was killed."""
    try:
        return any(is_unfinished(each, RECORD) for each in os.listdir(folder))
    except OSError as error:
        raise not_read(folder, error) from error


def _read(path: Path, vault: Vault | None) -> FoundRecord:
    """One of a folder's two records.

    Raises:
      FileNotFoundError: it is missing.
      CheckpointError: it is damaged.
      Unreadable: see `find_record`.
    """
    found: list[Record] = []
    errors: list[CheckpointError] = []
    content = read_bytes(path, _MOST_BYTES)
    middle = len(content) // _COPIES
    # The end of a line may be what is damaged: then its copies are the halves.
    for lines in (content.split(b"\n", _COPIES)[:_COPIES], (content[: middle - 1], content[middle:-1])):
        for line in () if found else lines:
            try:
                found.append(_of_line(line, path, vault))
            except CheckpointError as error:
                errors.append(error)
    if not found:
        raise next((each for each in errors if isinstance(each, Unreadable)), errors[0])
    if found[0] != found[-1]:
        raise CheckpointError(f"{path}: its copies differ")
    return FoundRecord(found[0], f"one copy of its record is damaged ({errors[0]})" if errors else "")


def _of_line(line: bytes, path: Path, vault: Vault | None) -> Record:
    try:
        whole = json.loads(line)
        version = whole["version"]
        if type(version) is int and not _OLDEST_VERSION <= version <= SEALED_STATE_VERSION:
            raise Unreadable(
                f"{path} is of version {version!s:.20}, this jaxllm reads {_OLDEST_VERSION} to "
                f"{SEALED_STATE_VERSION}"
            )
        body = whole["record"]
        if xxhash.xxh3_128_hexdigest(body.encode(errors="surrogatepass")) != whole["xxh3_128"]:
            raise CheckpointError(f"{path} is corrupt")
        if version in _SEALED_VERSIONS:
            body = _unsealed(body, path.parent, vault)
        facts = json.loads(body)
        facts = {**{name: value for last, name, value in _LACKING if version <= last}, **facts}
        return record_of(facts, app_folder=path.parent.parent.name, name=path.parent.name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a record of a context ({error!s:.120})") from error


def record_of(facts: Any, *, app_folder: str, name: str) -> Record:
    """A record from its JSON.

    Args:
      facts: any JSON value.
      app_folder: the name of the folder of its app.
      name: of its own folder.

    Raises:
      ValueError: it is not a record of the context in this folder.
    """
    _require("fields", isinstance(facts, dict) and facts.keys() == _FIELDS)
    _require("name", facts["name"] == name and is_name(name))
    _require("app", _is_app(facts["app"], app_folder))
    origin = _origin_of(facts["origin"])
    form = ChunkFormat.named(origin.codec, origin.chunk_tokens)
    tokens, source = (_row(facts, name, _is_token) for name in ("tokens", "source"))
    state_tokens = facts["state_tokens"]
    _require("state_tokens", type(state_tokens) is int and 0 <= state_tokens <= len(tokens))
    _require("state_tokens", not state_tokens or bool(origin.state_bytes))
    widths = (LOST, *form.widths, *((STATE,) if state_tokens else ()))
    bits = _row(facts, "bits", lambda each: type(each) is int and each in widths)
    count = len(bits)
    if origin.state_bytes:
        _require("bits", count == (state_tokens // origin.chunk_tokens + 1 if state_tokens else 0))
        _require("bits", STATE not in bits[:-1] and bits[-1:] in ((), (LOST,), (STATE,)))
    else:
        _require("bits", count <= len(tokens) // origin.chunk_tokens)
    mass = _row(facts, "mass", _is_attention, count)
    seen = _row(facts, "seen", _is_attention, count)
    files = _row(facts, "files", lambda each: each == "" or _is_segment(each), count)
    _require("files", all((width == LOST) == (not file) for width, file in zip(bits, files, strict=True)))
    key = _FILE_NAMES["checksums"]
    checksums, rows = facts[key], facts["rows"]
    _require("rows", rows == "" or (_is_segment(rows) and rows not in files))
    _require(key, isinstance(checksums, dict) and checksums.keys() == {*files, rows} - {""})
    _require(key, all(_is_text(each) for each in checksums.values()))
    _require("tokenizer", _is_text(facts["tokenizer"]))
    _require("pinned", type(facts["pinned"]) is bool)
    for key in ("used", "created_s"):
        _require(key, type(facts[key]) is int and 0 <= facts[key] <= MOST_USED)
    return Record(
        name=name, app=facts["app"], origin=origin, tokens=tokens, source=source, bits=bits, mass=mass,
        seen=seen, files=files, checksums=checksums, rows=rows, pinned=facts["pinned"],
        tokenizer=facts["tokenizer"], used=facts["used"],
        created_s=facts["created_s"], state_tokens=state_tokens,
    )  # fmt: skip


def _origin_of(facts: Any) -> Origin:
    _require("origin", isinstance(facts, dict))
    facts = {"state_bytes": 0, **facts}
    _require("origin", facts.keys() == _ORIGIN_FIELDS)
    _require("model", _is_text(facts["model"]))
    _require("adapter", _is_text(facts["adapter"]))
    _require("level", _is_count(facts["level"], 100))
    _require("codec", type(facts["codec"]) is str and facts["codec"] in ("raw", *CODECS))
    _require("chunk_tokens", _is_count(facts["chunk_tokens"], 1 << 16))
    _require("dtype", type(facts["dtype"]) is str and facts["dtype"] in _DTYPES)
    heads = _row(facts, "heads", lambda each: _is_count(each, 1 << 16))
    _require("heads", 0 < len(heads) <= 1 << 12)
    _require("head_width", _is_count(facts["head_width"], 1 << 16) and facts["head_width"] % 4 == 0)
    state_bytes = facts["state_bytes"]
    _require("state_bytes", type(state_bytes) is int and 0 <= state_bytes <= _MOST_STATE_BYTES)
    _require("state_bytes", not state_bytes or facts["codec"] == "raw")
    return Origin(**{**facts, "heads": heads})


def _row(
    facts: Mapping[str, Any], name: str, good: Callable[[Any], bool], count: int | None = None
) -> tuple[Any, ...]:
    row = facts[name]
    _require(name, isinstance(row, list) and count in (None, len(row)) and all(map(good, row)))
    return tuple(row)


def _require(name: str, good: bool) -> None:
    if not good:
        raise ValueError(f"malformed {name}")


def _is_app(app: Any, folder: str) -> bool:
    try:
        return type(app) is str and folder_name(app) == folder
    except ConfigError:
        return False


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKEN_ID


def _is_segment(name: Any) -> bool:
    return type(name) is str and bool(SEGMENT.fullmatch(name))


def _is_text(text: Any) -> bool:
    return type(text) is str and len(text) <= _MOST_TEXT and text.isascii() and text.isprintable()


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 1 <= value <= most


def _is_attention(value: Any) -> bool:
    return type(value) is float and 0 <= value <= _MOST_ATTENTION
