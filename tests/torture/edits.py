"""Changes of a victim's files: drawn from a seed, applied without one, kept as JSON if they find a fault."""

import copy
import dataclasses
import os
import random
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tests.serving.contexts.mutations import places
from tests.torture.codecs import Codec

# Values that a careful reader has to refuse, whatever it expected.
JUNK: tuple[Any, ...] = (
    {}, [], "", "x", [0], [[]], {"a": 0}, None, True, False, 0, 1, 2, 3, 16, -1, 0.5, 1e308, -1e308, 1e-300,
    float("nan"), float("inf"), 1 << 24, 1 << 31, 1 << 62, 10**400, "../x", "a\0b", "\ud800", "float32",
)  # fmt: skip
BECOME = ("gone", "empty", "folder", "link", "pipe", "device")
Step = str | int


@dataclasses.dataclass(frozen=True)
class Edit:
    """One change of one file.

    Attributes:
      file: its path inside the victim's folder.
      kind: "set" or "delete" a place of its document, or write other bytes into its "body", and make
        checksums right again; write other "bytes" and leave checksums; "cut" it; let it "become" another.
      at: the place in the document, or where bytes are.
      value: what stands there then.
    """

    file: str
    kind: Literal["set", "delete", "bytes", "body", "cut", "become"]
    at: tuple[Step, ...] = ()
    value: Any = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Edit":
        """Of its fields, with lists for tuples."""
        return cls(**{**data, "at": tuple(data["at"])})


def draw_edits(
    draw: random.Random,
    folder: Path,
    codecs: Mapping[str, Codec],
    values: Mapping[str, Sequence[Any]],
) -> list[Edit]:
    """One to three changes of a victim.

    Args:
      draw: decides.
      folder: of the victim, as it was made.
      codecs: of each file that may change, by its path inside the folder.
      values: of its documents' keys, those that are of special interest.
    """
    return [
        _draw_edit(draw, folder, draw.choice(sorted(codecs)), codecs, values)
        for _ in range(draw.choice((1, 1, 1, 2, 3)))
    ]


def apply_edits(source: Path, edits: Sequence[Edit], codecs: Mapping[str, Codec], into: Path) -> Path:
    """Copies a victim and changes the copy; a change that finds nothing to change does nothing.

    Args:
      source: the victim's folder.
      edits: what changes, in order.
      codecs: of its files.
      into: the copy's folder, which is replaced.
    """
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(source, into)
    for edit in edits:
        path = into / edit.file
        if not path.is_file() or path.is_symlink():
            continue
        if edit.kind == "become":
            _become(path, edit.value)
            continue
        raw = path.read_bytes()
        path.write_bytes(_edited(raw, edit, codecs[edit.file]))
    return into


def value_at(node: Any, at: Sequence[Step]) -> Any:
    """What stands at a place."""
    for step in at:
        node = node[step]
    return node


def _draw_edit(
    draw: random.Random,
    folder: Path,
    name: str,
    codecs: Mapping[str, Codec],
    values: Mapping[str, Sequence[Any]],
) -> Edit:
    raw, codec, how = (folder / name).read_bytes(), codecs[name], draw.random()
    document = codec.document(raw)
    found = list(places(document)) if document is not None else []
    if found and how < 0.8:
        at = _draw_place(draw, found)
        if draw.random() < 0.08:
            return Edit(name, "delete", at)
        return Edit(name, "set", at, _other_value(draw, document, at, found, values))
    begin, end = codec.body(raw)
    if end > begin and how < 0.88:
        return Edit(name, "body", value=_other_bytes(draw, begin, end))
    if raw and how < 0.96:
        return Edit(name, "bytes", value=_other_bytes(draw, 0, len(raw)))
    if how < 0.98:
        return Edit(name, "cut", value=draw.randrange(len(raw) + 1))
    return Edit(name, "become", value=draw.choice(BECOME))


def _draw_place(draw: random.Random, found: Sequence[tuple[Step, ...]]) -> tuple[Step, ...]:
    """A place below a first step that is as likely as any other: vocabularies do not drown the rest."""
    for depth in (1, 2):
        steps = sorted({each[:depth] for each in found}, key=repr)
        first = draw.choice(steps)
        found = [each for each in found if each[:depth] == first]
        if len(found) == 1:
            break
    return draw.choice(found)


def _other_value(
    draw: random.Random,
    document: Any,
    at: tuple[Step, ...],
    found: Sequence[tuple[Step, ...]],
    values: Mapping[str, Sequence[Any]],
) -> Any:
    old, how = value_at(document, at), draw.random()
    special = values.get(str(at[-1]), ())
    if special and how < 0.5:
        return draw.choice(special)
    if isinstance(old, bool):
        return not old if how < 0.6 else draw.choice(JUNK)
    if isinstance(old, int | float) and how < 0.75:
        nearby = (old + 1, old - 1, -old, old * 2, old + 64, old + 4096, old * 10**6, old * 10**12)
        return draw.choice(nearby)
    if isinstance(old, list) and old and how < 0.75:
        shorter, longer = old[: draw.randrange(len(old))], [*old, old[-1]]
        return copy.deepcopy(draw.choice((shorter, longer, old[::-1])))
    if how < 0.85:
        return copy.deepcopy(value_at(document, draw.choice(found)))
    return draw.choice(JUNK)


def _other_bytes(draw: random.Random, begin: int, end: int) -> list[list[int]]:
    return [[draw.randrange(begin, end), draw.randrange(256)] for _ in range(draw.randint(1, 8))]


def _edited(raw: bytes, edit: Edit, codec: Codec) -> bytes:
    if edit.kind == "cut":
        return raw[: edit.value]
    try:
        if edit.kind in ("bytes", "body"):
            changed = bytearray(raw)
            for at, byte in edit.value:
                changed[at] = byte
            return codec.signed(bytes(changed)) if edit.kind == "body" else bytes(changed)
        document = codec.document(raw)
        parent = value_at(document, edit.at[:-1])
        if edit.kind == "delete":
            del parent[edit.at[-1]]
        else:
            parent[edit.at[-1]] = copy.deepcopy(edit.value)
        return codec.with_document(raw, document)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, struct.error):
        # An earlier change has taken away what this one needs.
        return raw


def _become(path: Path, what: str) -> None:
    path.unlink()
    if what == "empty":
        path.write_bytes(b"")
    elif what == "folder":
        path.mkdir()
    elif what == "link":
        path.symlink_to("/etc/hostname")
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
