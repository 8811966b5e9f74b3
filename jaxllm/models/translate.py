"""Translates configs and tensors of an architecture from and to Hugging Face's form.

A checkpoint tensor is one or more of our parameters (see `parameters.py`) as consecutive blocks of rows,
stored unchanged (`[rows, D]`) or transposed (`[D, rows]`). Nothing else differs between Hugging Face's
layouts and ours: heads and kv groups are reshapes of rows.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.config_parts import Fields, Part
from jaxllm.models.config_reader import ConfigReader, refuse_quantized
from jaxllm.models.parameters import ENCODER, ParamSpec, param_specs


class Sliceable(Protocol):
    """A stored tensor that can be read by slices: an array, or a lazy view of a file."""

    def __getitem__(self, index: Any, /) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One checkpoint tensor, and our parameters that are blocks of its rows.

    Attributes:
      name: name in the checkpoint. With `{expert}` in it, it names one tensor per expert, each of them
        one entry of the leading axis of its parameters.
      params: names of our parameters, in the order of their rows.
      transposed: whether rows are columns in the checkpoint.
      skip_rows: number of leading padding rows, which the model never reads.
      interleaved: whether the rows of each head of queries or keys are in the order of a rotary embedding
        of neighbours (2i, 2i+1), where ours rotates halves (i, i+H/2).
      by_head: whether the rows of each head are together: the first head's of all parameters, then the
        next's.
      depthwise: whether it is the kernel of a depthwise convolution, `[rows, 1, taps]`.
      plus_one: whether a norm's weight is stored as w and the model multiplies by 1 + w.
      stacked: whether it has all experts, as its leading axis.
      alternating: whether the rows of its parameters alternate.
      one_row: whether a vector is stored as a matrix of one row.
      gated: whether only models with, or without, a gate have it; None for both.
      in_body: False for a name without the checkpoint's prefix (the head).
      expert: number of the expert, once the name is filled in.
    """

    name: str
    params: tuple[str, ...]
    transposed: bool = False
    skip_rows: int = 0
    interleaved: bool = False
    by_head: bool = False
    depthwise: bool = False
    plus_one: bool = False
    stacked: bool = False
    alternating: bool = False
    one_row: bool = False
    gated: bool | None = None
    in_body: bool = True
    expert: int | None = None

    def shape(self, specs: Mapping[str, ParamSpec]) -> tuple[int, ...]:
        """Shape in the checkpoint, given our parameters' specs."""
        rows = self.skip_rows + sum(self._rows(name, specs) for name in self.params)
        lead = specs[self.params[0]].shape[:1] if self.stacked else ()
        if _is_vector(self.params[0]):
            return (1, rows) if self.one_row else (*lead, rows)
        width = specs[self.params[0]].shape[-1]
        if self.depthwise:
            return (rows, 1, width)
        return (*lead, width, rows) if self.transposed else (*lead, rows, width)

    def read(self, stored: Sliceable, param: str, specs: Mapping[str, ParamSpec]) -> np.ndarray:
        """Our parameter `param` (its entry for `expert`) from this tensor; no other rows are read."""
        start = self.skip_rows
        for name in self.params[: self.params.index(param)]:
            start += self._rows(name, specs)
        rows = slice(start, start + self._rows(param, specs))
        at, count = self.params.index(param), len(self.params)
        if self.stacked:
            whole = stored[:].swapaxes(-1, -2) if self.transposed else stored[:]
            own = whole[:, slice(at, None, count) if self.alternating else rows]
            return np.ascontiguousarray(own).reshape(specs[param].shape)
        if self.one_row:
            stored = stored[0:1].reshape(-1)
        if self.by_head:
            whole = stored[:]
            split = whole.reshape(-1, count, self._head_dim(specs), *whole.shape[1:])
            block = split[:, at].reshape(-1, *whole.shape[1:])
        else:
            block = stored[:, rows].T if self.transposed else stored[rows]
        if self.interleaved:
            block = swap_pairs(block, self._head_dim(specs), 2)
        block = np.ascontiguousarray(block).reshape(self._block_shape(param, specs))
        # In float32, because 1 + w in bfloat16 loses most bits of w.
        return block.astype(np.float32) + np.float32(1) if self.plus_one else block

    def write(self, params: Mapping[str, Any], specs: Mapping[str, ParamSpec]) -> np.ndarray:
        """The checkpoint tensor from our parameters: the inverse of `read`."""
        width = () if _is_vector(self.params[0]) else specs[self.params[0]].shape[-1:]
        parts = [params[name] if self.expert is None else params[name][self.expert] for name in self.params]
        if self.stacked:
            together = np.stack([np.asarray(part) for part in parts], 2 if self.alternating else 1)
            whole = together.reshape(len(together), -1, *width)
            return np.ascontiguousarray(whole.swapaxes(-1, -2) if self.transposed else whole)
        blocks = [np.asarray(part).reshape(-1, *width) for part in parts]
        if self.interleaved:
            head_dim = self._head_dim(specs)
            blocks = [swap_pairs(block, head_dim, head_dim // 2) for block in blocks]
        if self.plus_one:
            blocks = [block.astype(np.float32) - np.float32(1) for block in blocks]
        if self.skip_rows:
            blocks.insert(0, np.zeros((self.skip_rows, *width), blocks[0].dtype))
        if self.by_head:
            shape = (-1, self._head_dim(specs), *width)
            blocks = [np.stack([each.reshape(shape) for each in blocks], 1).reshape(-1, *width)]
        whole = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        whole = whole[None] if self.one_row else whole
        whole = whole[:, None] if self.depthwise else whole
        return np.ascontiguousarray(whole.T if self.transposed else whole)

    def _head_dim(self, specs: Mapping[str, ParamSpec]) -> int:
        return specs[self.params[0].rsplit(".", 1)[0] + ".k"].shape[1]

    def _block_shape(self, param: str, specs: Mapping[str, ParamSpec]) -> tuple[int, ...]:
        shape = specs[param].shape
        return shape[1:] if self.stacked or self.expert is not None else shape

    def _rows(self, param: str, specs: Mapping[str, ParamSpec]) -> int:
        shape = self._block_shape(param, specs)
        return math.prod(shape if _is_vector(param) else shape[:-1])


def tensors(names: Mapping[str, str], *, turned: bool = False, **options: Any) -> tuple[Tensor, ...]:
    """The tensors of linear layers and of norms, with their biases where a model has them.

    Args:
      names: names in the checkpoint -> our parameter (a norm's ends with "norm"), or several that are blocks
        of its rows, separated by spaces.
      turned: whether matrices are stored `[in, out]`, as GPT-2's are.
      options: further options of all these tensors.
    """
    found: list[Tensor] = []
    for name, params in names.items():
        norm = params.endswith("norm")
        weights, biases = (
            tuple(each + ending for each in params.split())
            for ending in ((".scale", ".bias") if norm else ("", "_bias"))
        )
        transposed = not norm and params.endswith((".o", ".down")) != turned
        found.append(Tensor(f"{name}.weight", weights, transposed=transposed, **options))
        found.append(Tensor(f"{name}.bias", biases, **options))
    return tuple(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """One Hugging Face `model_type` on the shared decoder.

    Attributes:
      model_type: name in config.json and in `ModelConfig.model_type`.
      parts: parts of config.json, in the order in which they are read.
      class_name: name of the Hugging Face class, for the key `architectures`.
      top_tensors: tensors outside of the layers.
      layer_tensors: tensors of one layer; names on both sides are relative to the layer. If experts have
        both stacked and separate tensors, a checkpoint has one or the other.
      layer_prefix: prefix of a layer's checkpoint names, with `{}` for its number.
      prefixes: possible prefixes of a checkpoint's names, the usual one first.
      inert_keys: keys of this architecture without effect on the logits.
      buffers: endings of checkpoint names that are not parameters, and that transformers does not read.
      copies: names, without the checkpoint's prefix, of tensors that repeat a parameter -> its name; stored
        ones must equal it.
      computed: names, without the prefix, of tensors whose values are computed here -> the values; stored
        ones must equal them.
      encoder_tensors: `layer_tensors` of the encoder of an encoder-decoder, its names relative to the layer.
      encoder_prefix: `layer_prefix` of the encoder.
      head_or_embedding: whether the head is the embedding if a checkpoint has no separate head.
      unread: names, without the checkpoint's prefix, of tensors that checkpoints of a model may have but
        are not read.
    """

    model_type: str
    class_name: str
    parts: tuple[Part, ...]
    top_tensors: tuple[Tensor, ...]
    layer_tensors: tuple[Tensor, ...]
    layer_prefix: str = "layers.{}."
    prefixes: tuple[str, ...] = ("model.", "")
    inert_keys: frozenset[str] = frozenset()
    buffers: tuple[str, ...] = ("rotary_emb.inv_freq",)
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    computed: Mapping[str, Callable[[ModelConfig], np.ndarray]] = dataclasses.field(default_factory=dict)
    encoder_tensors: tuple[Tensor, ...] = ()
    encoder_prefix: str = ""
    head_or_embedding: bool = False
    unread: Callable[[ModelConfig], Collection[str]] = lambda cfg: ()

    def config_from_hf(
        self, config: Mapping[str, Any], *, ignore_keys: Collection[str] = (), path: str = ""
    ) -> ModelConfig:
        """Translates a config.json.

        Args:
          ignore_keys: keys to ignore, see `ConfigReader`.
          path: prefix of the keys' names, if the object is a section of another.

        Raises:
          ConfigError: a key is unknown, or its value is unsupported or malformed.
        """
        reader = ConfigReader(config, path, ignore_keys=ignore_keys)
        reader.only("model_type", (self.model_type,), "this is the translation of one model_type")
        refuse_quantized(reader)
        reader.only("pruned_heads", (None, {}), "all heads of a layer have to be there")
        fields: Fields = {"model_type": self.model_type}
        for part in self.parts:
            fields |= part.read(reader, fields)
        translated = ModelConfig(**fields)
        reader.finish(inert_keys=self.inert_keys)
        return translated

    def config_to_hf(self, cfg: ModelConfig) -> dict[str, Any]:
        """A config.json from which `config_from_hf` reads `cfg`.

        Raises:
          ConfigError: configs of this model_type cannot express some field of `cfg`.
        """
        written: dict[str, Any] = {"architectures": [self.class_name], "model_type": self.model_type}
        for part in self.parts:
            written |= part.write(cfg)
        again = self.config_from_hf(written)
        lost = [
            f"{field.name}={getattr(cfg, field.name)!r}"
            for field in dataclasses.fields(cfg)
            if getattr(cfg, field.name) != getattr(again, field.name)
        ]
        if lost:
            raise ConfigError(
                f"a {self.model_type} checkpoint cannot express {', '.join(lost)}; change the config or "
                "its model_type"
            )
        return written

    def stacks(self, names: Collection[str]) -> bool:
        """Whether a checkpoint with such names has all experts of a layer in one tensor, if separate ones are
        possible."""
        either = any("{expert}" in tensor.name for tensor in self.layer_tensors)
        endings = tuple(tensor.name for tensor in self.layer_tensors if tensor.stacked)
        return either and any(name.endswith(endings) for name in names)

    def tensors(self, cfg: ModelConfig, *, stacked: bool = False) -> list[Tensor]:
        """All checkpoint tensors of a model, with full names without the checkpoint's prefix; for `stacked`
        see `stacks`."""
        specs = param_specs(cfg)
        either = any("{expert}" in tensor.name for tensor in self.layer_tensors)
        found = [tensor for tensor in self.top_tensors if tensor.params[0] in specs]
        sides = [(cfg, "", self.layer_prefix, self.layer_tensors)]
        if cfg.encoder is not None:
            sides.insert(0, (cfg.encoder, ENCODER, self.encoder_prefix, self.encoder_tensors))
        for side, lead, prefix, tensors in sides:
            for layer in range(side.layers):
                for tensor in tensors:
                    if "{expert}" in tensor.name if stacked else tensor.stacked and either:
                        continue
                    params = tuple(f"{lead}layers.{layer}.{name}" for name in tensor.params)
                    # `layer_tensors` lists all possible tensors; `specs` has those of this layer.
                    if params[0] not in specs or tensor.gated not in (None, side.gated_ffn):
                        continue
                    for expert in range(side.experts) if "{expert}" in tensor.name else (None,):
                        name = prefix.format(layer) + tensor.name.format(expert=expert)
                        found.append(dataclasses.replace(tensor, name=name, params=params, expert=expert))
        return found


def swap_pairs(rows: np.ndarray, head_dim: int, stride: int) -> np.ndarray:
    """Rows `[heads·H, ...]` with each head's row numbers (a, b), of which b counts to `stride`, as (b, a):
    with stride 2 neighbours become halves, and with H/2 halves neighbours."""
    split = rows.reshape(-1, head_dim // stride, stride, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def _is_vector(param: str) -> bool:
    return param.endswith(("bias", ".scale", ".sink_logits", "_log"))
