"""Stores the experts of a bundle separately, each with its own bit width, so that they can be read
individually.

An expert that already has its bit width stays byte for byte: with unchanged bit widths the answers are the
same. 8-bit experts of a nested bundle are nested, each plane in a separate segment.
"""

import os
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.bundle.layout import Part
from jaxllm.bundle.levels import read_ladder
from jaxllm.bundle.reader import Bundle
from jaxllm.bundle.writer import Stored, rewrite_bundle, stored_form, widths_by_layer
from jaxllm.errors import ConfigError
from jaxllm.models.features import room_refusal
from jaxllm.models.parameters import ParamSpec, expert_parameter, sparse_layers, specs_apart
from jaxllm.quant import BlockedArray, QArray, dequantize, from_blocks, to_blocks
from jaxllm.quant.parts import nested_entry

_FLOAT_BITS = {"float32": 32, "float16": 32, "bfloat16": 16}


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
    """Rewrites a bundle with its experts apart; all other weights stay byte for byte.

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
    if not cfg.experts:
        raise ConfigError(
            f"{source.path} is no mixture of experts: there are none to store apart; prepare it "
            "without --expert-bits"
        )
    if cfg.post_norms or read_ladder(source) is not None:
        kind = "with norms behind its blocks" if cfg.post_norms else "with levels"
        raise ConfigError(
            f"{source.path}: experts of a model {kind} cannot be stored apart; keep them together"
        )
    if (reason := room_refusal(cfg, "experts apart")) is not None:
        raise ConfigError(f"{source.path}: {reason}")
    widths, own = widths_by_layer(cfg, expert_bits), expert_widths(source)
    if np.any(expert_bits > own):
        raise ConfigError(
            f"{source.path} has experts of {int(own.min())} bits: wider ones would be larger, not better; "
            "give no larger width, or the Hugging Face folder"
        )
    own_of = dict(zip(widths, own.tolist(), strict=True))

    def stored(name: str, spec: ParamSpec, stacks: "_Stacks") -> Stored:
        if ".experts." not in name:
            return source.stored(name)
        layer, which = name.split("experts.")
        expert, part = which.split(".")
        at, stack = int(expert), f"{layer}experts.{part}"
        mine = source.stored(name) if source.layout.experts_apart else stacks.entry(stack, at)
        if widths[layer][at] == own_of[layer][at]:
            return mine
        floats = jnp.asarray(mine) if isinstance(mine, np.ndarray) else from_blocks(mine)
        value = np.asarray(dequantize(floats, jnp.dtype(jnp.float32)))
        return stored_form(value, spec, source.layout.weights, widths[layer][at])

    def weights() -> Iterator[tuple[str, Stored]]:
        stacks = _Stacks(source)
        for each, spec in specs_apart(cfg).items():
            yield each, stored(each, spec, stacks)

    rewrite_bundle(path, source, parts or {}, name=name, weights=weights())


class _Stacks:
    """Reads matrices of stacks of experts, with the stacks of one layer in memory at a time."""

    def __init__(self, source: Bundle) -> None:
        self._source = source
        self._columns: dict[str, np.ndarray | QArray | BlockedArray] = {}

    def entry(self, name: str, expert: int) -> Stored:
        """One matrix `[R, C]` as the stack stores it."""
        if name not in self._columns:
            layer = name.rsplit(".", 1)[0]
            self._columns = {each: of for each, of in self._columns.items() if each.startswith(layer)}
            stored = self._source.stored(name)
            if isinstance(stored, BlockedArray) and not stored.nested:
                stored = from_blocks(stored)
            self._columns[name] = stored
        column = self._columns[name]
        if isinstance(column, BlockedArray):
            return nested_entry(column, expert)
        one = jax.tree.map(lambda part: part[expert], column)
        return to_blocks(one) if isinstance(one, QArray) else one
