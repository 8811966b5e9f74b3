"""The layout of a bundle: header, manifest, segments and tensors, whose checks make untrusted files safe."""

import dataclasses
import functools
import os
import struct
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import ml_dtypes
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import BundleError, ConfigError
from jaxllm.formats import WEIGHT_FORMATS, WeightFormat
from jaxllm.models.parameters import ENCODER, ParamSpec, param_specs, specs_apart
from jaxllm.quant import BITS, GROUPS, PANEL, blocked_shapes
from jaxllm.quant.nested import NESTED_GROUP

SUFFIX = ".jaxllm"
VERSION = 1
MAGIC = b"JAXLLM\r\n"  # \r\n reveals a text-mode copy of the file
HEADER = struct.Struct("<8sIIQQ32s")
PAGE = 4096
ALIGN = 64
MAX_MANIFEST_BYTES = 16 << 20
DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "int32": np.dtype(np.int32),
}


@dataclasses.dataclass(frozen=True)
class Segment:
    """A contiguous, page-aligned range of the file."""

    name: str
    offset: int
    size_bytes: int
    xxh3_128: str


@dataclasses.dataclass(frozen=True)
class Extent:
    """One array in the file, `offset` counted from the file's start."""

    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the array."""
        return int(np.prod(self.shape, dtype=object)) * DTYPES[self.dtype].itemsize

    def array(self, raw: memoryview | np.ndarray) -> np.ndarray:
        """The array over the bytes `raw`, without a copy."""
        return np.frombuffer(raw, DTYPES[self.dtype]).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One parameter: its array, or if it is quantized its blocks and scales (see `BlockedArray`).

    The low plane of a nested weight is in a separate segment, `low_segment(segment)`.
    """

    segment: str
    data: Extent
    scale: Extent | None = None
    bits: int = 0
    group: int = 0
    axis: int = 0
    low: Extent | None = None

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Its arrays."""
        return tuple(each for each in (self.data, self.scale, self.low) if each is not None)

    @property
    def form(self) -> tuple[Any, ...]:
        """Everything but its place, hashable."""
        arrays = [(each.dtype, tuple(each.shape)) for each in self.extents]
        return (*arrays, self.bits, self.group, self.axis)

    @property
    def size_bytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(each.size_bytes for each in self.extents)

    @property
    def width(self) -> int:
        """Its bitwidth, of both planes together; 0 for floats."""
        return self.bits if self.low is None else 2 * self.bits

    @property
    def minima(self) -> bool:
        """Whether its groups have minima, by its scales' shape (see `BlockedArray`)."""
        if self.scale is None or self.low is not None or self.bits != 4:
            return False
        return len(self.scale.shape) > len(self.data.shape)

    @property
    def segments(self) -> tuple[str, ...]:
        """The names of its segments."""
        return (self.segment,) if self.low is None else (self.segment, low_segment(self.segment))


@dataclasses.dataclass(frozen=True)
class Part:
    """An addition to a model: facts as JSON, and arrays by name."""

    facts: dict[str, Any]
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class PartLayout:
    """The location of a part: its arrays, in a segment of the part's name, and its facts as JSON.

    The bundle checks offsets and checksums; readers of the part check its facts and shapes.
    """

    facts: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Layout:
    """A manifest, parsed and checked.

    Attributes:
      weights: width of the weight matrices.
      segments: segments by name, in file order.
      tensors: tensors by parameter name, in the order of `param_specs`.
      parts: additions to the model, by name.
      experts_apart: whether each expert of a mixture has a segment of its own, and its own width.
    """

    name: str
    weights: WeightFormat
    cfg: ModelConfig
    segments: dict[str, Segment]
    tensors: dict[str, Tensor]
    parts: dict[str, PartLayout] = dataclasses.field(default_factory=dict)
    experts_apart: bool = False

    @functools.cached_property
    def specs(self) -> dict[str, ParamSpec]:
        """Every parameter as stored."""
        return specs_apart(self.cfg) if self.experts_apart else param_specs(self.cfg)

    @functools.cached_property
    def by_segment(self) -> dict[str, dict[str, Tensor]]:
        """The parameters of each segment with parameters, in file order."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.tensors.items():
            found.setdefault(tensor.segment, {})[name] = tensor
        return found

    def low_offset(self, segment: str) -> int | None:
        """Offset of a segment's low planes from the segment's start; None if it has none."""
        low = self.segments.get(low_segment(segment))
        return None if low is None else low.offset - self.segments[segment].offset

    @classmethod
    def parse(cls, manifest: Any, *, end: int) -> "Layout":
        """Parses and checks a manifest; `end` is the offset at which the file's segments must end.

        Raises:
          ConfigError: the manifest is malformed, has wrong offsets, or disagrees with the config.
        """
        try:
            layout = cls(
                # For a terminal: without control characters and lone surrogates.
                name="".join(each if each.isprintable() else "?" for each in str(manifest["name"])),
                weights=manifest["weights"],
                cfg=ModelConfig.from_json(manifest["model"]),
                segments={each["name"]: _read_segment(each) for each in manifest["segments"]},
                tensors={name: _read_tensor(each) for name, each in manifest["tensors"].items()},
                parts={name: _read_part(name, each) for name, each in manifest.get("parts", {}).items()},
                experts_apart=manifest.get("experts_apart", False),
            )
            _check_layout(layout, end)
        except (KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"malformed manifest ({reason})") from error
        return layout


def segment_of(param: str) -> str:
    """The segment of parameter `param`: its layer's, its expert's, "embed" or "final"; the names of an
    encoder's have the prefix `ENCODER`."""
    if param.startswith(ENCODER):
        return ENCODER + segment_of(param.removeprefix(ENCODER))
    if param.startswith("layers."):
        parts = param.split(".")
        return ".".join(parts[: 4 if parts[2] == "experts" and parts[3].isdecimal() else 2])
    return "embed" if param.startswith("embed.") else "final"


def low_segment(segment: str) -> str:
    """The segment of the low planes of a segment's nested weights."""
    return f"{segment}.low"


def part_segment(part: str) -> str:
    """The segment of the arrays of a part."""
    return f"part.{part}"


def contracted_axis(spec: ParamSpec) -> Literal[-1, -2]:
    """The contracted axis of a matrix, along which scales are shared."""
    return -2 if spec.role == "from_units" else -1


def check_header(path: Path, header: bytes, size: int) -> tuple[int, int, bytes]:
    """Offset, length and digest of the manifest, from a checked header."""
    if len(header) < HEADER.size or header[: len(MAGIC)] != MAGIC:
        raise BundleError(f"{path}: not a jaxllm bundle; make one with `jaxllm prepare HF_DIR -o FILE`")
    _, version, reserved, offset, length, digest = HEADER.unpack(header)
    if version != VERSION:
        raise BundleError(
            f"{path}: bundle version {version}, this jaxllm reads version {VERSION}; prepare it again"
        )
    if reserved or length > MAX_MANIFEST_BYTES or offset < HEADER.size or offset + length != size:
        raise BundleError(
            f"{path}: truncated or damaged ({size} bytes, the header says {offset + length}); "
            "copy the file again or prepare it again"
        )
    return offset, length, digest


def _read_segment(entry: dict[str, Any]) -> Segment:
    segment = Segment(**entry)
    whole = _is_size(segment.offset) and _is_size(segment.size_bytes)
    if not whole or not isinstance(segment.name, str) or not isinstance(segment.xxh3_128, str):
        raise ConfigError(f"malformed segment {entry}")
    return segment


def _read_tensor(entry: dict[str, Any]) -> Tensor:
    fields = dict(entry)
    for part in ("data", "scale", "low"):
        if fields.get(part) is not None:
            extent = fields[part]
            shape = tuple(extent["shape"])
            if extent["dtype"] not in DTYPES:
                raise ConfigError(f"dtype {extent['dtype']!r} is not one a bundle may hold")
            if not all(map(_is_size, (*shape, extent["offset"]))):
                raise ConfigError(f"malformed place or shape {extent}")
            fields[part] = Extent(extent["offset"], extent["dtype"], shape)
    tensor = Tensor(**fields)
    # Exactly int: 8.0 and True would pass the comparisons below, and fail in a compiled step.
    if {type(n) for n in (tensor.bits, tensor.group, tensor.axis)} != {int}:
        raise ConfigError(f"malformed quantization {entry}")
    return tensor


def _read_part(name: str, entry: dict[str, Any]) -> PartLayout:
    if not isinstance(entry["facts"], dict):
        raise ConfigError(f"the facts of part {name!r:.80} are malformed")
    return PartLayout(entry["facts"], {each: _read_tensor(value) for each, value in entry["tensors"].items()})


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _check_layout(layout: "Layout", end: int) -> None:
    """Checks that every segment is inside the file, and every tensor inside its segment and as the config
    requires."""
    if layout.weights not in WEIGHT_FORMATS:
        raise ConfigError(f"weights {layout.weights!r} is not one of {', '.join(WEIGHT_FORMATS)}")
    if "tokenizer" not in layout.segments:
        raise ConfigError("the tokenizer is missing")
    for name in layout.by_segment:
        low = layout.low_offset(name)
        if low is not None and low < layout.segments[name].size_bytes:
            raise ConfigError(f"the low planes of segment {name!r} do not lie behind it")
    for segment in layout.segments.values():
        if not HEADER.size <= segment.offset <= segment.offset + segment.size_bytes <= end:
            raise ConfigError(f"segment {segment.name!r} lies outside the file")
    if type(layout.experts_apart) is not bool or (layout.experts_apart and not layout.cfg.experts):
        raise ConfigError(f"experts_apart is {layout.experts_apart!r:.80} in a model of {layout.cfg.experts}")
    specs = layout.specs
    if list(specs) != list(layout.tensors):
        differing = sorted(set(specs) ^ set(layout.tensors))[:3]
        raise ConfigError(f"parameters do not match the config (differing: {differing})")
    for name, spec in specs.items():
        _check_tensor(name, layout.tensors[name], spec, layout.segments)
    for part, each in layout.parts.items():
        for name, tensor in each.tensors.items():
            _check_place(f"{part}/{name}", tensor, part_segment(part), layout.segments)
            if len(tensor.extents) > 1 or tensor.data.dtype not in DTYPES:
                raise ConfigError(f"{name} of part {part} must be one of {', '.join(DTYPES)}")


def _check_tensor(name: str, tensor: Tensor, spec: ParamSpec, segments: dict[str, Segment]) -> None:
    _check_place(name, tensor, segment_of(name), segments)
    if tensor.scale is None:
        if tensor.low is not None:
            raise ConfigError(f"parameter {name} has a low plane without scales")
        # Vectors must be float32: they are used without the conversion of products.
        kinds = ("float32",) if spec.role == "vector" else ("float32", "bfloat16", "float16")
        if tensor.data.shape != spec.shape or tensor.data.dtype not in kinds:
            raise ConfigError(f"parameter {name} must be {' or '.join(kinds)} of shape {spec.shape}")
        return
    if not _quantized_as(tensor, spec):
        raise ConfigError(f"parameter {name} is quantized in a way its shape {spec.shape} excludes")


def _check_place(name: str, tensor: Tensor, wanted: str, segments: dict[str, Segment]) -> None:
    if tensor.segment != wanted:
        raise ConfigError(f"parameter {name} lies outside its segment")
    for extent in tensor.extents:
        segment = segments.get(low_segment(wanted) if extent is tensor.low else wanted)
        if segment is None or not (
            segment.offset <= extent.offset
            and extent.offset + extent.size_bytes <= segment.offset + segment.size_bytes
        ):
            raise ConfigError(f"parameter {name} lies outside its segment")
        if extent.offset % ALIGN:
            raise ConfigError(f"parameter {name} is not aligned to {ALIGN} bytes")


def _quantized_as(tensor: Tensor, spec: ParamSpec) -> bool:
    """Whether the entry satisfies the invariants of `BlockedArray` for a weight of `spec.shape`."""
    if tensor.scale is None or spec.role == "vector" or tensor.bits not in BITS:
        return False
    if tensor.axis != contracted_axis(spec) or tensor.group not in (0, *GROUPS)[tensor.bits != 8 :]:
        return False
    nested, bits, group = tensor.low is not None, tensor.bits, tensor.group
    data, scale = blocked_shapes(
        spec.shape, bits=bits, group=group, axis=tensor.axis, nested=nested, minima=tensor.minima
    )
    wanted = [("int8" if bits == 8 else "uint8", data), ("float16" if group else "float32", scale)]
    if nested:
        wanted = [("uint8", each) for each in (data, scale, data)]
    found = [(each.dtype, each.shape) for each in tensor.extents]
    return found == wanted and (not nested or (bits, group) == (4, NESTED_GROUP))


# Some rows of an embedding or head matrix are read without the rest if it is too large for memory. Quantized
# rows are stored and read by panels.


def row_step(matrix: Tensor) -> int:
    """The number of rows of a panel: pieces begin at multiples of it. 1 if the matrix is not quantized."""
    return 1 if matrix.scale is None else PANEL


def rows_at(matrix: Tensor, first: int, count: int) -> tuple[Extent, ...]:
    """The extents of rows `[first, first + count)`: their data, their scales if they are quantized, and their
    low plane if they are nested.

    Args:
      matrix: entry of a matrix contracted along its last axis.
      first: a multiple of `row_step`.
      count: number of rows; the extents are rounded up to whole panels.

    Raises:
      ConfigError: `first` is no multiple of `row_step`.
    """
    step = row_step(matrix)
    if first % step:
        raise ConfigError(f"rows of this matrix are stored by {step}, and {first} is no multiple of it")
    found = []
    for each in matrix.extents:
        # Scales without groups are one per row; other arrays lead with rows, or with panels if quantized.
        by_row = len(each.shape) == 1 or matrix.scale is None
        start, stop = (first, first + count) if by_row else (first // step, -(-(first + count) // step))
        if by_row and step > 1:
            stop = -(-stop // step) * step
        row_bytes = int(np.prod(each.shape[1:], dtype=np.int64)) * DTYPES[each.dtype].itemsize
        found.append(Extent(each.offset + start * row_bytes, each.dtype, (stop - start, *each.shape[1:])))
    return tuple(found)


def rows_alone(matrix: Tensor, extents: Sequence[Extent]) -> Tensor:
    """The entry of a matrix of only the rows at `extents` (see `rows_at`)."""
    data, scale, low = (*extents, None, None)[:3]
    assert data is not None
    return dataclasses.replace(matrix, data=data, scale=scale, low=low)


class OpenedFile:
    """An open file, with its size and modification time when it was opened, which detects changes in place.

    A mapped file is read when its pages are touched. So a change in place changes results, and a truncation
    ends the process (SIGBUS) at the next touch. Writers of this project never do either: they write another
    file and rename it, and processes that have the old file open continue with it. `require_unchanged`
    detects changes by other writers; it costs a few microseconds, and is called before and after every use.
    It cannot detect a truncation between the check and the use, nor a change whose writer resets the file's
    modification time.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        """Keeps `file` open until this object is collected; the caller may close its own handle."""
        self._path = path
        self._number = os.dup(file.fileno())
        # Not at exit: objects that are finalized there still call `require_unchanged`.
        weakref.finalize(self, os.close, self._number).atexit = False
        self._facts = self._now()

    def _now(self) -> tuple[int, int]:
        facts = os.fstat(self._number)
        return facts.st_size, facts.st_mtime_ns

    def require_unchanged(self) -> None:
        """Raises BundleError if the file's size or modification time has changed."""
        if self._now() != self._facts:
            raise BundleError(
                f"{self._path} was changed in place while it was open, so its weights are no longer those of "
                "the model; open it again, and replace such a file by renaming another one over it"
            )
