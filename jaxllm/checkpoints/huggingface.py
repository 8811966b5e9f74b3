"""Reads and writes Hugging Face model folders: config.json and safetensors, as our config and parameters.

Only data is read, never a folder's Python files or pickles, and one parameter at a time, so that a model
larger than memory can be converted. Tokenizers are read by `tokenizer_folder.py`.
"""

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.checkpoints.quantization import GROUP, Levels, Quantization, packed_parameter, read_quantization
from jaxllm.checkpoints.quantization import KEY as QUANTIZATION_KEY
from jaxllm.checkpoints.safetensors_folder import (
    WEIGHTS_FILE,
    SafetensorsFolder,
    Tensors,
    check_parameters,
    has_weights,
    write_checkpoint,
)
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files.input_files import read_json
from jaxllm.formats import WeightFormat
from jaxllm.models.architectures import WRAPPERS, architecture, read_text_config
from jaxllm.models.parameters import param_specs
from jaxllm.models.translate import Architecture, Tensor
from jaxllm.quant import QArray, as_floats, quantize
from jaxllm.quant.weights import RowParts, part_rows
from jaxllm.text.tokenizer_files import TokenizerFiles

CONFIG_FILE = "config.json"

# Written explicitly, because transformers' defaults are the ids of the family's first model, which may be
# past the end of a small vocabulary.
_NO_TOKEN_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
_OWN_FORMAT: dict[str, WeightFormat] = {"float32": "f32", "float16": "f32", "bfloat16": "bf16"}


class Checkpoint:
    """A model folder. Its config.json is read once, its weights are opened when they are first needed.

    Attributes:
      config: the JSON object of its config.json.
      ignore_keys: keys of the config to ignore, see `jaxllm.models.config_reader.ConfigReader`.
    """

    def __init__(
        self, folder: Path, *, ignore_keys: Collection[str] = (), cfg: ModelConfig | None = None
    ) -> None:
        """Reads the config; `cfg` is the model, if it was read before.

        Raises:
          CheckpointError: config.json is missing or is not a JSON object.
        """
        self.folder, self.ignore_keys = Path(folder), ignore_keys
        self.config = read_json(self.folder / CONFIG_FILE, "give the path of a Hugging Face model folder")
        if cfg is not None:
            self.cfg = cfg

    @functools.cached_property
    def cfg(self) -> ModelConfig:
        """The model; for a multimodal one its text model.

        If the config ties the head to the embedding, but the folder has a separate head, the model has that
        one, as in transformers.

        Raises:
          CheckpointError: the weights of a model with a tied head cannot be opened.
          ConfigError: the model_type is not supported, or a key is unknown, malformed or not supported.
        """
        read_quantization(self.config, ignore_keys=self.ignore_keys)
        plain = {key: value for key, value in self.config.items() if key != QUANTIZATION_KEY}
        cfg = read_text_config(plain, ignore_keys=self.ignore_keys)
        return dataclasses.replace(cfg, tied_head=False) if self._has_other_head(cfg) else cfg

    @functools.cached_property
    def quantization(self) -> Quantization | None:
        """The quantization of the weights; None for floats. Unknown keys are refused by `cfg`.

        Raises:
          ConfigError: see `cfg`.
        """
        return read_quantization(self.config, ignore_keys=None)

    @functools.cached_property
    def weights(self) -> SafetensorsFolder:
        """The tensors of the folder; raises CheckpointError, see `SafetensorsFolder`."""
        return SafetensorsFolder(self.folder)

    @functools.cached_property
    def tokenizer(self) -> TokenizerFiles:
        """The tokenizer of the folder; raises CheckpointError, see `read_tokenizer`."""
        return read_tokenizer(self.folder, self.config)

    @functools.cached_property
    def weight_format(self) -> WeightFormat:
        """The format that stores the first parameter without loss; for quantized weights the format of their
        matrices."""
        if self.quantization is not None:
            return self.quantization.form
        _, first = next(self.stored_params(by_rows=True))
        if isinstance(first, RowParts):
            first = next(iter(first.parts))
        assert isinstance(first, np.ndarray)  # it is not quantized
        return _OWN_FORMAT[first.dtype.name]

    def params(self) -> Iterator[tuple[str, np.ndarray]]:
        """`stored_params`, with quantized weights dequantized to float32."""

        def plain(value: Any) -> np.ndarray:
            return as_floats(value) if isinstance(value, QArray) else value

        return ((name, plain(value)) for name, value in self.stored_params())

    def stored_params(self, *, by_rows: bool = False) -> Iterator[tuple[str, np.ndarray | QArray | RowParts]]:
        """Yields our parameters from the folder's weights, lazily and in the order of `param_specs(cfg)`.

        Names, shapes and types of all tensors are checked by this call, before anything is yielded.

        Args:
          by_rows: whether large embeddings and heads are `RowParts`, which must be consumed before the next
            parameter.

        Returns:
          An iterator over (name, array) in the stored type: float32, float16 or bfloat16 (ml_dtypes), or
          quantized weights; norm weights that are stored as w and used as 1 + w come as 1 + w in float32.

        Raises:
          CheckpointError: weights are missing, truncated or corrupt, are not safetensors, have tensors of
            another model, or disagree with the config.
        """
        specs = param_specs(self.cfg)
        # Parameter -> its tensors: several, in order, if each is one expert.
        sources: dict[str, list[tuple[str, Tensor]]] = {name: [] for name in specs}
        for stored, tensor in self._locate().items():
            if not self._packed(stored):
                self.weights.check(stored, tensor.shape(specs))
            for name in tensor.params:
                sources[name].append((stored, tensor))
        if "head" in sources and not sources["head"]:
            ((stored, tensor),) = sources["embed.tokens"]
            sources["head"] = [(stored, dataclasses.replace(tensor, params=("head",)))]

        def read(stored: str, tensor: Tensor, name: str) -> np.ndarray | QArray | RowParts:
            if self._packed(stored):
                return self._read_packed(stored, tensor, name)
            plain = Tensor(tensor.name, (name,), skip_rows=tensor.skip_rows, in_body=tensor.in_body)
            if by_rows and specs[name].role == "embed" and tensor == plain:
                shape, skipped, rows = specs[name].shape, tensor.skip_rows, self.weights.read
                places = [slice(skipped + first, skipped + last) for first, last in part_rows(*shape)]
                return RowParts(shape, (rows(stored, lambda each, at=at: each[at]) for at in places))
            return self.weights.read(stored, lambda rows: tensor.read(rows, name, specs))

        def load() -> Iterator[tuple[str, np.ndarray | QArray | RowParts]]:
            for name in specs:
                parts = [read(stored, tensor, name) for stored, tensor in sources[name]]
                experts = [each for each in parts if not isinstance(each, RowParts)]
                yield name, parts[0] if sources[name][0][1].expert is None else _stacked(experts)

        return load()

    def _has_other_head(self, cfg: ModelConfig) -> bool:
        """Whether the weights have a separate head, though the config ties it to the embedding."""
        if not cfg.tied_head or not has_weights(self.folder):
            return False
        family = architecture(cfg.model_type)
        embed, head = (
            next(tensor for tensor in family.top_tensors if name in tensor.params)
            for name in ("embed.tokens", "head")
        )
        prefixes = self._prefixes(family, embed)
        stored = [_stored_name(tensor, *prefixes) for tensor in (embed, head)]
        return self.weights.names() >= set(stored) and not self.weights.equal(*stored)

    def _prefixes(self, family: Architecture, first: Tensor) -> tuple[str, str]:
        """Prefixes of the body and of the head. One pair for the whole folder, found by the first tensor (the
        embedding). If none fits, the usual one, for a message."""
        wrapper, names = WRAPPERS.get(str(self.config.get("model_type"))), self.weights.names()
        layouts = [(each, "") for each in family.prefixes] if wrapper is None else list(wrapper.layouts)
        return next((each for each in layouts if each[0] + first.name in names), layouts[0])

    def _locate(self) -> dict[str, Tensor]:
        """The stored name of every tensor of the model; raises CheckpointError for other tensors."""
        family, names = architecture(self.cfg.model_type), self.weights.names()
        tensors = family.tensors(self.cfg, stacked=family.stacks(names))
        prefix, head = self._prefixes(family, tensors[0])
        located = {_stored_name(tensor, prefix, head): tensor for tensor in tensors}
        if family.head_or_embedding:
            located = {
                stored: each
                for stored, each in located.items()
                if each.params != ("head",) or stored in names
            }
        packed = {each: self._packed(each) for each in located}
        kind = f"a {self.cfg.model_type} model"
        self.weights.require_complete({each for each in located if not packed[each]} - names, (), kind)
        # `cfg` has compared it with the embedding.
        tied = {
            _stored_name(tensor, prefix, head)
            for tensor in family.top_tensors
            if "head" in tensor.params and self.cfg.tied_head
        }
        wrapper = WRAPPERS.get(str(self.config.get("model_type")))
        skipped = () if wrapper is None else wrapper.skipped
        unread = {prefix + name for name in family.unread(self.cfg)}
        copies = self._check_copies(family, prefix, located)
        extra = {
            name
            for name in names - located.keys() - tied - unread - copies - set().union(*packed.values())
            if not name.endswith(family.buffers) and not name.startswith(skipped)
        }
        self.weights.require_complete((), extra, kind)
        return located

    def _check_copies(self, family: Architecture, prefix: str, located: Mapping[str, Tensor]) -> set[str]:
        """The names of tensors that repeat a parameter, or values computed here; raises CheckpointError if
        they differ."""
        found, model_type = set(), self.cfg.model_type
        for name in self.weights.names() - located.keys():
            param = family.copies.get(name.removeprefix(prefix)) if name.startswith(prefix) else None
            values = family.computed.get(name.removeprefix(prefix)) if name.startswith(prefix) else None
            if param is not None:
                own = next(stored for stored, tensor in located.items() if param in tensor.params)
                same = self.weights.equal(name, own)
                what = f"{own}, which it has to repeat in a {model_type} model"
            elif values is not None:
                same = self.weights.close_to(name, values(self.cfg))
                what = f"the values that a {model_type} model computes"
            else:
                continue
            if not same:
                raise CheckpointError(
                    f"tensor {name} of {self.folder} differs from {what}; models that have both are not "
                    "supported"
                )
            found.add(name)
        return found

    def _packed(self, stored: str) -> set[str]:
        """The tensors of the quantized matrix `stored`; empty if it is stored as floats."""
        stem = None if self.quantization is None else self.quantization.stem(stored)
        if self.quantization is None or stem is None:
            return set()
        return self.quantization.stored(stem, self.weights.names())

    def _read_packed(self, stored: str, tensor: Tensor, name: str) -> QArray:
        quantization, specs = self.quantization, param_specs(self.cfg)
        assert quantization is not None
        spec, stem = specs[name], quantization.stem(stored)
        if tensor.stacked:
            # As floats they are `[E, in, out]`.
            tensor = dataclasses.replace(tensor, transposed=not tensor.transposed)
        shape, ranks = tensor.shape(specs), 3 if quantization.experts else 2
        if stem is None or len(shape) != ranks or tensor.skip_rows or spec.role in ("embed", "vector"):
            raise CheckpointError(f"{stored} of {self.folder} is quantized, where floats are expected")
        found = quantization.read(self.weights, stem, shape)
        if isinstance(found, Levels):
            packed = packed_parameter(found, tensor, name, specs)
            if packed is not None:
                return packed
            found = found.values()
        # In groups of our own: about 0.7 % of error.
        axis = -2 if spec.role == "from_units" else -1
        return quantize(tensor.read(found, name, specs), bits=8, axis=axis, group=GROUP)


def read_config(folder: Path) -> ModelConfig:
    """The model of a folder: `Checkpoint.cfg`, for callers that read nothing else.

    Raises:
      CheckpointError, ConfigError: see `Checkpoint`.
    """
    return Checkpoint(folder).cfg


def read_params(folder: Path, cfg: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """`Checkpoint.params` of a folder whose config was read before, as floats; checked by this call.

    Raises:
      CheckpointError: see `Checkpoint.stored_params`.
    """
    return Checkpoint(folder, cfg=cfg).params()


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


def _stacked(parts: list[np.ndarray | QArray]) -> np.ndarray | QArray:
    alike = {
        (each.bits, each.group, each.minimum is None) if isinstance(each, QArray) else None for each in parts
    }
    if len(alike) > 1 or None in alike:
        return np.stack([as_floats(each) if isinstance(each, QArray) else each for each in parts])
    return jax.tree.map(lambda *each: np.stack(each), *parts)


def _stored_name(tensor: Tensor, prefix: str, head: str = "") -> str:
    """The checkpoint's name of a tensor, by the prefixes of the body and of the head."""
    return (prefix if tensor.in_body else head) + tensor.name
