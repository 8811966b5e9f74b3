"""Makes sub-models of a whole model's parameters in memory, without copying weights.

A sub-model is either views of prefixes of the whole model's buffers, with buckets of its own
(`shared_sub_model`), or the whole parameters with counts of used units, for buckets that serve all levels
(`counted_sub_model`).
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.elastic.adapter_buffer import AdapterLocation
from jaxllm.elastic.ladder import is_unit_parameter
from jaxllm.errors import ConfigError
from jaxllm.kernels import native
from jaxllm.kernels.used_units import PARAMETER, counts_of
from jaxllm.models.parameters import Params, param_specs
from jaxllm.quant import AdaptedFromBuffer, BlockedArray, Weight, first_units, narrow, sliced, take_units


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CountedSubModel:
    """The parameters of a sub-model for a bucket that serves all levels of a model.

    Attributes:
      whole: parameters of the whole model.
      counts: `[L, 3]` int32, numbers of used units (see `jaxllm.kernels.used_units`).
      adapters: `[N]` float32, the buffer of the sub-model's adapters in the shapes of the whole model's; None
        without any.
      locations: of each parameter's adapter in the buffer.
    """

    whole: Params
    counts: jax.Array
    adapters: jax.Array | None
    locations: tuple[AdapterLocation, ...] = dataclasses.field(metadata={"static": True})

    @property
    def params(self) -> dict[str, Weight]:
        """The parameters as the functions of `jaxllm.models` take them."""
        params = {**self.whole, PARAMETER: self.counts}
        if self.adapters is not None:
            for name, offset, rank in self.locations:
                params[name] = AdaptedFromBuffer(self.whole[name], self.adapters, offset, rank)
        return params


def layer_part(params: CountedSubModel, layer: int, like: int) -> CountedSubModel:
    """One layer of a sub-model under the names of layer `like`, whose buckets it shares.

    Its part of the adapter buffer has the same layout as that of every layer of the same kind.
    """
    own, other = f"layers.{layer}.", f"layers.{like}."
    whole = {
        other + name.removeprefix(own): each for name, each in params.whole.items() if name.startswith(own)
    }
    counts = np.array(params.counts)
    counts[like] = counts[layer]
    locations = [each for each in params.locations if each.name.startswith(own)]
    if params.adapters is None or not locations:
        return CountedSubModel(whole, jax.device_put(counts), None, ())
    first, last = min(each.offset for each in locations), max(each.offset for each in locations)
    after = [each.offset for each in params.locations if each.offset > last]
    part = np.asarray(params.adapters)[first : min(after, default=None)]
    moved = tuple(
        each._replace(name=other + each.name.removeprefix(own), offset=each.offset - first)
        for each in locations
    )
    return CountedSubModel(
        whole, jax.device_put(counts), jax.device_put(part, jax.devices()[0], may_alias=True), moved
    )


def whole_params(params: Params | CountedSubModel) -> Params:
    """The whole model's parameters of a `CountedSubModel`; other parameters unchanged."""
    return params.whole if isinstance(params, CountedSubModel) else params


def sub_model(params: Params | CountedSubModel, cfg: ModelConfig) -> dict[str, Weight]:
    """The parameters of a sub-model: the first units of each parameter.

    Call it within a compiled step: weights in blocks are used in place, others are sliced. `shared_sub_model`
    makes the parameters outside of one.

    Args:
      params: of the whole model, with its units in order; or of a larger sub-model with all of these units
        (not every larger level has them, see `jaxllm.elastic.ladder`); or the result of `shared_sub_model` or
        `counted_sub_model`.
      cfg: the sub-model.

    Raises:
      ConfigError: the parameters are those of a sub-model that lacks some of the units.
    """
    if isinstance(params, CountedSubModel):
        return params.params
    return part_of_sub_model({name: params[name] for name in param_specs(cfg)}, cfg)


def part_of_sub_model(params: Params | CountedSubModel, cfg: ModelConfig) -> dict[str, Weight]:
    """`sub_model` of some of the parameters, such as those of one layer."""
    if isinstance(params, CountedSubModel):
        return params.params
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


def can_be_counted(params: Params, cfg: ModelConfig) -> bool:
    """Whether one bucket can serve all levels of a model, each at its own cost: on a CPU with native kernels,
    if all units are in blocks and none are in experts."""
    if cfg.experts or jax.default_backend() != "cpu" or not native.kernels().native:
        return False
    return all(
        isinstance(params[name], BlockedArray)
        for name, spec in param_specs(cfg).items()
        if is_unit_parameter(name) and spec.role != "vector"
    )


def counted_sub_model(
    params: Params,
    cfg: ModelConfig,
    *,
    locations: tuple[AdapterLocation, ...] = (),
    adapters: np.ndarray | None = None,
    rank: int = 0,
) -> CountedSubModel:
    """A sub-model as the whole model's parameters and counts of its units.

    Args:
      params: of the whole model (see `can_be_counted`).
      cfg: the sub-model.
      locations: of adapters, the same for all sub-models that share buckets.
      adapters: the buffer of adapters, if there are any (see `fill_buffer`).
      rank: how many ranks of adapters are used; the others are zero.
    """
    units = [cfg.units(layer) for layer in range(cfg.layers)]
    counts = counts_of([each.kv_heads for each in units], [each.neurons for each in units], rank)
    device = jax.devices()[0]
    buffer = None if adapters is None else jax.device_put(adapters, device, may_alias=True)
    return CountedSubModel(params, jax.device_put(counts), buffer, locations)


def _cut(weight: Weight, name: str, shape: tuple[int, ...], take: Callable[[Weight, int], Weight]) -> Weight:
    if tuple(weight.shape) == shape or not is_unit_parameter(name):
        return weight
    stacked = ".experts." in name
    has, wanted = weight.shape[int(stacked)], shape[int(stacked)]
    if has < wanted:
        raise ConfigError(f"{name} has {has} units, the sub-model {wanted}: cut it from the whole model")
    return narrow(weight, wanted) if stacked else take(weight, wanted)
