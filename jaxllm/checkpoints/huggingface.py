"""Reads and writes Hugging Face model folders: config.json and safetensors, as our config and parameters.

Only data is read, never a folder's Python files or pickles, and one parameter at a time, so that a model
larger than memory can be converted. Tokenizers are read by `tokenizer_folder.py`.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.checkpoints.quantization import GROUP, Levels, Quantization, packed_parameter, read_quantization
from jaxllm.checkpoints.quantization import KEY as QUANTIZATION_KEY
from jaxllm.checkpoints.safetensors_folder import (
    WEIGHTS_FILE,
    SafetensorsFolder,
    Tensors,
    check_parameters,
    has_weights,
    some,
    write_checkpoint,
)
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files.input_files import read_json
from jaxllm.models.architectures import architecture
from jaxllm.models.parameters import ParamSpec, param_specs
from jaxllm.models.translate import Architecture, Tensor
from jaxllm.models.wrappers import WRAPPERS, Wrapper, read_text_config
from jaxllm.quant import QArray, dequantize, quantize
from jaxllm.quant.weights import RowParts, part_rows

CONFIG_FILE = "config.json"

# Written explicitly, because transformers' defaults are the ids of the family's first model, which may be
# past the end of a small vocabulary.
_NO_TOKEN_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


def read_config(folder: Path, *, ignore_keys: Collection[str] = ()) -> ModelConfig:
    """The model of a folder's config.json; for a multimodal one its text model.

    If the config ties the head to the embedding, but the folder has a separate head, the model has that
    one, as in transformers.

    Args:
      folder: a Hugging Face model folder.
      ignore_keys: keys of the config to ignore, see `jaxllm.models.config_reader.ConfigReader`.

    Raises:
      CheckpointError: config.json is missing or is not a JSON object, or the weights of a model with a tied
        head cannot be opened.
      ConfigError: the model_type is not supported, or a key is unknown, malformed or not supported.
    """
    config = _read_json_config(folder)
    read_quantization(config, ignore_keys=ignore_keys)
    plain = {key: value for key, value in config.items() if key != QUANTIZATION_KEY}
    cfg = read_text_config(plain, ignore_keys=ignore_keys)
    return dataclasses.replace(cfg, tied_head=False) if _has_other_head(Path(folder), cfg) else cfg


def quantization_of(folder: Path) -> Quantization | None:
    """The quantization of a folder's weights; None for floats.

    Raises:
      CheckpointError, ConfigError: as `read_config`, except that unknown keys are not refused.
    """
    return read_quantization(_read_json_config(folder), ignore_keys=None)


def read_params(folder: Path, cfg: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """`read_stored_params`, with quantized weights dequantized to float32."""
    return ((name, _floats(value)) for name, value in read_stored_params(folder, cfg))


def read_stored_params(
    folder: Path, cfg: ModelConfig, *, by_rows: bool = False
) -> Iterator[tuple[str, np.ndarray | QArray | RowParts]]:
    """Yields our parameters from a folder's weights, lazily and in the order of `param_specs(cfg)`.

    Names, shapes and types of all tensors are checked by this call, before anything is yielded.

    Args:
      folder: a Hugging Face model folder with `model.safetensors`, whole or sharded with its index.
      cfg: the result of `read_config` for the folder.
      by_rows: whether large embeddings and heads are `RowParts`, which must be consumed before the next
        parameter.

    Returns:
      An iterator over (name, array) in the stored type: float32, float16 or bfloat16 (ml_dtypes), or
      quantized weights; norm weights that are stored as w and used as 1 + w come as 1 + w in float32.

    Raises:
      CheckpointError: weights are missing, truncated or corrupt, are not safetensors, have tensors of another
        model, or disagree with the config.
    """
    weights = SafetensorsFolder(Path(folder))
    specs = param_specs(cfg)
    quantization = quantization_of(folder)
    # Parameter -> its tensors: several, in order, if each is one expert.
    sources: dict[str, list[tuple[str, Tensor]]] = {name: [] for name in specs}
    located = _locate(architecture(cfg.model_type), cfg, weights, _wrapper(folder), quantization)
    for stored, tensor in located.items():
        if not _packed(stored, quantization, weights):
            weights.check(stored, tensor.shape(specs))
        for name in tensor.params:
            sources[name].append((stored, tensor))
    if "head" in sources and not sources["head"]:
        ((stored, tensor),) = sources["embed.tokens"]
        sources["head"] = [(stored, dataclasses.replace(tensor, params=("head",)))]

    def read(stored: str, tensor: Tensor, name: str) -> np.ndarray | QArray | RowParts:
        if quantization is not None and _packed(stored, quantization, weights):
            return _read_packed(weights, quantization, stored, tensor, name, specs)
        if (
            by_rows
            and specs[name].role == "embed"
            and tensor == Tensor(tensor.name, (name,), skip_rows=tensor.skip_rows, in_body=tensor.in_body)
        ):
            return _by_rows(weights, stored, tensor.skip_rows, specs[name].shape)
        return weights.read(stored, lambda rows: tensor.read(rows, name, specs))

    def load() -> Iterator[tuple[str, np.ndarray | QArray | RowParts]]:
        for name in specs:
            parts = [read(stored, tensor, name) for stored, tensor in sources[name]]
            experts = [each for each in parts if not isinstance(each, RowParts)]
            yield name, parts[0] if sources[name][0][1].expert is None else _stacked(experts)

    return load()


def write_folder(
    folder: Path,
    cfg: ModelConfig,
    params: Mapping[str, np.ndarray | jax.Array],
    *,
    extra_config: Mapping[str, Any] | None = None,
) -> None:
    """Writes a folder that transformers' `AutoModelForCausalLM.from_pretrained` loads.

    Args:
      folder: created if missing; its config.json and model.safetensors are replaced, each of them
        whole or not at all.
      cfg: the model; its `model_type` decides the format.
      params: all of the model's parameters, as floats.
      extra_config: further keys for config.json that do not change the model, such as `eos_token_id`
        (token ids are null without).

    Raises:
      ConfigError: the model_type cannot express `cfg`, or an extra key is not inert.
      CheckpointError: parameters are missing, unknown, of a wrong shape or not floats.
    """
    folder, family, specs = Path(folder), architecture(cfg.model_type), param_specs(cfg)
    config = {**family.config_to_hf(cfg), **_NO_TOKEN_IDS, **(extra_config or {})}
    if family.config_from_hf(config) != cfg:
        raise ConfigError(f"extra_config {extra_config!r} changes the model; pass inert keys alone")
    check_parameters({name: spec.shape for name, spec in specs.items()}, params)
    config["torch_dtype"] = np.dtype(params["embed.tokens"].dtype).name
    tensors: Tensors = {}
    for tensor in family.tensors(cfg):
        # 1 + w minus 1 keeps all bits of w only in float32.
        types = [np.float32] if tensor.plus_one else [params[name].dtype for name in tensor.params]
        tensors[_stored_name(tensor, family.prefixes[0])] = (
            np.result_type(*types),
            tensor.shape(specs),
            lambda t=tensor: t.write(params, specs),
        )
    write_checkpoint(folder / CONFIG_FILE, config, folder / WEIGHTS_FILE, tensors)


def _read_json_config(folder: Path) -> dict[str, Any]:
    return read_json(Path(folder) / CONFIG_FILE, "give the path of a Hugging Face model folder")


def _has_other_head(folder: Path, cfg: ModelConfig) -> bool:
    """Whether a folder's weights have a head of their own, though its config ties it to the embedding."""
    if not cfg.tied_head or not has_weights(folder):
        return False
    weights, family = SafetensorsFolder(folder), architecture(cfg.model_type)
    embed, head = (
        next(tensor for tensor in family.top_tensors if name in tensor.params)
        for name in ("embed.tokens", "head")
    )
    prefixes = _prefixes(family, weights.names(), embed, _wrapper(folder))
    stored = [_stored_name(tensor, *prefixes) for tensor in (embed, head)]
    return weights.names() >= set(stored) and not weights.equal(*stored)


def _wrapper(folder: Path) -> Wrapper | None:
    return WRAPPERS.get(str(_read_json_config(folder).get("model_type")))


def _prefixes(
    family: Architecture, names: Collection[str], first: Tensor, wrapper: Wrapper | None
) -> tuple[str, str]:
    """Prefixes of the body and of the head. One pair for the whole folder, found by the first tensor (the
    embedding). If none fits, the usual one, for a message."""
    layouts = [(each, "") for each in family.prefixes] if wrapper is None else list(wrapper.layouts)
    return next((each for each in layouts if each[0] + first.name in names), layouts[0])


def _check_copies(
    family: Architecture,
    cfg: ModelConfig,
    weights: SafetensorsFolder,
    prefix: str,
    located: Mapping[str, Tensor],
) -> set[str]:
    """The names of tensors that repeat a parameter, or values computed here; raises CheckpointError if they
    differ."""
    found = set()
    for name in weights.names() - located.keys():
        for short, param in family.copies.items():
            if name == prefix + short:
                own = next(stored for stored, tensor in located.items() if param in tensor.params)
                found.add(name)
                if not weights.equal(name, own):
                    raise _differs(
                        weights, name, f"{own}, which it has to repeat in a {cfg.model_type} model"
                    )
        for short, values in family.computed.items():
            if name == prefix + short:
                found.add(name)
                if not weights.close_to(name, values(cfg)):
                    raise _differs(weights, name, f"the values that a {cfg.model_type} model computes")
    return found


def _differs(weights: SafetensorsFolder, name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"tensor {name} of {weights.folder} differs from {what}; models that have both are not supported"
    )


def _locate(
    family: Architecture,
    cfg: ModelConfig,
    weights: SafetensorsFolder,
    wrapper: Wrapper | None,
    quantization: Quantization | None,
) -> dict[str, Tensor]:
    """The stored name of every tensor of the model; raises CheckpointError for other tensors."""
    names = weights.names()
    tensors = family.tensors(cfg, stacked=family.stacks(names))
    prefix, head = _prefixes(family, names, tensors[0], wrapper)
    located = {_stored_name(tensor, prefix, head): tensor for tensor in tensors}
    if family.head_or_embedding:
        located = {
            stored: each for stored, each in located.items() if each.params != ("head",) or stored in names
        }
    packed = {each: _packed(each, quantization, weights) for each in located}
    if missing := {each for each in located if not packed[each]} - names:
        raise CheckpointError(
            f"{weights.folder} lacks {some(missing)} of a {cfg.model_type} model with this config; the "
            "weights belong to another config, or are incomplete"
        )
    # `read_config` has compared it with the embedding.
    tied = {
        _stored_name(tensor, prefix, head)
        for tensor in family.top_tensors
        if "head" in tensor.params and cfg.tied_head
    }
    skipped = () if wrapper is None else wrapper.skipped
    unread = {prefix + name for name in family.unread(cfg)}
    copies = _check_copies(family, cfg, weights, prefix, located)
    extra = {
        name
        for name in names - located.keys() - tied - unread - copies - set().union(*packed.values())
        if not name.endswith(family.buffers) and not name.startswith(skipped)
    }
    if extra:
        raise CheckpointError(
            f"{weights.folder} holds {some(extra)}, which a {cfg.model_type} model with this config does "
            "not have; the weights belong to another config"
        )
    return located


def _packed(stored: str, quantization: Quantization | None, weights: SafetensorsFolder) -> set[str]:
    """The tensors of the quantized matrix `stored`; empty if it is stored as floats."""
    stem = None if quantization is None else quantization.stem(stored)
    return set() if quantization is None or stem is None else quantization.stored(stem, weights.names())


def _read_packed(
    weights: SafetensorsFolder,
    quantization: Quantization,
    stored: str,
    tensor: Tensor,
    name: str,
    specs: Mapping[str, ParamSpec],
) -> QArray:
    """One parameter of a quantized matrix."""
    spec, stem = specs[name], quantization.stem(stored)
    if tensor.stacked:
        # As floats they are `[E, in, out]`.
        tensor = dataclasses.replace(tensor, transposed=not tensor.transposed)
    shape, ranks = tensor.shape(specs), 3 if quantization.experts else 2
    if stem is None or len(shape) != ranks or tensor.skip_rows or spec.role in ("embed", "vector"):
        raise CheckpointError(f"{stored} of {weights.folder} is quantized, where floats are expected")
    found = quantization.read(weights, stem, shape)
    axis = -2 if spec.role == "from_units" else -1
    if isinstance(found, Levels):
        packed = packed_parameter(found, tensor, name, specs)
        if packed is not None:
            return packed
        found = found.values()
    # In groups of our own: about 0.7 % of error.
    return quantize(tensor.read(found, name, specs), bits=8, axis=axis, group=GROUP)


def _by_rows(weights: SafetensorsFolder, stored: str, skipped: int, shape: tuple[int, ...]) -> RowParts:
    """A matrix with unconverted rows, after some skipped ones."""
    places = [(skipped + first, skipped + last) for first, last in part_rows(*shape)]
    return RowParts(shape, (weights.read(stored, lambda rows, at=at: rows[slice(*at)]) for at in places))


def _stacked(parts: list[np.ndarray | QArray]) -> np.ndarray | QArray:
    """One array of those of experts."""
    alike = {
        (each.bits, each.group, each.minimum is None) if isinstance(each, QArray) else None for each in parts
    }
    if len(alike) > 1 or None in alike:
        return np.stack([_widened(each) if isinstance(each, QArray) else each for each in parts])
    return jax.tree.map(lambda *each: np.stack(each), *parts)


def _floats(value: np.ndarray | QArray | RowParts) -> np.ndarray:
    assert not isinstance(value, RowParts)
    return _widened(value) if isinstance(value, QArray) else value


def _widened(weight: QArray) -> np.ndarray:
    return np.asarray(dequantize(jax.tree.map(jnp.asarray, weight), jnp.float32))


def _stored_name(tensor: Tensor, prefix: str, head: str = "") -> str:
    """The checkpoint's name of a tensor, by the prefixes of the body and of the head."""
    return (prefix if tensor.in_body else head) + tensor.name
