"""Refuses bundles whose manifest misplaces low planes, every checksum in it right, when they are opened."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxllm.bundle import Bundle
from tests.bundle.forging import MICRO, forge, manifest_of, open_only, refused, use, write

Manifest = dict[str, Any]

_LOW = "layers.0.attn.q"


def _low(m: Manifest) -> Manifest:
    return m["tensors"][_LOW]["low"]


def _plane(**change: Any) -> Callable[[Manifest], None]:
    return lambda m: _low(m).update(change)


PLANES: dict[str, Callable[[Manifest], None]] = {
    "in the high planes' segment": lambda m: _low(m).update(offset=m["tensors"][_LOW]["data"]["offset"]),
    "of another layer": lambda m: _low(m).update(offset=_low(m)["offset"] + (1 << 20)),
    "before the file": _plane(offset=-64),
    "not aligned": lambda m: _low(m).update(offset=_low(m)["offset"] + 1),
    "signed": _plane(dtype="int8"),
    "of no shape": _plane(shape=[]),
    "of another shape": lambda m: _low(m).update(shape=[*_low(m)["shape"][:-1], 128]),
    "endless": _plane(shape=[1 << 62, 1 << 62]),
    "not there": lambda m: m["tensors"][_LOW].pop("low"),
    "none": lambda m: m["tensors"][_LOW].update(low=None),
    "of a vector": lambda m: m["tensors"]["layers.0.attn_norm.scale"].update(low=_low(m)),
    "without scales": lambda m: m["tensors"][_LOW].pop("scale"),
    "of eight bits": lambda m: m["tensors"][_LOW].update(bits=8),
    "of other groups": lambda m: m["tensors"][_LOW].update(group=32),
    "without a segment": lambda m: m["segments"].remove(
        next(each for each in m["segments"] if each["name"] == "layers.0.low")
    ),
    "whose segment comes first": lambda m: next(
        each for each in m["segments"] if each["name"] == "layers.0.low"
    ).update(offset=next(each for each in m["segments"] if each["name"] == "layers.0")["offset"]),
}


@pytest.mark.parametrize("change", PLANES.values(), ids=PLANES)
def test_low_planes_that_are_not_what_they_must_be(
    tmp_path: Path, change: Callable[[Manifest], None]
) -> None:
    path = write(tmp_path / "nested", "int8-nested", MICRO)
    manifest = manifest_of(path)
    change(manifest)
    refused(forge(path, manifest), when=open_only)


def test_a_damaged_low_plane_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "nested", "int8-nested", MICRO)
    with Bundle.open(path) as bundle:
        at = bundle.layout.segments["layers.0.low"].offset
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    refused(path, "segment 'layers.0.low' is corrupt", "copy the file again", when=use)
