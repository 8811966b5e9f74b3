"""Makes sub-models of a whole model's parameters in memory, without copying weights.

A sub-model is either views of prefixes of the whole model's buffers, with buckets of its own
(`shared_sub_model`), or the whole model's buffers by address with counts of used units, for buckets that
serve all levels (`addressed_params`).
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.elastic.adapters_by_address import factors_of
from jaxllm.elastic.ladder import is_unit_parameter
from jaxllm.errors import ConfigError
from jaxllm.kernels import native
from jaxllm.kernels.used_units import PARAMETER, counts_of
from jaxllm.models.layer_stack import STACK, addressable, stack_by_address
from jaxllm.models.lora import Adapter
from jaxllm.models.parameters import Params, param_specs
from jaxllm.quant import Adapted, BlockedArray, Weight, first_units, narrow, sliced, take_units


def sub_model(params: Params, cfg: ModelConfig) -> dict[str, Weight]:
    """The parameters of a sub-model: the first units of each parameter.

    Call it within a compiled step: weights in blocks are used in place, others are sliced. `shared_sub_model`
    makes the parameters outside of one.

    Args:
      params: of the whole model, with its units in order; or of a larger sub-model with all of these units
        (not every larger level has them, see `jaxllm.elastic.ladder`); or the result of `shared_sub_model` or
        `addressed_params`, which is returned as it is.
      cfg: the sub-model.

    Raises:
      ConfigError: the parameters are those of a sub-model that lacks some of the units.
    """
    if STACK in params:
        return dict(params)
    return part_of_sub_model({name: params[name] for name in param_specs(cfg)}, cfg)


def part_of_sub_model(params: Params, cfg: ModelConfig) -> dict[str, Weight]:
    """`sub_model` of some of the parameters, such as those of one layer."""
    if STACK in params:
        return dict(params)
    specs = param_specs(cfg)
    return {name: _cut(sliced(each), name, specs[name].shape, take_units) for name, each in params.items()}


def shared_sub_model(params: Params, cfg: ModelConfig) -> dict[str, Weight]:
    """`sub_model` of parameters in memory, outside of a compiled step, without copying weights.

    A slice outside of a compiled step is a copy, and on a CPU a slice inside of one is a copy too. So on a
    CPU the prefix of an array becomes an array of its own over the same memory; on other devices it is
    marked, and `sub_model` slices it in the step. Rows of a mixture's experts are no prefix: their stack
    stays whole, and a step cuts an expert when it takes it, which for floats on a CPU is a copy, as it is for
    the whole model.
    """
    return shared_part({name: params[name] for name in param_specs(cfg)}, cfg)


def shared_part(params: Params, cfg: ModelConfig) -> dict[str, Weight]:
    """`shared_sub_model` of some of the parameters, such as those of one layer."""
    specs = param_specs(cfg)
    shapes = {name: specs[name].shape for name in params}
    if jax.default_backend() != "cpu":
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


def can_be_addressed(params: Params, cfg: ModelConfig) -> bool:
    """Whether native kernels read the layers of a model by address: on a CPU, if all matrices are in
    blocks."""
    if jax.default_backend() != "cpu" or not native.kernels().native:
        return False
    vectors = [_within(name) for name, spec in param_specs(cfg).items() if spec.role == "vector"]
    return all(addressable(layer, vectors) for layer in layers_of(params, cfg))


def can_be_counted(params: Params, cfg: ModelConfig) -> bool:
    """Whether one bucket can serve all levels of a model, each at its own cost: by address, if no units are in
    experts."""
    return not cfg.experts and can_be_addressed(params, cfg)


def addressed_params(
    params: Params,
    cfg: ModelConfig,
    *,
    level: ModelConfig | None = None,
    adapters: Sequence[tuple[Adapter, float]] = (),
) -> dict[str, Weight]:
    """A model's parameters with its layers by address (see `jaxllm.models.layer_stack`).

    Args:
      params: of the whole model (see `can_be_addressed`).
      cfg: the whole model.
      level: the sub-model, for buckets that serve all levels; None without levels.
      adapters: (adapter, scaling) pairs, of the whole model or the sub-model, which are added up. Parameters
        of any rank, or without an adapter, have one form, so that they share buckets.
    """
    layers = layers_of(params, cfg)
    if level is not None:
        units = [level.units(layer) for layer in range(cfg.layers)]
        counts = counts_of([each.kv_heads for each in units], [each.neurons for each in units])
        for layer, own in zip(layers, counts, strict=True):
            layer[PARAMETER] = own  # pyright: ignore[reportArgumentType]: of the host
    for number, layer in enumerate(layers):
        for name, weight in layer.items():
            if isinstance(weight, BlockedArray):
                left, right = factors_of(f"layers.{number}.{name}", weight.shape, adapters)
                layer[name] = Adapted(weight, left, right)  # pyright: ignore[reportArgumentType]: of the host
    kinds = [layer_kind(cfg, layer) for layer in range(cfg.layers)]
    outer = {name: each for name, each in params.items() if not name.startswith("layers.")}
    return {**outer, STACK: stack_by_address(layers, kinds)}  # pyright: ignore[reportReturnType]


def layer_kind(cfg: ModelConfig, layer: int) -> tuple[object, ...]:
    """What tells layers of a model from each other, besides the forms of their parameters."""
    return cfg.units(layer), cfg.attention_windows[layer], cfg.layer_rope(layer), cfg.is_sparse(layer)


def layers_of(params: Params, cfg: ModelConfig) -> list[dict[str, Weight]]:
    """Per layer, its parameters by their names within it."""
    layers: list[dict[str, Weight]] = [{} for _ in range(cfg.layers)]
    for name, each in params.items():
        if name.startswith("layers."):
            layers[int(name.split(".", 2)[1])][_within(name)] = each
    return layers


def _within(name: str) -> str:
    """A parameter's name within its layer."""
    return name.split(".", 2)[-1]


def _cut(weight: Weight, name: str, shape: tuple[int, ...], take: Callable[[Weight, int], Weight]) -> Weight:
    if tuple(weight.shape) == shape or not is_unit_parameter(name):
        return weight
    stacked = ".experts." in name
    has, wanted = weight.shape[int(stacked)], shape[int(stacked)]
    if has < wanted:
        raise ConfigError(f"{name} has {has} units, the sub-model {wanted}: cut it from the whole model")
    return narrow(weight, wanted) if stacked else take(weight, wanted)
