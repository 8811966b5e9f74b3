"""Opens bundles: maps the file, checks it, and gives its arrays to JAX without a copy.

Later commands add parts to a model, as JSON facts and arrays. A part is declared once, as a `PartFormat`: its
name, the words of its messages, and the function that makes its value from checked fields. A part with
anything missing, malformed or unknown is refused.
"""

import dataclasses
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import numpy as np
import xxhash

from jaxllm.bundle.layout import (
    HEADER,
    Extent,
    Layout,
    OpenedFile,
    Part,
    Tensor,
    check_header,
    low_segment,
    part_segment,
    rows_alone,
    rows_at,
)
from jaxllm.config import ModelConfig
from jaxllm.errors import BundleError, CheckpointError, ConfigError
from jaxllm.files.input_files import open_regular
from jaxllm.kernels import native
from jaxllm.models.parameters import expert_parameter, param_specs
from jaxllm.quant import Bfloat16Bits, BlockedArray, PerExpert, Weight, by_form, from_blocks
from jaxllm.quant.parts import stack_entries
from jaxllm.quant.weights import part_rows
from jaxllm.text.tokenizer import TokenizerFiles

Progress = Callable[[str, int], None]


class Bundle:
    """An open bundle. Use `Bundle.open`; close it, or use it as a context manager.

    Arrays made by `load` keep the mapping alive after `close`.

    Attributes:
      layout: the parsed manifest.
      fingerprint: SHA-256 of the manifest (hence of config, tokenizer and all weights), in hex.
      file: the open file, which detects changes in place; also after `close`.
    """

    def __init__(
        self, path: Path, layout: Layout, fingerprint: str, data: mmap.mmap, file: OpenedFile
    ) -> None:
        self.path = path
        self.layout = layout
        self.fingerprint = fingerprint
        self.file = file
        self._data: mmap.mmap | None = data
        self._verified: set[str] = set()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Bundle":
        """Maps a bundle and checks its manifest; weights are not read yet.

        Raises:
          BundleError: the file is missing, truncated, corrupt, of another version or no bundle.
        """
        path = Path(path)
        try:
            with open_regular(path) as file:
                # First: later changes are detected.
                opened = OpenedFile(path, file)
                size = os.fstat(file.fileno()).st_size
                offset, length, digest = check_header(path, file.read(HEADER.size), size)
                file.seek(offset)
                raw = file.read(length)
                if hashlib.sha256(raw).digest() != digest:
                    raise BundleError(
                        f"{path}: the manifest's checksum is wrong; copy the file again or prepare it again"
                    )
                data = mmap.mmap(file.fileno(), offset, access=mmap.ACCESS_READ)
        except OSError as error:
            raise BundleError(f"{path}: cannot be read ({error.strerror}); check the path") from error
        try:
            layout = Layout.parse(json.loads(raw), end=offset)
        except (ValueError, RecursionError) as error:
            raise BundleError(f"{path}: {error!s:.300}; prepare it again with this version") from error
        return cls(path, layout, digest.hex(), data, opened)

    def __enter__(self) -> "Bundle":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Drops the mapping; its memory is released once no loaded array refers to it."""
        self._data = None

    @property
    def cfg(self) -> ModelConfig:
        """The model's config."""
        return self.layout.cfg

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(each.size_bytes for each in self.layout.tensors.values())

    @property
    def step_bytes(self) -> int:
        """Bytes of the parameters that decoding a token reads, with all experts of a mixture."""
        # One row of an embedding is read; a tied one is the head too, and read whole.
        read = {"embed.tokens"} if self.cfg.tied_head else set[str]()
        tensors = self.layout.tensors.items()
        return sum(each.size_bytes for name, each in tensors if not name.startswith("embed.") or name in read)

    def tokenizer_files(self) -> TokenizerFiles:
        """The model's tokenizer.

        Raises:
          BundleError: its checksum is wrong, or it is no tokenizer.
        """
        self.verify_segment("tokenizer")
        segment = self.layout.segments["tokenizer"]
        raw = self._bytes(segment.offset, segment.size_bytes)
        try:
            return TokenizerFiles.from_json(json.loads(bytes(raw)))
        except (CheckpointError, ValueError, RecursionError) as error:
            raise BundleError(
                f"{self.path}: the tokenizer is malformed ({error!s:.300}); prepare the bundle again"
            ) from error

    def load(self, *, stacked: bool = False, on_segment: Progress | None = None) -> dict[str, Weight]:
        """All parameters as JAX arrays on the default device.

        On a CPU they alias the mapped file: it is read once, for its checksums, and all processes that serve
        the bundle share its pages. Only without native kernels quantized weights are converted to another
        order, in separate memory.

        Args:
          stacked: whether equal layers are stacked (see `unchecked`).
          on_segment: callback for (name, bytes) after each segment.

        Raises:
          BundleError: a segment's checksum is wrong.
        """
        self.verify_weights(on_segment=on_segment)
        return self.unchecked(stacked=stacked)

    def verify_weights(self, *, on_segment: Progress | None = None) -> None:
        """Checks the segments of all parameters; see `load`."""
        self._verify(self._weight_segments(), on_segment)

    def verify(self) -> None:
        """Reads the whole file and checks every segment, also those that were checked before; see `load`."""
        for name in self.layout.segments:
            self._verified.discard(name)
            self.verify_segment(name)

    def _verify(self, names: Sequence[str], on_segment: Progress | None) -> None:
        for name in names:
            self.verify_segment(name)
            if on_segment is not None:
                on_segment(name, self.layout.segments[name].size_bytes)

    def _weight_segments(self, *, experts: bool = True) -> list[str]:
        """The names of the segments of all parameters, or of all but separately stored `experts`, in file
        order."""
        tensors = self.layout.tensors.values()
        chosen = [each for each in tensors if experts or ".experts." not in each.segment]
        return list(dict.fromkeys(segment for tensor in chosen for segment in tensor.segments))

    def weight_parts(self, name: str, *, whole: bool = False) -> Iterator[Weight]:
        """One parameter as `load` gives it: an embedding or a head as consecutive parts of its rows unless
        `whole`, others in one part. A part is only valid until the next one, and its pages are given back.

        Raises:
          BundleError: a segment's checksum is wrong.
        """
        segments = {part for each in self._stored_names(name) for part in self.layout.tensors[each].segments}
        shape = self.layout.specs[name].shape if name in self.layout.specs else ()
        try:
            for segment in sorted(segments):
                self.verify_segment(segment)
            if whole or name not in ("embed.tokens", "head"):
                yield jax.tree.map(_put, self._weight(name))
                return
            tensor = self.layout.tensors[name]
            for first, end in part_rows(*shape):
                extents = rows_at(tensor, first, end - first)
                yield self.place(rows_alone(tensor, extents), (end - first, *shape[1:]), self._view)
        finally:
            for segment in segments:
                self.release_segment(segment)

    def unchecked(self, *, stacked: bool = False) -> dict[str, Weight]:
        """`load` without checksums: if weights are used in place, nothing is read.

        Args:
          stacked: whether the arrays of layers are entries of stacks (`StackEntry`), one for each array of
            layers stored in the same formats. They are copied one layer at a time.
        """
        found: dict[str, Any] = {}

        def layer(prefix: str) -> dict[str, Weight]:
            """The parameters of one layer as host arrays, by their names within it."""
            names = [name for name in param_specs(self.cfg) if name.startswith(prefix)]
            return {name.removeprefix(prefix): self._weight(name) for name in names}

        for layers in self._equal_layers() if stacked else ():
            found |= stack_entries({prefix: partial(layer, prefix) for prefix in layers})
        return {
            name: found[name] if name in found else jax.tree.map(_put, self._weight(name))
            for name in param_specs(self.cfg)
        }

    def load_all_but_experts(self, *, on_segment: Progress | None = None) -> dict[str, Weight]:
        """`load` without the experts, for a model with separately stored experts.

        Raises:
          BundleError: a segment's checksum is wrong.
        """
        self._verify(self._weight_segments(experts=False), on_segment)
        return {
            name: self.place(tensor, self.layout.specs[name].shape, self._view)
            for segment, tensors in self.layout.by_segment.items()
            for name, tensor in tensors.items()
            if ".experts." not in segment
        }

    def _weight(self, name: str) -> Weight:
        """A parameter as host arrays; separately stored experts are joined to one weight."""
        stored = self._stored_names(name)
        parts = [
            _of_host(self.layout.tensors[each], self.layout.specs[each].shape, self._view) for each in stored
        ]
        if stored == [name]:
            return parts[0]
        in_blocks = all(isinstance(each, BlockedArray) for each in parts)
        # Native kernels read each matrix in place; other paths have code per form, over stacks.
        return PerExpert(tuple(parts)) if in_blocks else by_form(parts, np.stack)

    def _stored_names(self, name: str) -> list[str]:
        """The names of the tensors of a parameter."""
        apart = self.layout.experts_apart and ".experts." in name
        return [expert_parameter(name, each) for each in range(self.cfg.experts)] if apart else [name]

    def _equal_layers(self) -> list[list[str]]:
        """The prefixes of layers' names, grouped by layers stored in the same formats."""
        forms: dict[str, list[Any]] = {}
        for name in param_specs(self.cfg):
            if name.startswith("layers."):
                _, number, within = name.split(".", 2)
                stored = [self.layout.tensors[each].form for each in self._stored_names(name)]
                forms.setdefault(f"layers.{number}.", []).append((within, *stored))
        equal: dict[Any, list[str]] = {}
        for prefix, form in forms.items():
            equal.setdefault(tuple(form), []).append(prefix)
        return list(equal.values())

    @property
    def read_in_place(self) -> bool:
        """Whether loaded weights are the bytes of the file, in the file's order."""
        quantized = any(tensor.scale is not None for tensor in self.layout.tensors.values())
        return jax.default_backend() == "cpu" and (native.kernels().native or not quantized)

    def segment_weights(
        self, segment: str, memory: np.ndarray, low_memory: np.ndarray | None = None
    ) -> dict[str, Weight]:
        """The parameters of a segment whose bytes were read into other memory.

        Args:
          memory: `[segment.size_bytes]` uint8 or more, aligned to 64 bytes. Weights used in place alias it,
            so it must not change while they are in use.
          low_memory: the same for the segment's low planes; None to only read the high planes of nested
            weights.
        """
        segments = self.layout.segments
        start = segments[segment].offset
        low_start = segments[low_segment(segment)].offset if low_memory is not None else 0

        def view(extent: Extent) -> np.ndarray:
            # Low planes are after everything else in the segment.
            own, first = memory, start
            if low_memory is not None and extent.offset >= low_start:
                own, first = low_memory, low_start
            return extent.array(own[extent.offset - first :][: extent.size_bytes])

        found = {}
        for name, tensor in self.layout.by_segment[segment].items():
            used = dataclasses.replace(tensor, low=None) if low_memory is None else tensor
            found[name] = self.place(used, self.layout.specs[name].shape, view)
        return found

    def place(self, tensor: Tensor, shape: tuple[int, ...], view: Callable[[Extent], np.ndarray]) -> Weight:
        """A weight of `shape` on the default device; `tensor` is its manifest entry, `view` returns its
        arrays."""
        return jax.tree.map(_put, _of_host(tensor, shape, view))

    def stored(self, name: str) -> np.ndarray | BlockedArray:
        """A parameter as stored, as views of the file.

        Raises:
          BundleError: its segment's checksum is wrong.
        """
        tensor = self.layout.tensors[name]
        for segment in tensor.segments:
            self.verify_segment(segment)
        return _as_stored(tensor, self.layout.specs[name].shape, self._view)

    def load_part(self, name: str) -> Part | None:
        """A part of the bundle, its arrays views of the file; None if the bundle has no such part.

        Raises:
          BundleError: its checksum is wrong.
        """
        part = self.layout.parts.get(name)
        if part is None:
            return None
        if part.tensors:
            self.verify_segment(part_segment(name))
        return Part(part.facts, {each: self._view(tensor.data) for each, tensor in part.tensors.items()})

    def release_part(self, name: str) -> None:
        """Releases the memory of a part's pages, if the system can. Views of them stay valid: pages that are
        used again are read from the file again."""
        self.release_segment(part_segment(name))

    def release_weights(self) -> None:
        """Releases the memory of all weights' pages, like `release_part`; copies of weights stay."""
        for name in self._weight_segments():
            self.release_segment(name)

    def release_segment(self, name: str) -> None:
        """`release_part` of a segment by its name."""
        segment = self.layout.segments.get(name)
        if self._data is None or segment is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        start = segment.offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._data.madvise(mmap.MADV_DONTNEED, start, segment.offset + segment.size_bytes - start)

    def verify_segment(self, name: str) -> None:
        """Checks one segment's bytes, once per open bundle."""
        if name in self._verified:
            return
        segment = self.layout.segments[name]
        self.require_checksum(name, xxhash.xxh3_128(self._bytes(segment.offset, segment.size_bytes)))
        self._verified.add(name)

    def require_checksum(self, name: str, digest: xxhash.xxh3_128) -> None:
        """Checks the digest of a segment's bytes that a caller has read.

        Raises:
          BundleError: the checksum is wrong.
        """
        actual, wanted = digest.hexdigest(), self.layout.segments[name].xxh3_128
        if actual != wanted:
            raise BundleError(
                f"{self.path}: segment {name!r} is corrupt (checksum {actual}, expected "
                f"{wanted}); copy the file again or prepare it again"
            )

    def _bytes(self, offset: int, size: int) -> memoryview:
        if self._data is None:
            raise BundleError(f"{self.path}: the bundle is closed; open it again")
        self.file.require_unchanged()
        return memoryview(self._data)[offset : offset + size]

    def _view(self, extent: Extent) -> np.ndarray:
        return extent.array(self._bytes(extent.offset, extent.size_bytes))


def _of_host(tensor: Tensor, shape: tuple[int, ...], view: Callable[[Extent], np.ndarray]) -> Weight:
    """A weight of `shape` in the format for the default device, as host arrays from `view`."""
    stored, on_cpu = _as_stored(tensor, shape, view), jax.default_backend() == "cpu"
    if isinstance(stored, BlockedArray):
        return stored if on_cpu and native.kernels().native else from_blocks(stored)
    as_bits = stored.dtype.name == "bfloat16" and on_cpu
    return Bfloat16Bits(stored.view(np.uint16)) if as_bits else stored  # pyright: ignore


def _put(array: np.ndarray) -> jax.Array:
    return jax.device_put(array, jax.devices()[0], may_alias=True)


def _as_stored(
    tensor: Tensor, shape: tuple[int, ...], view: Callable[[Extent], np.ndarray]
) -> np.ndarray | BlockedArray:
    """A parameter of `shape` in its stored format; `view` returns its arrays."""
    if tensor.scale is None:
        return view(tensor.data)
    return BlockedArray(
        data=view(tensor.data),  # pyright: ignore[reportArgumentType]: of the host
        scale=view(tensor.scale),  # pyright: ignore[reportArgumentType]
        bits=tensor.bits,
        group=tensor.group,
        axis=tensor.axis,
        shape=shape,
        low=None if tensor.low is None else view(tensor.low),  # pyright: ignore[reportArgumentType]
    )


FLOATS = ("float32", "bfloat16", "float16")
Value = TypeVar("Value")
# The largest number of an array that has bounds.
_HIGH = 1e30


class Fields:
    """The facts of a part and its arrays, which are checked as they are taken."""

    def __init__(self, part: Part) -> None:
        self.facts: Mapping[str, Any] = part.facts
        self._arrays = dict(part.arrays)

    def array(self, name: str, dtype: str, shape: tuple[int, ...], *, low: float | None = None) -> np.ndarray:
        """Takes the array `name` of a dtype and shape, whose numbers are finite, or in [low, 1e30].

        Raises:
          KeyError: there is no such array.
          ConfigError: it is another one.
        """
        found = self._arrays.pop(name)
        if found.shape != shape or found.dtype != dtype:
            raise ConfigError(
                f"{name} must be {dtype} {list(shape)}, got {found.dtype.name} {list(found.shape)}"
            )
        # The comparison is false for NaN.
        if low is not None and not ((found >= low) & (found <= _HIGH)).all():
            raise ConfigError(f"{name} are not all in [{low:g}, {_HIGH:g}]")
        if low is None and not np.isfinite(found).all():
            raise ConfigError(f"{name} holds NaN or infinity")
        return found

    def take(self, name: str) -> np.ndarray | None:
        """Takes the array `name`, unchecked; None if there is none."""
        return self._arrays.pop(name, None)

    def rest(self) -> dict[str, np.ndarray]:
        """Takes all other arrays, unchecked."""
        rest, self._arrays = self._arrays, {}
        return rest


@dataclasses.dataclass(frozen=True)
class PartFormat(Generic[Value]):
    """One kind of part.

    Attributes:
      subject: its contents, for messages: "its SUBJECT is malformed".
      remedy: what makes it again, for messages.
      make: function of the bundle and the part's fields that returns its value; its errors mean that the part
        is malformed.
      reads_arrays: whether `make` uses arrays; without, the bytes of the part are not read.
    """

    name: str
    subject: str
    remedy: str
    make: Callable[[Bundle, Fields], Value]
    reads_arrays: bool = True

    def read(self, bundle: Bundle) -> Value | None:
        """The part's value, its arrays views of the file; None if the bundle has no such part.

        Raises:
          BundleError: the part is corrupt, malformed, or belongs to another model.
        """
        if not self.is_in(bundle):
            return None
        part = bundle.load_part(self.name) if self.reads_arrays else None
        fields = Fields(Part(self.facts(bundle)) if part is None else part)
        try:
            value = self.make(bundle, fields)
            if others := fields.rest():
                raise ConfigError(f"it holds {min(others)}, which nothing reads")
        except BundleError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, CheckpointError) as error:
            raise BundleError(
                f"{bundle.path}: its {self.subject} is malformed ({error!s:.300}); {self.remedy}"
            ) from error
        return value

    def is_in(self, bundle: Bundle) -> bool:
        """Whether a bundle has such a part."""
        return self.name in bundle.layout.parts

    def facts(self, bundle: Bundle) -> dict[str, Any]:
        """The part's facts, unchecked, for display; empty if the bundle has no such part."""
        part = bundle.layout.parts.get(self.name)
        return {} if part is None else dict(part.facts)

    def release(self, bundle: Bundle) -> None:
        """Releases the memory of the part's pages (see `Bundle.release_part`)."""
        bundle.release_part(self.name)


def require_parameters(shapes: Mapping[str, tuple[int, ...]], params: Mapping[str, np.ndarray]) -> None:
    """Raises ConfigError unless the parameters have exactly these names, these shapes, and are floats."""
    if wrong := params.keys() ^ shapes.keys():
        raise ConfigError(f"the parameters and the config disagree on {min(wrong)}")
    for name, shape in shapes.items():
        value = params[name]
        if tuple(value.shape) != shape or value.dtype.name not in FLOATS:
            raise ConfigError(
                f"parameter {name} must be floats of shape {list(shape)}, got {value.dtype.name} "
                f"{list(value.shape)}"
            )
