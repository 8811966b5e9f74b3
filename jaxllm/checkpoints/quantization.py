"""Reads quantized checkpoints: GPTQ, AWQ, compressed-tensors, bitsandbytes, FP8, MXFP4.

Integers with scales are stored unchanged, in our order; a zero point of 4 bits becomes a minimum of the
group, the product of both in float16. MXFP4's 4-bit numbers are multiples of 0.5, and its scales powers of
two: 8 bits represent both. FP8 is dequantized and quantized again, to 8 bits in groups of 32 (adds about
0.7 % error). Unsupported formats are refused by name.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.formats import WeightFormat
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.parameters import ParamSpec
from jaxllm.models.translate import Tensor
from jaxllm.quant.formats import QArray, pack

if TYPE_CHECKING:
    # Importing it requires the safetensors package, which a GGUF file does not need.
    from jaxllm.checkpoints.safetensors_folder import SafetensorsFolder
GROUP = 32
# Twice the numbers of MXFP4 (e2m1), by their 4 bits.
_TWICE_E2M1 = np.asarray((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.int8)


@dataclasses.dataclass(frozen=True)
class Levels:
    """A checkpoint's tensor as integers and scales: `levels · scale`, or with minima
    `(levels + 8) · scale + minimum`.

    Attributes:
      levels: int8, of the tensor's shape.
      scale: one per `group` values of the last axis, float16; or one for all of them, float32 (group 0).
      bits: 8 or 4.
      group: 32 or 0; 4 bits have groups.
      minimum: minimum for 4 bits, float16 of the shape of `scale`; None for none.
    """

    levels: np.ndarray
    scale: np.ndarray
    bits: int
    group: int = GROUP
    minimum: np.ndarray | None = None

    def values(self) -> np.ndarray:
        """The numbers, in float32."""
        repeats = self.group or self.levels.shape[-1]

        def wide(each: np.ndarray) -> np.ndarray:
            return each.astype(np.float32).repeat(repeats, -1)[..., : self.levels.shape[-1]]

        levels = self.levels.astype(np.float32)
        if self.minimum is None:
            return levels * wide(self.scale)
        return (levels + np.float32(8)) * wide(self.scale) + wide(self.minimum)

    def packed(self, axis: int) -> QArray:
        """Our weight of these levels, contracted along `axis`."""
        data = pack(self.levels, self.bits)
        return QArray(
            data=np.ascontiguousarray(data),  # pyright: ignore[reportArgumentType]: a host array
            scale=np.ascontiguousarray(self.scale),  # pyright: ignore[reportArgumentType]
            bits=self.bits,
            group=self.group,
            axis=axis,
            columns=self.levels.shape[-1],
            minimum=None if self.minimum is None else np.ascontiguousarray(self.minimum),  # pyright: ignore
        )


def e2m1_levels(codes: np.ndarray, exponents: np.ndarray) -> Levels:
    """Converts a tensor of MXFP4 to 8-bit levels, bit for bit.

    Args:
      codes: `[..., groups, 32]` integers below 16.
      exponents: `[..., groups]` uint8, exponents of powers of two with a bias of 127; 255 is NaN.

    Raises:
      CheckpointError: a scale is not finite, or above float16's range.
    """
    levels, exponents = _TWICE_E2M1[codes], exponents.astype(np.int32)
    empty = ~levels.any(-1)
    if (exponents == 255).any():
        raise CheckpointError("a scale is not finite; take another copy of the weights")
    # For levels that are twice the numbers. Powers of two from 2**-24 to 2**15 are float16.
    power = np.where(empty, 0, exponents - 128)
    if power.max(initial=0) > 15:
        raise CheckpointError("a scale is above what float16 holds; take the float weights")
    # Levels of smaller scales are rounded to multiples of the smallest one.
    if (below := np.minimum(power + 24, 0)).any():
        levels = np.rint(np.ldexp(levels.astype(np.float32), below[..., None])).astype(np.int8)
    scale = np.ldexp(np.float32(1), np.maximum(power, -24)).astype(np.float16)
    return Levels(levels.reshape(*codes.shape[:-2], -1), scale, 8)


def packed_parameter(of: Levels, tensor: Tensor, param: str, specs: Mapping[str, ParamSpec]) -> QArray | None:
    """One of our parameters in a checkpoint's tensor, unconverted.

    Args:
      of: tensor of the checkpoint's shape; for experts all `[E, ...]` or, by `tensor.expert`, one.

    Returns:
      The weight; None if a group of the checkpoint spans two of our units, each of which needs separate
      scales.
    """
    spec = specs[param]
    # A GGUF file has one tensor of all experts, where a folder has one of each.
    every = tensor.expert is not None and of.levels.ndim == 3
    stacked = tensor.stacked or every

    def read(values: np.ndarray, specs: Mapping[str, ParamSpec]) -> np.ndarray:
        if every:
            return np.stack([tensor.read(each, param, specs) for each in values])
        return tensor.read(values, param, specs)

    levels = read(of.levels, specs)

    def of_inputs(scale: np.ndarray) -> np.ndarray | None:
        """Scales in our order, or minima."""
        scale = scale.swapaxes(-1, -2)
        if levels.ndim < 3 or stacked:
            return scale
        # `[groups, D]` of all rows of units as `[units, groups of a unit, D]`.
        (units, rows), group = levels.shape[:2], of.group
        if group == 0:
            return np.broadcast_to(scale[None], (units, *scale.shape))
        if rows % group and group % rows:
            return None
        first = np.arange(units)[:, None] * rows + np.arange(-(-rows // group))[None] * group
        return scale[first // group]

    def of_outputs(scale: np.ndarray) -> np.ndarray:
        # They are rows like those of the levels, of another width.
        shapes = {name: (*specs[name].shape[:-1], scale.shape[-1]) for name in tensor.params}
        narrow = {name: dataclasses.replace(specs[name], shape=shape) for name, shape in shapes.items()}
        return read(scale, {**specs, **narrow})

    inputs = spec.role == "from_units"
    place = of_inputs if inputs else of_outputs
    scale, minimum = (None if each is None else place(each) for each in (of.scale, of.minimum))
    if scale is None:
        return None
    return dataclasses.replace(of, levels=levels, scale=scale, minimum=minimum).packed(-2 if inputs else -1)


KEY = "quantization_config"
# Column of each 4-bit number of a word of AWQ, lowest bits first.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# Keys about the making of a checkpoint.
_INERT = frozenset(
    {
        "quant_method", "damp_percent", "static_groups", "true_sequential", "model_name_or_path", "meta",
        "model_file_base_name", "exllama_config", "use_exllama", "use_cuda_fp16", "model_seqlen", "dataset",
        "block_name_to_quantize", "module_name_preceding_first_block", "batch_size", "cache_block_outputs",
        "max_input_length", "tokenizer", "pad_token_id", "disable_exllama", "backend", "do_fuse", "lm_head",
        "fuse_max_seq_len", "modules_to_fuse", "exllama_version", "modules_to_not_convert", "pack_dtype",
        "llm_int8_threshold", "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload", "_load_in_8bit",
        "llm_int8_has_fp16_weight", "bnb_4bit_compute_dtype", "bnb_4bit_quant_type", "_load_in_4bit",
        "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage", "activation_scheme",
        "modules_in_block_to_quantize", "global_compression_ratio", "ignore", "ignored_layers",
        "quantization_status", "version",
    }
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Quantization:
    """The storage format of a folder's matrices.

    Attributes:
      form: our weight format.
      parts: endings of a matrix's tensors, in place of `weight`; those after a `?` are optional.
      read: function of (folder, stem of the tensors' names, shape `[out, in]`, for experts `[E, out, in]`)
        that returns levels and scales, or floats.
      experts: whether all experts of a layer are one matrix each, and no other is quantized.
    """

    method: str
    form: WeightFormat
    parts: tuple[str, ...]
    read: Callable[["SafetensorsFolder", str, Any], Levels | np.ndarray]
    experts: bool = False

    def stem(self, stored: str) -> str | None:
        """The common prefix of the names of a matrix's tensors; None for other tensors."""
        if self.experts:
            return f"{stored}_"
        return stored.removesuffix("weight") if stored.endswith(".weight") else None

    def stored(self, stem: str, names: Collection[str]) -> set[str]:
        """The names of the tensors of a matrix; empty if it is stored as floats.

        Raises:
          CheckpointError: some of them are missing.
        """
        needed = [stem + each for each in self.parts if not each.startswith("?")]
        optional = {stem + each[1:] for each in self.parts if each.startswith("?")} & set(names)
        there = [each for each in needed if each in names]
        # Also floats have a tensor `weight`.
        if not any(each for each in there if not each.endswith(".weight")):
            return set()
        if missing := [each for each in needed if each not in names]:
            raise CheckpointError(
                f"the folder lacks {missing[0]} of a matrix of {self.method}; download it again"
            )
        return {*needed, *optional}


def read_quantization(
    config: Mapping[str, Any], *, ignore_keys: Collection[str] | None = ()
) -> Quantization | None:
    """The quantization of a config.json; None for none.

    Args:
      ignore_keys: keys to ignore, see `ConfigReader`; None leaves unknown keys to an earlier check.

    Raises:
      ConfigError: its kind or an option is not supported, or a key is unknown.
    """
    section = config.get(KEY)
    if section is None:
        return None
    if not isinstance(section, dict):
        raise ConfigError(f"config key {KEY!r} must be an object, got {section!r:.80}; fix it")
    reader = ConfigReader(section, f"{KEY}.", ignore_keys=section if ignore_keys is None else ignore_keys)
    method = reader.text("quant_method", "an unknown kind")
    if method not in _METHODS:
        raise ConfigError(
            f"weights quantized by {method!r:.80} ({KEY}) are not read; read are {', '.join(_METHODS)}: take "
            "one of these, or the float weights, which jaxllm quantizes itself"
        )
    found = _METHODS[method](reader)
    if ignore_keys is not None:
        reader.finish(inert_keys=_INERT)
    return found


def _gptq(reader: ConfigReader) -> Quantization:
    reader.only("desc_act", (None, False), "act-order is not read; take a checkpoint without it")
    version = reader.text("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise ConfigError(f"GPTQ's checkpoint_format {version!r:.80} is not read; take gptq or gptq_v2")
    bits, group = _bits(reader, "bits", (4, 8)), _group(max(0, reader.integer("group_size", 128)))
    symmetric = reader.flag("sym", True)
    # Version 1 stores zero points minus 1.
    more = 1 if version == "gptq" else 0

    def read(folder: "SafetensorsFolder", stem: str, shape: tuple[int, int]) -> Levels:
        rows, columns = shape
        count, groups = 32 // bits, _groups(columns, group)
        words = folder.integers(f"{stem}qweight", (columns // count, rows))
        zeros = folder.integers(f"{stem}qzeros", (groups, -(-rows // count)))
        index = f"{stem}g_idx"
        if index in folder.names():
            expected = np.arange(columns) // (group or columns)
            if not np.array_equal(folder.integers(index, (columns,)), expected):
                raise CheckpointError(
                    f"{index} reorders inputs: act-order is not read; take a checkpoint without it"
                )
        values = _unpacked(words, bits, 0).T
        zero = _unpacked(zeros, bits, 1)[:, :rows].T + more
        return _grouped(stem, values, zero, folder.floats(f"{stem}scales", (groups, rows)).T, bits, symmetric)

    return Quantization("gptq", _form(bits), ("qweight", "qzeros", "scales", "?g_idx"), read)


def _awq(reader: ConfigReader) -> Quantization:
    reader.only(
        "version", (None, "gemm", "GEMM"), "other layouts of AWQ are not read; take a gemm checkpoint"
    )
    bits, group = _bits(reader, "bits", (4,)), _group(max(0, reader.integer("group_size", 128)))
    symmetric = not reader.flag("zero_point", True)

    def read(folder: "SafetensorsFolder", stem: str, shape: tuple[int, int]) -> Levels:
        rows, columns = shape
        groups = _groups(columns, group)
        place = np.argsort(_AWQ_ORDER)

        def ordered(words: np.ndarray) -> np.ndarray:
            return _unpacked(words, bits, 1).reshape(len(words), -1, 8)[..., place].reshape(len(words), -1)

        values = ordered(folder.integers(f"{stem}qweight", (columns, rows // 8))).T
        zero = ordered(folder.integers(f"{stem}qzeros", (groups, rows // 8))).T
        return _grouped(stem, values, zero, folder.floats(f"{stem}scales", (groups, rows)).T, bits, symmetric)

    return Quantization("awq", _form(bits), ("qweight", "qzeros", "scales"), read)


def _compressed_tensors(reader: ConfigReader) -> Quantization:
    form = reader.text("format", "dense")
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        reader.only(key, (None, {}), "only weights that are quantized by themselves are read")
    sections = reader.section("config_groups")
    names = sections.keys() if sections else []
    if sections is None or len(names) != 1:
        raise ConfigError(f"{KEY}.config_groups must have one group for all layers, got {len(names)}")
    only = sections.section(names[0]) or ConfigReader({})
    for key in ("input_activations", "output_activations", "targets", "format"):
        # Activations are rounded as our own kernels do it.
        only.accept(key)
    weights = only.section("weights") or ConfigReader({})
    for key in ("observer", "observer_kwargs", "dynamic", "block_structure", "scale_dtype", "zp_dtype"):
        weights.accept(key)
    weights.only(
        "actorder", (None, "static", "weight"), "act-order is not read; take a checkpoint without it"
    )
    weights.only("symmetric", (True,), "minima are not read; take a symmetric checkpoint")
    weights.only("type", ("int",), "only integers are read")
    strategy, bits = weights.text("strategy", ""), _bits(weights, "num_bits", (4, 8))
    group = weights.optional_integer("group_size") or 0
    if strategy not in ("group", "channel") or form not in ("pack-quantized", "int-quantized"):
        raise ConfigError(
            f"compressed-tensors of the strategy {strategy!r:.40} in the format {form!r:.40} are not read; "
            "read are group and channel, in pack-quantized and int-quantized"
        )
    group = _group(group if strategy == "group" else 0)
    packed = form == "pack-quantized"
    name = "weight_packed" if packed else "weight"

    def read(folder: "SafetensorsFolder", stem: str, shape: tuple[int, int]) -> Levels:
        rows, columns = shape
        groups = _groups(columns, group)
        if packed:
            count = 32 // bits
            words = folder.integers(f"{stem}{name}", (rows, -(-columns // count)))
            values = _unpacked(words, bits, 1)[:, :columns] - np.int16(1 << bits - 1)
        else:
            values = folder.integers(f"{stem}{name}", shape, "I8")
        scale = folder.floats(f"{stem}weight_scale", (rows, groups))
        return _grouped(stem, values, np.zeros((1, 1), np.int16), scale, bits, True)

    parts = (name, "weight_scale", "?weight_shape", "?weight_g_idx" if packed else "?weight_zero_point")
    return Quantization("compressed-tensors", _form(bits), parts, read)


def _bitsandbytes(reader: ConfigReader) -> Quantization:
    reader.only(
        "load_in_4bit", (None, False), "4 bits of bitsandbytes are not read; take its 8 bits, or GPTQ"
    )
    reader.only("load_in_8bit", (True,), "only 8 bits are read")

    def read(folder: "SafetensorsFolder", stem: str, shape: tuple[int, int]) -> Levels:
        levels = folder.integers(f"{stem}weight", shape, "I8")
        scale = folder.floats(f"{stem}SCB", (shape[0],)).reshape(-1, 1) / np.float32(127)
        return _grouped(stem, levels, np.zeros((1, 1), np.int16), scale, 8, True)

    return Quantization("bitsandbytes", "int8", ("weight", "SCB", "?weight_format"), read)


def _fp8(reader: ConfigReader) -> Quantization:
    reader.only("fmt", (None, "e4m3"), "only e4m3 is read")
    blocks = reader.integers("weight_block_size")
    if blocks and (len(blocks) != 2 or min(blocks) < 1):
        raise ConfigError(f"{KEY}.weight_block_size must be two positive numbers, got {blocks!r:.40}")

    def read(folder: "SafetensorsFolder", stem: str, shape: tuple[int, int]) -> np.ndarray:
        if not blocks:
            # One scale for the matrix; activations are rounded as our own kernels do it.
            return folder.eighths(f"{stem}weight", shape) * folder.floats(f"{stem}weight_scale_inv", ())
        counts = tuple(-(-size // block) for size, block in zip(shape, blocks, strict=True))
        values = folder.eighths(f"{stem}weight", shape)
        scale = folder.floats(f"{stem}weight_scale_inv", counts)
        wide = scale.repeat(blocks[0], 0)[: shape[0]].repeat(blocks[1], 1)[:, : shape[1]]
        return values * wide

    return Quantization("fp8", "int8", ("weight", "weight_scale_inv", "?activation_scale"), read)


def _mxfp4(reader: ConfigReader) -> Quantization:
    reader.accept("dequantize")

    def read(folder: "SafetensorsFolder", stem: str, shape: tuple[int, ...]) -> Levels:
        if shape[-1] % GROUP:
            raise CheckpointError(
                f"{stem}blocks: {shape[-1]} inputs are no whole groups of {GROUP}; the config belongs to "
                "other weights"
            )
        groups = (*shape[:-1], shape[-1] // GROUP)
        blocks = folder.integers(f"{stem}blocks", (*groups, GROUP // 2), "U8")
        exponents = folder.integers(f"{stem}scales", groups, "U8")
        codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*groups, GROUP)
        try:
            return e2m1_levels(codes, exponents)
        except CheckpointError as error:
            raise CheckpointError(f"{stem}scales: {error}") from error

    return Quantization("mxfp4", "int8", ("blocks", "scales"), read, experts=True)


_METHODS: dict[str, Callable[[ConfigReader], Quantization]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}


def _form(bits: int) -> WeightFormat:
    """The weight format that stores a checkpoint's integers unchanged."""
    return "int8" if bits == 8 else "int4"


def _bits(reader: ConfigReader, key: str, allowed: tuple[int, ...]) -> int:
    bits = reader.integer(key, 4)
    if bits not in allowed:
        raise ConfigError(
            f"weights of {bits} bits ({KEY}) are not read; read are {', '.join(map(str, allowed))}"
        )
    return bits


def _group(group: int) -> int:
    """The number of inputs per scale, 0 for all."""
    if group % GROUP:
        raise ConfigError(
            f"groups of {group} inputs ({KEY}) are not read; read are multiples of {GROUP}, and whole "
            "channels"
        )
    return group


def _groups(columns: int, group: int) -> int:
    return -(-columns // group) if group else 1


def _unpacked(words: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Numbers of words of 32 bits, lowest bits first along `axis`, as int16."""
    count, mask = 32 // bits, np.uint32((1 << bits) - 1)
    unsigned = words.view(np.uint32)
    # `[words, count, rows]` or `[rows, words, count]`; one shift at a time, for all would be 32 bits wide.
    shape = (len(words), count, words.shape[1]) if axis == 0 else (*words.shape, count)
    found = np.empty(shape, np.int16)
    for at in range(count):
        found[(slice(None), at) if axis == 0 else (..., at)] = unsigned >> np.uint32(bits * at) & mask
    return found.reshape(-1, words.shape[1]) if axis == 0 else found.reshape(len(words), -1)


def _grouped(
    stem: str, values: np.ndarray, zero: np.ndarray, scale: np.ndarray, bits: int, symmetric: bool
) -> Levels:
    """Levels of `values - zero` `[out, in]`, and scales `[out, groups]` as ours have them."""
    columns, groups = values.shape[1], scale.shape[1]
    if bits == 4 and not symmetric:
        halves, minimum = (_halves(stem, each, columns) for each in (scale, -zero.astype(np.int32) * scale))
        return Levels((values - 8).astype(np.int8), halves, 4, minimum=minimum)
    if zero.size > 1 and symmetric:
        if (zero != 1 << bits - 1).any():
            raise CheckpointError(
                f"{stem}qzeros are not those of symmetric weights; the config belongs to others"
            )
        zero = zero[:1, :1]
    if zero.size > 1:
        # Groups are of as many inputs, the last one may be short.
        zero = zero.repeat(-(-columns // groups), 1)[:, :columns]
    levels = values - zero
    if levels.min() < -127 or levels.max() > 127:
        if levels.min() < -128 or bits != 8:
            raise CheckpointError(f"{stem}: levels do not fit 8 bits; take another checkpoint")
        # One level of 256, by one step; ours are symmetric.
        levels = np.maximum(levels, -127)
    levels = levels.astype(np.int8)
    if groups == 1 and bits == 8:
        _require_finite(stem, scale)
        return Levels(levels, scale.astype(np.float32), 8, 0)
    return Levels(levels, _halves(stem, scale, columns), bits)


def _require_finite(stem: str, scale: np.ndarray) -> None:
    if not np.isfinite(scale).all():
        raise CheckpointError(f"{stem}: a scale is not finite; take another copy of the weights")


def _halves(stem: str, scale: np.ndarray, columns: int) -> np.ndarray:
    """Scales or minima `[out, groups]` for groups of 32 columns, in float16."""
    _require_finite(stem, scale)
    each = -(-columns // scale.shape[1])
    repeated = scale.repeat(-(-each // GROUP), 1)[:, : -(-columns // GROUP)]
    with np.errstate(over="ignore"):
        halves = repeated.astype(np.float16)
    if not np.isfinite(halves).all():
        raise CheckpointError(f"{stem}: a scale is above what float16 holds; take the float weights")
    return halves
