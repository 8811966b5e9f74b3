"""Reads GGUF files: metadata, tensors, and their blocks as our weights.

No length in a file is trusted. The `gguf` package reads headers as well, but trusts their counts (a count of
2**60 never ends) and makes several objects per element of an array: only its types of blocks are used here.

Blocks of Q8_0, Q4_0, Q4_1 and MXFP4 are converted bit for bit, floats exactly. A block of 32 values has one
float16 scale, like a group of our 8- and 4-bit weights, and that of Q4_1 also a minimum. A scale of MXFP4 is
a power of two, and its numbers are multiples of 0.5, which fit 8 bits. Q4_K has scales and minima as products
of a float16 and 6 bits, which are rounded to float16. Other blocks (5 and 6 bits) become 8-bit groups of 32.
Those of 2 and 3 bits are dequantized, and quantized again on request.
"""

import dataclasses
import math
import mmap
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.checkpoints.quantization import GROUP, Levels, e2m1_levels
from jaxllm.config import MAX_DIMENSION
from jaxllm.errors import CheckpointError
from jaxllm.files.input_files import begins_with, open_regular
from jaxllm.formats import GGUF_MAGIC

_VERSIONS = (2, 3)
# Far above any published file; each entry costs some hundred bytes of memory.
_MAX_KEYS = 1 << 12
_MAX_TENSORS = 1 << 15
_MAX_NAME_BYTES = 1 << 10
_MAX_TEXTS = 1 << 22
_MAX_PARTS = 1 << 10
_MAX_ALIGNMENT = 1 << 20
_MAX_DIMENSIONS = 4
# Types of values: their format for `struct`.
_SCALARS = {
    **dict(enumerate(("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<B"))),
    **{10: "<Q", 11: "<q", 12: "<d"},
}
_BOOL, TEXT, _ARRAY = 7, 8, 9
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_HINT = "download the file again"


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file.

    Attributes:
      shape: the outermost dimension first, as in Hugging Face's folders.
      kind: the type of its blocks, such as `F16` or `Q4_0`.
      data: the memory-mapped bytes `[rows, bytes of a row]`, uint8; rows are all dimensions but the last.
    """

    shape: tuple[int, ...]
    kind: str
    data: np.ndarray


@dataclasses.dataclass(frozen=True)
class GgufArray:
    """An array in the metadata that is not decoded yet: `count` elements of a type in bytes of the file."""

    kind: int
    count: int
    data: memoryview

    def __repr__(self) -> str:
        return f"an array of {self.count}"

    def numbers(self) -> list[Any]:
        """Its numbers.

        Raises:
          CheckpointError: it consists of texts.
        """
        if self.kind == TEXT:
            raise CheckpointError(f"an array of texts stands where one of numbers belongs; {_HINT}")
        return np.frombuffer(self.data, _SCALARS[self.kind], self.count).tolist()

    def texts(self) -> list[str]:
        """Its texts; bytes that are not UTF-8 become U+FFFD.

        Raises:
          CheckpointError: it consists of numbers.
        """
        if self.kind != TEXT:
            raise CheckpointError(f"an array of numbers stands where one of texts belongs; {_HINT}")
        found, at = [], 0
        for _ in range(self.count):
            (size,) = struct.unpack_from("<Q", self.data, at)
            found.append(str(self.data[at + 8 : at + 8 + size], "utf-8", "replace"))
            at += 8 + size
        return found


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """A model in one GGUF file or in several parts.

    Attributes:
      path: path of the file, or of its first part.
      metadata: values by key: numbers, texts, `GgufArray`s; for a split file those of its first part.
      mapped: mapped memory of each part's tensors.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    mapped: tuple[mmap.mmap, ...] = ()

    def drop_pages(self) -> None:
        """Releases the memory of pages that were read; they are read again when touched."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for each in self.mapped:
                each.madvise(mmap.MADV_DONTNEED)


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a file that begins like a GGUF file."""
    return begins_with(Path(path), GGUF_MAGIC)


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder, such as Hugging Face's, or a GGUF file: what a bundle is prepared from."""
    return Path(path).is_dir() or is_gguf(path)


def gguf_parts(path: Path) -> list[Path]:
    """The paths of a file and, by their names, of the existing other parts of a split one."""
    named = _PART.fullmatch(path.name)
    return [path] if named is None else sorted(path.parent.glob(f"*-of-{named[3]}.gguf"))


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Reads the header of a GGUF file, and those of the other parts of a split one.

    Raises:
      CheckpointError: the file is missing, malformed or truncated; a part of a split file is missing; or the
        package `gguf` is not installed.
    """
    path = Path(path)
    first = _read_one(path)
    count = first.metadata.get("split.count", 1)
    if count == 1 or count == 0:
        return first
    named = _PART.fullmatch(path.name)
    if type(count) is not int or not 1 < count <= _MAX_PARTS or named is None or int(named[3]) != count:
        raise CheckpointError(
            f"{path} is a part of a split GGUF file of {count!r:.20} parts, but is not named like one "
            "(NAME-00001-of-00003.gguf); give the parts their names back"
        )
    paths = [path.with_name(f"{named[1]}-{at:05d}-of-{count:05d}.gguf") for at in range(1, count + 1)]
    if missing := [each for each in paths if not each.is_file()]:
        raise CheckpointError(
            f"{missing[0]} is missing, a part of {path}; put all {count} parts into one folder"
        )
    parts = [_read_one(each) for each in paths]
    tensors: dict[str, GgufTensor] = {}
    for number, part in enumerate(parts):
        own = (part.metadata.get("split.no"), part.metadata.get("split.count"))
        if own != (number, count):
            raise CheckpointError(f"{part.path} says that it is part {own[0]!r} of {own[1]!r}; {_HINT}")
        if both := tensors.keys() & part.tensors.keys():
            raise CheckpointError(f"{part.path} has the tensor {min(both)!r:.80} of another part; {_HINT}")
        tensors |= part.tensors
    total = parts[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise CheckpointError(f"{path}: its parts have {len(tensors)} tensors, not {total!r:.80}; {_HINT}")
    return GgufFile(
        parts[0].path, parts[0].metadata, tensors, tuple(each for part in parts for each in part.mapped)
    )


def read_metadata(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The metadata of one GGUF file, without the package `gguf`.

    Raises:
      CheckpointError: the file is missing, or its header is malformed.
    """
    return _opened(Path(path))[0].metadata()


def _read_one(path: Path) -> GgufFile:
    header, mapped = _opened(path)
    metadata = header.metadata()
    return GgufFile(path, metadata, header.tensors(metadata), mapped)


def _opened(path: Path) -> "tuple[_Header, tuple[mmap.mmap, ...]]":
    try:
        with open_regular(path) as file:
            # An empty file cannot be mapped.
            size = os.fstat(file.fileno()).st_size
            mapped = (mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ),) if size else ()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; give the path of a GGUF file") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from error
    return _Header(path, np.frombuffer(mapped[0], np.uint8) if mapped else np.zeros(0, np.uint8)), mapped


class _Header:
    """A walk through the bytes of a header."""

    def __init__(self, path: Path, mapped: np.ndarray) -> None:
        self._path, self._mapped, self._at = path, mapped, 0
        self._bytes = memoryview(mapped)  # pyright: ignore[reportArgumentType]: an array is a buffer
        if bytes(self._bytes[:4]) != GGUF_MAGIC:
            raise CheckpointError(f"{path} is no GGUF file; give one that begins with 'GGUF'")
        self._at = 4
        version = self._number("<I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            kind = "is big-endian" if swapped else f"has version {version}"
            raise CheckpointError(f"{path} {kind}; jaxllm reads little-endian GGUF files of version 2 and 3")
        self._tensor_count, self._key_count = self._number("<Q"), self._number("<Q")
        for what, count, most in (
            ("tensors", self._tensor_count, _MAX_TENSORS),
            ("metadata keys", self._key_count, _MAX_KEYS),
        ):
            if count > most:
                raise self._malformed(f"it says that it has {count} {what}, above {most}")

    def _malformed(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {what}; {_HINT}")

    def metadata(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(self._key_count):
            key = self._text(_MAX_NAME_BYTES)
            if key in found:
                raise self._malformed(f"it has the metadata key {key!r:.80} twice")
            found[key] = self._value(key)
        return found

    def tensors(self, metadata: Mapping[str, Any]) -> dict[str, GgufTensor]:
        # Types of blocks by number: name, values of a block, bytes of a block.
        sizes = import_gguf().GGML_QUANT_SIZES
        kinds = {int(kind): (kind.name, *block) for kind, block in sizes.items()}
        described = [self._describe(kinds) for _ in range(self._tensor_count)]
        align = metadata.get("general.alignment", 32)
        if type(align) is not int or not 1 <= align <= _MAX_ALIGNMENT or align & (align - 1):
            raise self._malformed(f"general.alignment is {align!r:.80}, no power of two")
        start = -(-self._at // align) * align
        found: dict[str, GgufTensor] = {}
        end, last = 0, ""
        for name, shape, kind, offset in sorted(described, key=lambda each: each[3]):
            block, size = kinds[kind][1:]
            rows, row_bytes = math.prod(shape[:-1]), shape[-1] // block * size
            if name in found:
                raise self._malformed(f"it has the tensor {name!r:.80} twice")
            if offset % align or offset < end:
                where = f"overlaps {last!r:.80}" if offset < end else f"is not aligned to {align} bytes"
                raise self._malformed(f"the tensor {name!r:.80} {where}")
            end, last = offset + rows * row_bytes, name
            if start + end > len(self._bytes):
                where = f"ends at byte {start + end} of {len(self._bytes)}"
                raise self._malformed(f"it is truncated: the tensor {name!r:.80} {where}")
            data = self._mapped[start + offset : start + end].reshape(rows, row_bytes)
            found[name] = GgufTensor(shape, kinds[kind][0], data)
        return found

    def _describe(self, kinds: Mapping[int, tuple[str, int, int]]) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text(_MAX_NAME_BYTES)
        rank = self._number("<I")
        if not 1 <= rank <= _MAX_DIMENSIONS:
            raise self._malformed(f"the tensor {name!r:.80} has {rank} dimensions")
        shape = tuple(self._number("<Q") for _ in range(rank))[::-1]
        kind, offset = self._number("<I"), self._number("<Q")
        if kind not in kinds:
            raise CheckpointError(
                f"{self._path}: the tensor {name!r:.80} has blocks of the unknown type {kind}; take a file "
                "of another type, such as Q8_0 or Q4_0"
            )
        if not all(1 <= each <= MAX_DIMENSION for each in shape) or shape[-1] % kinds[kind][1]:
            form = f"{kinds[kind][0]} has the shape {list(shape)}, which it cannot have"
            raise self._malformed(f"the tensor {name!r:.80} of type {form}")
        return name, shape, kind, offset

    def _value(self, key: str) -> Any:
        kind = self._number("<I")
        if kind in _SCALARS:
            value = self._number(_SCALARS[kind])
            if _SCALARS[kind] == "<f":
                # The shortest decimal that rounds to it: 1e-5, not 9.99999974737875e-06.
                return float(str(np.float32(value)))
            return bool(value) if kind == _BOOL else value
        if kind == TEXT:
            return self._text(len(self._bytes))
        if kind != _ARRAY:
            raise self._malformed(f"the metadata key {key!r:.80} has the type {kind}")
        kind, count = self._number("<I"), self._number("<Q")
        start = self._at
        if kind in _SCALARS:
            self._skip(count * struct.calcsize(_SCALARS[kind]))
        elif kind == TEXT and count <= _MAX_TEXTS:
            for _ in range(count):
                self._skip(self._number("<Q"))
        else:
            form = f"an array of {count} elements of type {kind}, which no model needs"
            raise self._malformed(f"the metadata key {key!r:.80} is {form}")
        return GgufArray(kind, count, self._bytes[start : self._at])

    def _number(self, form: str) -> Any:
        start = self._at
        self._skip(struct.calcsize(form))
        return struct.unpack_from(form, self._bytes, start)[0]

    def _text(self, most: int) -> str:
        size = self._number("<Q")
        if size > most:
            raise self._malformed(f"it has a text of {size} bytes in its header")
        start = self._at
        self._skip(size)
        return str(self._bytes[start : self._at], "utf-8", "replace")

    def _skip(self, size: int) -> None:
        if size > len(self._bytes) - self._at:
            raise self._malformed("it is truncated: its header ends in its midst")
        self._at += size


def import_gguf() -> Any:
    """The package `gguf`.

    Raises:
      CheckpointError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError("GGUF files need the package gguf; run: pip install 'jaxllm[gguf]'") from error
    return gguf


# Types whose numbers fit 8-bit groups of 32 with little error.
INTO_INT8 = ("Q6_K", "Q5_0", "Q5_1", "Q5_K")
FLOATS = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "F64": np.dtype("<f8")}
EXACT = {"Q8_0": 8, "MXFP4": 8, "Q4_0": 4}
MINIMA = ("Q4_1", "Q4_K")


def floats(tensor: GgufTensor) -> np.ndarray:
    """A tensor's numbers: float16 and bfloat16 unchanged, all others as float32.

    Raises:
      CheckpointError: its blocks cannot be widened.
    """
    if tensor.kind == "BF16":
        import ml_dtypes

        return tensor.data.view(ml_dtypes.bfloat16).reshape(tensor.shape)
    if tensor.kind in FLOATS:
        return tensor.data.view(FLOATS[tensor.kind]).reshape(tensor.shape)
    gguf = import_gguf()
    kind = gguf.GGMLQuantizationType[tensor.kind]
    try:
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(tensor.data, kind)
    except NotImplementedError as error:
        raise CheckpointError(
            f"blocks of {tensor.kind} cannot be read; take a file of Q8_0, Q6_K or Q4_0"
        ) from error
    return values.astype(np.float32, copy=False).reshape(tensor.shape)


def levels(tensor: GgufTensor) -> Levels:
    """Converts a tensor of Q8_0, MXFP4 or Q4_0 exactly.

    Raises:
      CheckpointError: a scale is not finite, or above float16's range, or a level is -128, which no
        quantizer writes.
    """
    bits = EXACT[tensor.kind]
    blocks = tensor.data.reshape(*tensor.shape[:-1], tensor.shape[-1] // GROUP, -1)
    if tensor.kind == "MXFP4":
        nibbles = blocks[..., 1:]
        return e2m1_levels(np.concatenate([nibbles & 15, nibbles >> 4], axis=-1), blocks[..., 0])
    scale = np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0]
    if bits == 8:
        found = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    else:
        # Low nibbles are the block's first half, high ones its second.
        nibbles = blocks[..., 2:]
        found = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).astype(np.int8) - np.int8(8)
    if not np.isfinite(scale).all():
        raise CheckpointError("a scale is not finite; download the file again")
    if bits == 8 and (found == -128).any():
        raise CheckpointError("a level is -128, which quantizers do not write; download the file again")
    return Levels(found.reshape(tensor.shape), scale, bits)


def levels_with_minima(tensor: GgufTensor) -> Levels:
    """Converts a tensor of Q4_1 or Q4_K to 4-bit levels above minima.

    Raises:
      CheckpointError: a scale or minimum is not finite, or above float16's range.
    """
    shape = (*tensor.shape[:-1], tensor.shape[-1] // GROUP)
    if tensor.kind == "Q4_1":
        blocks = tensor.data.reshape(*shape, -1)
        scale, minimum = np.moveaxis(np.ascontiguousarray(blocks[..., :4]).view("<f2"), -1, 0)
        nibbles = blocks[..., 4:]
        codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
    else:
        # Of 8 groups a scale and a minimum in float16, 6 bits of each for every group, then by pairs of
        # groups 32 bytes, low nibbles first.
        blocks = tensor.data.reshape(-1, 144)
        both = np.ascontiguousarray(blocks[:, :4]).view("<f2").astype(np.float32)
        factors = np.stack(import_gguf().quants.Q4_K.get_scale_min(blocks[:, 4:16])).astype(np.float32)
        with np.errstate(over="ignore"):
            scale = (both[:, :1] * factors[0]).astype(np.float16).reshape(shape)
            minimum = (-both[:, 1:] * factors[1]).astype(np.float16).reshape(shape)
        nibbles = blocks[:, 16:].reshape(-1, 4, 32)
        codes = np.stack([nibbles & 15, nibbles >> 4], axis=2)
    if not (np.isfinite(scale).all() and np.isfinite(minimum).all()):
        raise CheckpointError("a scale is not finite in float16; download the file again, or choose int8")
    return Levels(codes.astype(np.int8).reshape(tensor.shape) - np.int8(8), scale, 4, minimum=minimum)
