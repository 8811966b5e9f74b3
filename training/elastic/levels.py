"""Represents levels in training: the whole model's parameters, and counts of the units that a level uses.

Unused units add nothing to their layer's outputs, so losses and gradients are the sub-model's, and one
compiled step serves all levels: a level is an array of counts. XLA computes unused units nevertheless, so a
step of any level is as slow as one of the whole model.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.elastic.ladder import Ladder, sub_config
from jaxllm.kernels.native_call import PARAMETER, counts_of
from jaxllm.models.lora import LoraConfig, adapter_shapes, init_adapter, parameters_of
from jaxllm.models.parameters import ENCODER, Params
from jaxllm.models.scanned_layers import STACKS, is_stacked, scan_runs, stacked

Counts = Mapping[str, Any]
# In a layer without units these add to the residual nevertheless.
_OUTPUTS = ("attn.o_bias", "ffn.down_bias", "shared.down")


def level_counts(cfg: ModelConfig, ladder: Ladder, level: int) -> dict[str, np.ndarray]:
    """Returns the units that a level uses: per layer `layers.{layer}.used_units` `[3]` int32, see
    `UsedUnits`; for an encoder-decoder those of both sides."""
    return {
        f"{lead}layers.{layer}.{PARAMETER}": own
        for lead, side in sides(sub_config(cfg, ladder, level))
        for layer, own in enumerate(_counts(side))
    }


def sides(cfg: ModelConfig) -> list[tuple[str, ModelConfig]]:
    """Lists the decoder, and the encoder if there is one, each with the prefix of its parameters' names."""
    return [("", cfg)] if cfg.encoder is None else [("", cfg), (ENCODER, cfg.encoder)]


def counts_of_levels(cfg: ModelConfig, ladder: Ladder, levels: tuple[int, ...]) -> dict[str, np.ndarray]:
    """`level_counts` of several levels, with a leading axis of levels."""
    each = [level_counts(cfg, ladder, level) for level in levels]
    return {name: np.stack([own[name] for own in each]) for name in each[0]} if each else {}


def at_level(params: Params, counts: Counts, cfg: ModelConfig) -> dict[str, Any]:
    """Returns parameters that compute a level; also inside a step.

    Args:
      params: float arrays of the whole model, units in order, equal layers in stacks or not.
      counts: counts of the level, with unstacked layers or stacked like `params`.
      cfg: config of the whole model.
    """
    own = stacked(counts, cfg) if is_stacked(params) and not is_stacked(counts) else counts
    return {**used_experts(params, own), **own}


def without_layer(cfg: ModelConfig, params: Params, layer: jax.Array | int) -> dict[str, Any]:
    """Returns the parameters with one layer that adds nothing, an int32 scalar; -1 for none. The layers of
    an encoder are counted after the decoder's."""
    found: dict[str, Any] = dict(params)
    first = 0
    for lead, side in sides(cfg):
        whole = _counts(side)
        for prefix, numbers in _rows(params, side).items():
            kept = first + np.asarray(numbers, np.int32) != jnp.asarray(layer, jnp.int32)
            prefix = lead + prefix
            found[prefix + PARAMETER] = jnp.where(kept[..., None], whole[np.asarray(numbers)], 0)
            for name in _OUTPUTS:
                if prefix + name in params:
                    value = jnp.asarray(params[prefix + name])
                    found[prefix + name] = value * _beside(kept, value).astype(value.dtype)
        first += side.layers
    return used_experts(found, found)


def used_experts(params: Params, counts: Counts) -> dict[str, Any]:
    """Returns parameters, or an adapter, in which unused neurons of experts add nothing: products of
    experts, unlike others, ignore counts. Both are in stacks, or neither is."""
    found: dict[str, Any] = dict(params)
    for name, value in params.items():
        prefix, is_down, part = name.partition("experts.down")
        if not is_down or part not in ("", ".left"):
            continue
        weight, neurons = jnp.asarray(value), jnp.asarray(counts[prefix + PARAMETER])[..., 1]
        axis = neurons.ndim + 1
        inside = jnp.arange(weight.shape[axis], dtype=jnp.int32) < neurons[..., None]
        shape = (*neurons.shape, 1, weight.shape[axis]) + (1,) * (weight.ndim - axis - 1)
        found[name] = jnp.where(inside.reshape(shape), weight, jnp.zeros((), weight.dtype))
    return found


def adapter_of_level(cfg: ModelConfig, part: ModelConfig, lora: LoraConfig, seed: int) -> dict[str, Any]:
    """Returns a new adapter of a level, in the shapes of the whole model: zero for units that the level
    lacks.

    Args:
      cfg: config of the whole model.
      part: config of the level.
      lora: config of the adapter.
      seed: seed of its random factors.
    """
    wide = {}
    for name, value in jax.device_get(init_adapter(part, lora, jax.random.key(seed))).items():
        parameter, _, side = name.rpartition(".")
        shape = adapter_shapes(cfg, parameter, lora.rank)[side == "right"]
        wide[name] = np.pad(value, [(0, more - own) for own, more in zip(value.shape, shape, strict=True)])
    return wide


def cut_adapter(part: ModelConfig, adapter: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """An adapter in the shapes of the whole model, cut to those of a level."""
    cut = {}
    for name in parameters_of(adapter):
        shapes = adapter_shapes(part, name, adapter[f"{name}.right"].shape[-2])
        for side, shape in zip(("left", "right"), shapes, strict=True):
            own = adapter[f"{name}.{side}"]
            cut[f"{name}.{side}"] = np.ascontiguousarray(own[tuple(map(slice, shape))])
    return cut


def _counts(cfg: ModelConfig) -> np.ndarray:
    """The units of each layer of one side, `[L, 3]` int32."""
    units = [cfg.units(layer) for layer in range(cfg.layers)]
    return counts_of([each.kv_heads for each in units], [each.neurons for each in units], 0)


def _rows(params: Params, cfg: ModelConfig) -> dict[str, Any]:
    """Prefixes of layers' parameters, and the numbers of their layers: of a stack `[n]`, else one."""
    if not is_stacked(params):
        return {f"layers.{layer}.": layer for layer in range(cfg.layers)}
    found: dict[str, Any] = {}
    for run in scan_runs(cfg):
        for like in range(run.first, run.first + run.period):
            numbers = [like + row * run.period for row in range(run.repeats)]
            stack = run.repeats > 1
            found[f"{STACKS if stack else 'layers.'}{like}."] = numbers if stack else like
    return found


def _beside(flags: jax.Array, value: jax.Array) -> jax.Array:
    """Reshapes one flag, or flags of rows `[n]`, to broadcast to `value`."""
    return flags.reshape(flags.shape + (1,) * (value.ndim - flags.ndim))
