"""Reads the parameters of a GGUF file: quantized blocks unchanged if ours have the same format.

Names of tensors are those of Hugging Face's folders, translated by the `gguf` package. Three things differ:
norms of Gemma are stored as 1 + w, rows of queries and keys may be in pairs, and a layer's experts are one
tensor for each of their matrices. Rows are reordered as packed bytes, so that no number changes.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxllm.checkpoints import gguf_file
from jaxllm.checkpoints.gguf_config import family_of
from jaxllm.checkpoints.gguf_file import GgufFile, GgufTensor, import_gguf
from jaxllm.checkpoints.quantization import GROUP, packed_parameter
from jaxllm.checkpoints.safetensors_folder import some
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError
from jaxllm.formats import WeightFormat
from jaxllm.models.architectures import architecture
from jaxllm.models.parameters import ParamSpec, param_specs, parameter_bits
from jaxllm.models.translate import Architecture, Tensor
from jaxllm.quant import QArray, quantize
from jaxllm.quant.weights import RowParts, part_rows

_EXPERTS = {
    "experts.gate": "ffn_gate_exps.weight",
    "experts.up": "ffn_up_exps.weight",
    "experts.down": "ffn_down_exps.weight",
    "expert_gate_bias": "ffn_gate_exps.bias",
    "expert_up_bias": "ffn_up_exps.bias",
    "expert_down_bias": "ffn_down_exps.bias",
}
# Read with the config, or computed here.
_NO_PARAMETERS = frozenset({"rope_freqs.weight"})


# The name of a stored tensor, the tensor, and the places of our parameters in it.
_Source = tuple[str, GgufTensor, Tensor]


def own_format(file: GgufFile) -> WeightFormat:
    """The weight format that stores the file's matrices unchanged: that of its narrowest ones.

    Raises:
      CheckpointError: no format stores the file's blocks unchanged.
    """
    kinds = {each.kind for each in file.tensors.values() if len(each.shape) > 1}
    if kinds & {"Q4_0", *gguf_file.MINIMA}:
        own: WeightFormat = "int4"
    elif kinds & {"Q8_0", "MXFP4", *gguf_file.INTO_INT8}:
        own = "int8"
    else:
        own = "bf16" if "BF16" in kinds and not kinds & {"F32", "F16", "F64"} else "f32"
    read = {"BF16", *gguf_file.FLOATS, *gguf_file.EXACT, *gguf_file.MINIMA, *gguf_file.INTO_INT8}
    if others := kinds - read:
        raise CheckpointError(
            f"{file.path} has blocks of {', '.join(sorted(others))}, which have no equal among jaxllm's "
            "weights; choose --weights int8 to store them in 8-bit groups of 32 (adds about 0.7 % error), or "
            "take a file of Q8_0, Q4_0 or Q4_1, which are read exactly"
        )
    return own


def stays_at_4_bits(file: GgufFile, weights: WeightFormat | str | None) -> bool:
    """Whether `int4` stores all matrices of layers as the file has them."""
    exact = {kind for kind, bits in gguf_file.EXACT.items() if bits == 4} | set(gguf_file.MINIMA)
    layers = {each.kind for name, each in file.tensors.items() if len(each.shape) > 1 and "blk." in name}
    return weights == "int4" and layers <= exact


def read_gguf_params(
    file: GgufFile, cfg: ModelConfig, weights: WeightFormat | None = None, *, by_rows: bool = False
) -> Iterator[tuple[str, np.ndarray | QArray | RowParts]]:
    """Yields our parameters from a GGUF file, lazily and in the order of `param_specs(cfg)`.

    Names and shapes of all tensors are checked by this call, before anything is yielded.

    Args:
      cfg: the result of `read_gguf_config` for it.
      weights: the requested format; None keeps that of each tensor.
      by_rows: whether embeddings and heads are `RowParts`, which must be consumed before the next parameter.

    Returns:
      An iterator over (name, array): floats, or weights of groups of 32 if both the tensor and the format are
      quantized.

    Raises:
      CheckpointError: tensors are missing, unknown, of other shapes, or of types that are not supported.
    """
    specs = param_specs(cfg)
    sources = _locate(file, cfg, specs)
    if weights is None:
        own_format(file)

    def read(param: str, source: _Source, of: Mapping[str, ParamSpec] = specs) -> np.ndarray | QArray:
        try:
            return _read(source, param, of, weights)
        except CheckpointError as error:
            raise CheckpointError(f"{file.path}: {source[0]}: {error}") from error

    def rows(param: str) -> Iterator[np.ndarray | QArray]:
        (name, stored, tensor), spec = sources[param], specs[param]
        skipped, tensor = tensor.skip_rows, dataclasses.replace(tensor, skip_rows=0)
        for first, last in part_rows(*spec.shape):
            shape = (last - first, spec.shape[1])
            own = dataclasses.replace(stored, shape=shape, data=stored.data[skipped + first : skipped + last])
            part = {**specs, param: dataclasses.replace(spec, shape=shape)}
            yield read(param, (name, own, tensor), part)
            file.drop_pages()

    def load() -> Iterator[tuple[str, np.ndarray | QArray | RowParts]]:
        for name, spec in specs.items():
            if by_rows and spec.role == "embed":
                yield name, RowParts(spec.shape, rows(name))
            else:
                yield name, read(name, sources[name])
                file.drop_pages()

    return load()


def _locate(file: GgufFile, cfg: ModelConfig, specs: Mapping[str, ParamSpec]) -> dict[str, _Source]:
    gguf = import_gguf()
    name = file.metadata["general.architecture"]
    numbers = {each: number for number, each in gguf.MODEL_ARCH_NAMES.items()}
    # For the first layer; other layers' names only differ in the number.
    names = gguf.get_tensor_name_map(numbers[name], 1)
    family, interleaved = architecture(cfg.model_type), family_of(name).interleaved
    sources: dict[str, _Source] = {}
    used = set(_NO_PARAMETERS)
    for tensor in itertools.chain.from_iterable(map(apart, family.tensors(cfg))):
        if tensor.expert:
            # The first expert's entry is for the tensor of all.
            continue
        name_in_file = stored_name(tensor, names, family)
        stored = file.tensors.get(name_in_file)
        if stored is None:
            raise CheckpointError(
                f"{file.path} lacks the tensor {name_in_file} of a {cfg.model_type} model with its metadata; "
                "download it again"
            )
        lead = (cfg.experts,) if tensor.expert is not None else ()
        wanted = (*lead, *tensor.shape(specs))
        # A matrix of one row is stored as a vector.
        if stored.shape != wanted and not (wanted[0] == 1 and stored.shape == wanted[1:]):
            raise CheckpointError(
                f"{file.path}: {name_in_file} has the shape {list(stored.shape)}, where the metadata implies "
                f"{list(wanted)}; download it again"
            )
        tensor = turned(tensor, interleaved)
        used.add(name_in_file)
        for param in tensor.params:
            sources[param] = (name_in_file, stored, tensor)
    if extra := file.tensors.keys() - used:
        raise CheckpointError(
            f"{file.path} holds {some(extra)}, which a {cfg.model_type} model with its metadata does not have"
        )
    return sources


def apart(tensor: Tensor) -> list[Tensor]:
    """A tensor of a folder as llama.cpp's tensors of its parameters: those of all experts have one each,
    `[E, out, in]`."""
    if not tensor.stacked:
        return [tensor]
    how = {"alternating": False, "transposed": tensor.params[0].endswith(".down")}
    return [dataclasses.replace(tensor, params=(each,), **how) for each in tensor.params]


def turned(tensor: Tensor, interleaved: bool) -> Tensor:
    """A tensor of a folder as llama.cpp has it: norms as they are multiplied with, and with `interleaved`
    rows of queries and keys in pairs."""
    pairs = interleaved and tensor.params[0].rsplit(".", 1)[-1] in ("q", "k", "q_bias", "k_bias")
    return dataclasses.replace(tensor, plus_one=False, interleaved=tensor.interleaved or pairs)


def stored_name(tensor: Tensor, names: Any, family: Architecture) -> str:
    """llama.cpp's name of a tensor.

    Args:
      tensor: tensor with full names, from `Architecture.tensors`.
      names: name map of the `gguf` package for a model of one layer.
      family: architecture of the model.

    Raises:
      CheckpointError: the package has no name for it.
    """
    param, name = tensor.params[0], tensor.name
    layer, part = param.split(".", 2)[1:] if param.startswith("layers.") else ("", param)
    if part in _EXPERTS:
        return f"blk.{layer}.{_EXPERTS[part]}"
    if layer:
        name = family.layer_prefix.format(0) + name.removeprefix(family.layer_prefix.format(layer))
    full = (family.prefixes[0] if tensor.in_body else "") + name
    found = names.get_name(full, (".weight", ".bias"))
    if found is None:
        raise CheckpointError(f"the package gguf does not know the tensor {full}; update it")
    # The only name of a folder without that ending.
    found += ".weight" if name.endswith(".sinks") else ""
    return found.replace("blk.0.", f"blk.{layer}.", 1) if layer else found


def _read(
    source: _Source, param: str, specs: Mapping[str, ParamSpec], weights: WeightFormat | None
) -> np.ndarray | QArray:
    """One parameter, in the widest format that both the tensor and `weights` allow."""
    (_, stored, tensor), spec = source, specs[param]
    vector = spec.role == "vector"
    if stored.kind in gguf_file.EXACT and not vector:
        bits = gguf_file.EXACT[stored.kind]
        wanted = bits if weights is None else _bits(param, spec, weights)
        if bits <= wanted <= 8:
            # Embeddings and heads are looked up at 8 bits; other matrices stay as narrow as they are.
            wide = wanted > bits and (weights == "int8" or spec.role == "embed")
            blocks = dataclasses.replace(gguf_file.levels(stored), bits=8 if wide else bits)
            exact = packed_parameter(blocks, tensor, param, specs)
            if exact is not None:
                return exact
    if stored.kind in gguf_file.MINIMA and not vector and weights in (None, "int4"):
        found = packed_parameter(gguf_file.levels_with_minima(stored), tensor, param, specs)
        if found is not None:
            return found
    values = gguf_file.floats(stored)
    if tensor.expert is None:
        read = tensor.read(values.reshape(tensor.shape(specs)), param, specs)
    else:
        read = np.stack([tensor.read(each, param, specs) for each in values])
    quantized = stored.kind not in gguf_file.FLOATS and stored.kind != "BF16"
    if quantized and not vector and (weights is None or _bits(param, spec, weights) == 8):
        axis = -2 if spec.role == "from_units" else -1
        return quantize(np.asarray(read, np.float32), bits=8, axis=axis, group=GROUP)
    return read


def _bits(param: str, spec: ParamSpec, weights: WeightFormat) -> int:
    """`parameter_bits`; nested weights are made of floats."""
    return 16 if weights == "int8-nested" else parameter_bits(param, spec, weights)
