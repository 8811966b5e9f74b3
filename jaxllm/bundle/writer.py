"""Writes bundles: parameters one by one, quantized by their role or unchanged, and the manifest last."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import xxhash

from jaxllm.bundle.layout import (
    ALIGN,
    DTYPES,
    HEADER,
    MAGIC,
    PAGE,
    VERSION,
    Part,
    Segment,
    contracted_axis,
    low_segment,
    part_segment,
    segment_of,
)
from jaxllm.bundle.levels import read_ladder
from jaxllm.bundle.reader import Bundle
from jaxllm.config import ModelConfig
from jaxllm.errors import BundleError, ConfigError
from jaxllm.files.atomic import atomic_file
from jaxllm.formats import EXPERT_BITS, WEIGHT_FORMATS, WeightFormat
from jaxllm.models.features import feature_refusal, require_feature
from jaxllm.models.parameters import (
    ParamSpec,
    expert_parameter,
    param_specs,
    parameter_bits,
    sparse_layers,
    specs_apart,
)
from jaxllm.quant import BlockedArray, QArray, dequantize, from_blocks, nested_blocks, quantize, to_blocks
from jaxllm.quant.parts import nested_entry
from jaxllm.quant.weights import Measured, RowParts, all_finite, part_rows
from jaxllm.text.tokenizer import TokenizerFiles
from jaxllm.version import __version__

# A parameter as stored.
Stored = np.ndarray | BlockedArray
_COPY_BYTES = 4 << 20
_FLOAT_BITS = {"float32": 32, "float16": 32, "bfloat16": 16}


@dataclasses.dataclass(frozen=True)
class Kept:
    """A parameter of floats that retains its width in any format: 16 bits if it is bfloat16, else 32."""

    value: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return self.value.shape


def stored_form(
    name: str,
    value: np.ndarray | QArray | Kept | Measured,
    spec: ParamSpec,
    weights: WeightFormat,
    width: int = 0,
) -> Stored:
    """A parameter at its bits in `weights`, or at `width` bits if that is not 0."""
    squares: np.ndarray | None = None
    if isinstance(value, QArray):
        return _blocks(value)
    if isinstance(value, Kept):
        value, width = value.value, 16 if value.value.dtype == ml_dtypes.bfloat16 else 32
    elif isinstance(value, Measured):
        value, squares, width = value.value, value.input_squares, value.bits or width
    of_format = parameter_bits(name, spec, weights)
    bits = 32 if spec.role == "vector" else width or of_format
    if weights == "int8-nested" and bits == 8:
        return nested_blocks(np.asarray(value, np.float32), contracted_axis(spec))
    if bits in (16, 32):
        stored = np.asarray(value).astype(np.float32 if bits == 32 else ml_dtypes.bfloat16, copy=False)
        if not all_finite(stored):
            raise ConfigError(
                "it holds NaN or infinite values, or larger ones than its width can store; take another copy "
                "of the weights, or wider ones"
            )
        return stored
    levels = quantize(
        np.asarray(value),
        bits=bits,  # pyright: ignore[reportArgumentType]: of `EXPERT_BITS`, and no float
        axis=contracted_axis(spec),
        minima=weights == "int4" and bits == 4,
        input_squares=squares if bits == 4 else None,
    )
    return _blocks(levels)


def _blocks(weight: QArray) -> BlockedArray:
    """`to_blocks`; of a large one by parts of whole panels, because its levels are larger than all else."""
    if weight.axis != -1 or weight.ndim != 2:
        return to_blocks(weight)
    parts = []
    for first, last in part_rows(len(weight.data), weight.columns):
        part = jax.tree.map(lambda array, at=slice(first, last): array[at], weight)
        parts.append(dataclasses.replace(to_blocks(part), shape=weight.shape))
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


def write_bundle(
    path: str | os.PathLike[str],
    *,
    cfg: ModelConfig,
    params: Mapping[str, np.ndarray] | Iterable[tuple[str, np.ndarray | QArray | Kept | Measured | RowParts]],
    weights: WeightFormat,
    tokenizer: TokenizerFiles,
    name: str,
    parts: Mapping[str, Part] | None = None,
    expert_bits: np.ndarray | None = None,
) -> None:
    """Writes a bundle; there is never a partial file at `path`.

    Args:
      path: path of the file; its folder must exist.
      params: float arrays by name; or (name, array) pairs in the order of `param_specs(cfg)`, which are
        consumed one by one. An array is of floats, or `Kept` or `Measured` ones, or a quantized weight, which
        is stored unchanged; or `RowParts` of these.
      weights: format of matrices (see `parameter_bits`).
      parts: additions to the model, by name.
      expert_bits: `[L_sparse, E]` int, bit widths of separately stored experts of a mixture: 8 (nested if
        `weights` are), 4, 2, or 16 for bfloat16 and 32 for float32. None stores them together.

    Raises:
      ConfigError: a parameter is missing, misshapen, out of order, cannot be quantized, or is not finite in
        its format.
      BundleError: the file cannot be written.
    """
    if weights not in WEIGHT_FORMATS:
        raise ConfigError(f"weights must be one of {', '.join(WEIGHT_FORMATS)}, got {weights!r}")
    pairs: Any = params
    if isinstance(params, Mapping):
        # In the order of the file; those that are not the model's are last.
        places = {name: place for place, name in enumerate(param_specs(cfg))}
        pairs = sorted(pairs.items(), key=lambda pair: places.get(pair[0], len(places)))
    with _written(path) as writer:
        writer.tokenizer(tokenizer)
        for param, spec, value, width in _in_file_order(cfg, pairs, expert_bits):
            parts_of = value.parts if isinstance(value, RowParts) else (value,)
            try:
                forms = (stored_form(param, each, spec, weights, width) for each in parts_of)
                writer.parameter(param, forms)
            except ConfigError as error:
                raise ConfigError(f"parameter {param}: {error}") from error
        for each, part in (parts or {}).items():
            writer.part(each, part)
        writer.finish(name, cfg, weights, experts_apart=expert_bits is not None)


def rewrite_bundle(
    path: str | os.PathLike[str],
    source: Bundle,
    parts: Mapping[str, Part | None],
    *,
    name: str = "",
    instead: Mapping[str, BlockedArray] | None = None,
    weights: Iterable[tuple[str, Stored]] | None = None,
) -> None:
    """Rewrites a bundle with more parts; its weights stay byte for byte.

    Args:
      path: path of the new file; it may replace the source.
      source: an open bundle.
      parts: parts to add, or to replace parts of the same names; None removes a part.
      name: display name of the model; the source's by default.
      instead: weights that replace those of the same names; they may have fewer bits.
      weights: all weights in their stored formats, in the order of `specs_apart`, to store a mixture's
        experts separately; None for the source's own.

    Raises:
      BundleError: the source is corrupt, or the file cannot be written.
    """
    layout = source.layout
    kept = {each: source.load_part(each) for each in layout.parts if each not in parts}
    with _written(path) as writer:
        writer.tokenizer(source.tokenizer_files())
        for param, stored in weights or ((each, source.stored(each)) for each in layout.tensors):
            writer.parameter(param, [(instead or {}).get(param, stored)])
        for each, part in {**kept, **parts}.items():
            if part is not None:
                writer.part(each, part)
        apart = layout.experts_apart or weights is not None
        writer.finish(name or layout.name, layout.cfg, layout.weights, experts_apart=apart)


def _in_file_order(
    cfg: ModelConfig, params: Iterable[tuple[str, Any]], expert_bits: np.ndarray | None
) -> Iterator[tuple[str, ParamSpec, np.ndarray, int]]:
    """Yields name, spec, value and bits (0: those of `weights`) of parameters, experts apart if they have
    bitwidths."""
    if expert_bits is not None:
        require_feature(cfg, "separate experts")
    widths = {} if expert_bits is None else widths_by_layer(cfg, expert_bits)
    stacks: dict[str, np.ndarray] = {}
    specs = param_specs(cfg)
    for item, pair in itertools.zip_longest(specs.items(), params):
        if pair is None:
            raise ConfigError(f"parameter {item[0]} is missing")
        if item is None:
            raise ConfigError(f"parameter {pair[0]} is not part of the model")
        (param, spec), (given, value) = item, pair
        if given != param or tuple(value.shape) != spec.shape:
            raise ConfigError(
                f"expected parameter {param} of shape {spec.shape}, got {given} of shape {tuple(value.shape)}"
            )
        if not widths or ".experts." not in param:
            yield param, spec, value, 0
            continue
        stacks[param] = value
        if param.endswith(".down"):
            # All matrices of one expert come before those of the next.
            for expert, width in enumerate(widths[param.split("experts.")[0]]):
                for name, stack in stacks.items():
                    own = ParamSpec(specs[name].shape[1:], specs[name].role)
                    yield expert_parameter(name, expert), own, stack[expert], width
            stacks = {}


def widths_by_layer(cfg: ModelConfig, expert_bits: np.ndarray) -> dict[str, list[int]]:
    """Prefix of a sparse layer (see `sparse_layers`) -> bitwidths of its experts, from an array `[L_sparse,
    E]`.

    Raises:
      ConfigError: the shape does not fit this mixture, or a bitwidth is not allowed.
    """
    sparse = sparse_layers(cfg)
    if expert_bits.shape != (len(sparse), cfg.experts):
        raise ConfigError(
            f"a model of {len(sparse)} sparse layers of {cfg.experts} experts needs as many widths, got "
            f"{list(expert_bits.shape)}"
        )
    if not np.isin(expert_bits, EXPERT_BITS).all():
        raise ConfigError(f"widths of experts must be among {EXPERT_BITS}")
    return dict(zip(sparse, expert_bits.astype(int).tolist(), strict=True))


def expert_widths(bundle: Bundle) -> np.ndarray:
    """The bitwidths `[L_sparse, E]` of a mixture's experts; 16 and 32 are floats."""
    cfg, apart = bundle.cfg, bundle.layout.experts_apart
    found = []
    for layer in sparse_layers(cfg):
        up = f"{layer}experts.up"
        names = [expert_parameter(up, each) for each in range(cfg.experts)] if apart else [up] * cfg.experts
        tensors = [bundle.layout.tensors[name] for name in names]
        found.append([each.width or _FLOAT_BITS[each.data.dtype] for each in tensors])
    return np.array(found, np.int8)


def lay_experts_apart(
    path: str | os.PathLike[str],
    source: Bundle,
    expert_bits: np.ndarray,
    parts: Mapping[str, Part] | None = None,
    *,
    name: str = "",
) -> None:
    """Rewrites a bundle with its experts stored separately, each with its own bit width, so that they can be
    read individually; all other weights stay byte for byte, and so do experts that already have their width.
    8-bit experts of a nested bundle are nested, each plane in a separate segment.

    Args:
      path: path of the new file; it may replace the source.
      source: an open bundle of a mixture, its experts together or apart.
      expert_bits: `[L_sparse, E]` int, none above the expert's present bitwidth.
      parts: see `rewrite_bundle`.
      name: display name of the model; the source's by default.

    Raises:
      BundleError: the source is corrupt, or the file cannot be written.
      ConfigError: the model is no such mixture, or a bitwidth is above the present one.
    """
    cfg = source.cfg
    reason = feature_refusal(cfg, "separate experts")
    if reason is None and read_ladder(source) is not None:
        reason = "experts of a model with levels cannot be stored separately; keep them together"
    if reason is not None:
        raise ConfigError(f"{source.path}: {reason}")
    widths, own = widths_by_layer(cfg, expert_bits), expert_widths(source)
    if np.any(expert_bits > own):
        raise ConfigError(
            f"{source.path} has experts of {int(own.min())} bits: wider ones would be larger, not better; "
            "give no larger width, or the Hugging Face folder"
        )
    own_of = dict(zip(widths, own.tolist(), strict=True))

    # Those of one layer.
    @functools.lru_cache(maxsize=3)
    def stack(name: str) -> np.ndarray | QArray | BlockedArray:
        column = source.stored(name)
        return from_blocks(column) if isinstance(column, BlockedArray) and not column.nested else column

    def entry(name: str, expert: int) -> Stored:
        """One matrix `[R, C]` as the stack stores it."""
        column = stack(name)
        if isinstance(column, BlockedArray):
            return nested_entry(column, expert)
        one = jax.tree.map(lambda part: part[expert], column)
        return to_blocks(one) if isinstance(one, QArray) else one

    def stored(name: str, spec: ParamSpec) -> Stored:
        if ".experts." not in name:
            return source.stored(name)
        layer, which = name.split("experts.")
        expert, part = which.split(".")
        at = int(expert)
        mine = source.stored(name) if source.layout.experts_apart else entry(f"{layer}experts.{part}", at)
        if widths[layer][at] == own_of[layer][at]:
            return mine
        floats = jnp.asarray(mine) if isinstance(mine, np.ndarray) else from_blocks(mine)
        value = np.asarray(dequantize(floats, jnp.dtype(jnp.float32)))
        return stored_form(name, value, spec, source.layout.weights, widths[layer][at])

    weights = ((each, stored(each, spec)) for each, spec in specs_apart(cfg).items())
    rewrite_bundle(path, source, parts or {}, name=name, weights=weights)


@contextlib.contextmanager
def _written(path: str | os.PathLike[str]) -> "Iterator[_Writer]":
    """A writer of a file that appears at `path` only if the block ends without an error."""
    path = Path(path)
    try:
        with atomic_file(path) as file, tempfile.TemporaryFile(dir=path.parent) as planes:
            yield _Writer(file, planes)
    except OSError as error:
        raise BundleError(
            f"{path}: cannot be written ({error.strerror}); check the folder and the free space"
        ) from error


class _Writer:
    """Writes segments and tensors into an open file, and records their manifest entries."""

    def __init__(self, file: BinaryIO, planes: BinaryIO) -> None:
        """`planes` is an empty file for a segment's low planes."""
        self._file = file
        self._segments: list[Segment] = []
        self._tensors: dict[str, Any] = {}
        self._parts: dict[str, Any] = {}
        self._name: str | None = None
        # Low planes of the current segment, which follow it in one of their own: their arrays, and their
        # bytes one after another. On disk, because those of a vocabulary are half of it.
        self._low: dict[str, dict[str, Any]] = {}
        self._planes = planes
        self._start = 0
        self._hash = xxhash.xxh3_128()
        self._position = 0
        self._put(bytes(HEADER.size))

    def tokenizer(self, tokenizer: TokenizerFiles) -> None:
        """Writes the tokenizer, which comes first."""
        self._segment("tokenizer")
        self._put(json.dumps(tokenizer.to_json()).encode())

    def parameter(self, name: str, parts: Iterable[Stored]) -> None:
        """Writes a parameter after the last one, in the same segment or a new one: parts of its rows, one in
        memory at a time. Scales, which follow, are of a tenth of its size or less."""
        self._segment(segment_of(name))
        self._pad(ALIGN)
        offset, rows, scales, first = self._position, 0, [], None
        for part in parts:
            first = part if first is None else first
            data = np.asarray(part.data if isinstance(part, BlockedArray) else part)
            self._put(_bytes_of(data))
            rows += len(data)
            if isinstance(part, BlockedArray):
                scales.append(np.asarray(part.scale))
                if part.low is not None:
                    self._put_low(name, np.asarray(part.low))
        assert first is not None
        data = np.asarray(first.data if isinstance(first, BlockedArray) else first)
        extent = {"offset": offset, "dtype": data.dtype.name, "shape": [rows, *data.shape[1:]]}
        entry: dict[str, Any] = {"segment": self._name, "data": extent}
        if isinstance(first, BlockedArray):
            entry["scale"] = self._extent(scales[0] if len(scales) == 1 else np.concatenate(scales))
            entry |= {"bits": first.bits, "group": first.group, "axis": first.axis}
        self._tensors[name] = entry

    def part(self, name: str, part: Part) -> None:
        """Writes a part."""
        self._segment(part_segment(name))
        for each, array in part.arrays.items():
            if np.asarray(array).dtype.name not in DTYPES:
                raise ConfigError(f"{each} of part {name} must be one of {', '.join(DTYPES)}")
        tensors = {
            each: {"segment": self._name, "data": self._extent(np.asarray(array))}
            for each, array in part.arrays.items()
        }
        self._parts[name] = {"facts": part.facts, "tensors": tensors}

    def finish(self, name: str, cfg: ModelConfig, weights: WeightFormat, *, experts_apart: bool) -> None:
        """Appends the manifest and fills in the header."""
        self._close()
        self._name = None
        self._pad(PAGE)
        manifest = {
            "name": name,
            "producer": f"jaxllm {__version__}",
            "weights": weights,
            "model": cfg.to_json(),
            "segments": [dataclasses.asdict(segment) for segment in self._segments],
            "tensors": self._tensors,
            "parts": self._parts,
            "experts_apart": experts_apart,
        }
        raw = json.dumps(manifest, separators=(",", ":")).encode()
        offset = self._position
        self._file.write(raw)
        self._file.seek(0)
        digest = hashlib.sha256(raw).digest()
        self._file.write(HEADER.pack(MAGIC, VERSION, 0, offset, len(raw), digest))

    def _segment(self, name: str) -> None:
        """Starts segment `name` unless it is the current one."""
        if name == self._name:
            return
        self._close()
        self._pad(PAGE)
        self._name, self._start, self._hash = name, self._position, xxhash.xxh3_128()

    def _extent(self, array: np.ndarray) -> dict[str, Any]:
        self._pad(ALIGN)
        offset = self._position
        self._put(_bytes_of(array))
        return {"offset": offset, "dtype": array.dtype.name, "shape": list(array.shape)}

    def _put_low(self, name: str, part: np.ndarray) -> None:
        """Adds rows to the low plane of a parameter, the segment's last one."""
        plane = self._low.setdefault(name, {"dtype": part.dtype.name, "shape": [0, *part.shape[1:]]})
        plane["shape"][0] += len(part)
        self._planes.write(_bytes_of(part))

    def _close(self) -> None:
        if self._name is None:
            return
        size = self._position - self._start
        self._segments.append(Segment(self._name, self._start, size, self._hash.hexdigest()))
        if self._low:
            low, self._low = self._low, {}
            self._segment(low_segment(self._name))
            self._planes.seek(0)
            for name, plane in low.items():
                self._pad(ALIGN)
                self._tensors[name]["low"] = {"offset": self._position, **plane}
                left = math.prod(plane["shape"]) * DTYPES[plane["dtype"]].itemsize
                while left:
                    data = self._planes.read(min(left, _COPY_BYTES))
                    self._put(data)
                    left -= len(data)
            self._planes.seek(0)
            self._planes.truncate()
            self._close()
            self._name = None

    def _pad(self, multiple: int) -> None:
        self._put(bytes(-self._position % multiple))

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._position += len(data)


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
