"""Makes sub-models of a whole model's parameters in memory, without copying weights.

A sub-model is either views of prefixes of the whole model's buffers, with buckets of its own
(`shared_sub_model`), or the whole model's parameters with counts of used units, for buckets that serve all
levels (`counted_sub_model`).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.elastic.ladder import is_unit_parameter
from jaxllm.errors import ConfigError
from jaxllm.kernels.used_units import PARAMETER, counts_of
from jaxllm.models.layer_stack import STACK, can_be_addressed
from jaxllm.models.lora import Adapter, summed_factors
from jaxllm.models.parameters import ENCODER, Params, param_specs
from jaxllm.models.stacked_layers import are_entries
from jaxllm.quant import Adapted, Weight, first_units, narrow, sliced, take_units


def sub_model(params: Params, cfg: ModelConfig) -> dict[str, Weight]:
    """The parameters of a sub-model: the first units of each parameter.

    Call it within a compiled step: weights in blocks are used in place, others are sliced. `shared_sub_model`
    makes the parameters outside of one.

    Args:
      params: of the whole model, with its units in order; or of a larger sub-model with all of these units
        (not every larger level has them, see `jaxllm.elastic.ladder`); or the result of `shared_sub_model` or
        of `by_address`, which is returned as it is, as are parameters of an encoder-decoder, whose sub-models
        are counted.
      cfg: the sub-model.

    Raises:
      ConfigError: the parameters are those of a sub-model that lacks some of the units.
    """
    if STACK in params or cfg.encoder is not None:
        return dict(params)
    return part_of_sub_model({name: params[name] for name in param_specs(cfg)}, cfg)


def part_of_sub_model(params: Params, cfg: ModelConfig) -> dict[str, Weight]:
    """`sub_model` of some of the parameters, such as those of one layer."""
    if STACK in params or cfg.encoder is not None:
        return dict(params)
    specs = param_specs(cfg)
    return {name: _cut(sliced(each), name, specs[name].shape, take_units) for name, each in params.items()}


def shared_sub_model(params: Params, cfg: ModelConfig) -> dict[str, Weight]:
    """`sub_model` of parameters in memory, outside of a compiled step, without copying weights.

    A slice outside of a compiled step is a copy, and on a CPU a slice inside of one is a copy too. So on a
    CPU the prefix of an array becomes an array of its own over the same memory; on other devices, and of
    layers in stacks, it is marked, and the step slices it. Rows of a mixture's experts are no prefix: their
    stack stays whole, and a step cuts an expert when it takes it, which for floats on a CPU is a copy, as it
    is for the whole model.
    """
    return shared_part({name: params[name] for name in param_specs(cfg)}, cfg)


def shared_part(params: Params, cfg: ModelConfig) -> dict[str, Weight]:
    """`shared_sub_model` of some of the parameters, such as those of one layer."""
    specs = param_specs(cfg)
    shapes = {name: specs[name].shape for name in params}
    if jax.default_backend() != "cpu" or are_entries(params.values()):
        return {name: _cut(params[name], name, shape, first_units) for name, shape in shapes.items()}
    device = jax.devices()[0]

    def shared(view: np.ndarray, like: jax.Array) -> jax.Array:
        return like if view.shape == like.shape else jax.device_put(view, device, may_alias=True)

    def beginning(weight: Weight, name: str) -> Weight:
        if tuple(weight.shape) == shapes[name]:
            return weight
        leaves = jax.tree.leaves(weight)
        if any(isinstance(each, jax.ShapeDtypeStruct) for each in leaves):
            # Weights that are streamed are given by their shapes alone.
            return jax.eval_shape(lambda each: _cut(each, name, shapes[name], take_units), weight)
        cut = _cut(jax.tree.map(np.asarray, weight), name, shapes[name], take_units)
        views = [shared(*pair) for pair in zip(jax.tree.leaves(cut), leaves, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(cut), views)

    return {name: beginning(params[name], name) for name in shapes}


def can_be_counted(params: Params, cfg: ModelConfig) -> bool:
    """Whether one bucket can serve all levels of a model, each at its own cost: if its layers are read by
    address, and no units are in experts. Those of encoder-decoders are always counted: other weights than
    those in blocks then cost at every level what they cost at the whole model."""
    if cfg.encoder is not None:
        return True
    return not cfg.experts and can_be_addressed(params, cfg)


def counted_sub_model(
    params: Params,
    cfg: ModelConfig,
    level: ModelConfig | None = None,
    *,
    adapters: Sequence[tuple[Adapter, float]] = (),
    ranks: Mapping[str, int] | None = None,
) -> dict[str, Weight]:
    """A sub-model as the whole model's parameters and counts of its units.

    Args:
      params: of the whole model (see `can_be_addressed`).
      cfg: the whole model.
      level: the sub-model; None counts nothing.
      adapters: (adapter, scaling) pairs for matrices of layers, of the whole model or the sub-model; they are
        added up.
      ranks: of the adapters of parameters, at least the sums of the given ones: the same for all sub-models
        that share buckets. Ranks that are not given are zero, and not computed.
    """
    found = dict(params)
    for name, rank in (ranks or {}).items():
        base = params[name]
        left, right = summed_factors(name, base.shape, adapters, rank)
        found[name] = Adapted(base, left, right)  # pyright: ignore[reportArgumentType]: of the host
    if level is not None:
        rank = max((ranks or {}).values(), default=0) if adapters else 0
        for lead, side in (("", level), (ENCODER, level.encoder)):
            units = [] if side is None else [side.units(layer) for layer in range(side.layers)]
            counts = counts_of([each.kv_heads for each in units], [each.neurons for each in units], rank)
            for layer, own in enumerate(counts):
                found[f"{lead}layers.{layer}.{PARAMETER}"] = own  # pyright: ignore[reportArgumentType]: host
    return found


def with_weights(params: Params, weights: Params) -> dict[str, Weight]:
    """A `counted_sub_model` with other weights: its adapters and counts stay."""

    def rebased(name: str, weight: Weight) -> Weight:
        if isinstance(weight, Adapted):
            return dataclasses.replace(weight, base=rebased(name, weight.base))
        return weights.get(name, weight)

    return {name: rebased(name, each) for name, each in params.items()}


def _cut(weight: Weight, name: str, shape: tuple[int, ...], take: Callable[[Weight, int], Weight]) -> Weight:
    if tuple(weight.shape) == shape or not is_unit_parameter(name):
        return weight
    stacked = ".experts." in name
    has, wanted = weight.shape[int(stacked)], shape[int(stacked)]
    if has < wanted:
        raise ConfigError(f"{name} has {has} units, the sub-model {wanted}: cut it from the whole model")
    return narrow(weight, wanted) if stacked else take(weight, wanted)
