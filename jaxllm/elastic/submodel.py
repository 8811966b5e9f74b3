"""Sub-models of a whole model's parameters in memory, of which no weight is copied.

Either as views, the beginnings of the whole model's buffers, with graphs of their own (`shared_sub_model`),
or as numbers of units beside the whole parameters, for graphs that serve all levels (`counted_sub_model`).
"""

from collections.abc import Callable, Mapping

import jax
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.elastic.ladder import is_unit_parameter
from jaxllm.errors import ConfigError
from jaxllm.kernels import native
from jaxllm.models.parameters import Params, param_specs
from jaxllm.quant import Adapted, BlockedArray, Weight, first_units, narrow, sliced, take_units
from jaxllm.used_units import PARAMETER, counts_of


def sub_model(params: Params, cfg: ModelConfig) -> dict[str, Weight]:
    """The parameters of a sub-model: of each whole parameter its first units.

    In a graph these are slices, or nothing at all for weights in blocks. `shared_sub_model` makes them
    outside of graphs.

    Args:
      params: of the whole model, with its units in order, or of a larger sub-model that has all of these
        units (not every larger level has, see `jaxllm.elastic.ladder`), or what `shared_sub_model` made of
        them.
      cfg: the sub-model.

    Raises:
      ConfigError: the parameters are of a sub-model that lacks some of the units.
    """
    if PARAMETER in params:
        # Counts say what is used of the whole.
        return dict(params)
    return part_of_sub_model({name: params[name] for name in param_specs(cfg)}, cfg)


def part_of_sub_model(params: Params, cfg: ModelConfig) -> dict[str, Weight]:
    """`sub_model` of some of the parameters: those of one layer, say."""
    if PARAMETER in params:
        return dict(params)
    specs = param_specs(cfg)
    return {name: _cut(sliced(each), name, specs[name].shape, take_units) for name, each in params.items()}


def shared_sub_model(params: Params, cfg: ModelConfig) -> dict[str, Weight]:
    """`sub_model` of parameters in memory that copies no weight.

    A slice outside of a graph is a copy, and on a CPU a slice in a graph is one, too. So on a CPU an array's
    beginning becomes an array of its own over the same memory; on other devices it is marked, for `sub_model`
    to slice in the graph. Rows of a mixture's experts are no beginning: their stack stays whole, and a graph
    cuts an expert where it takes it out, which for floats on a CPU is a copy, as it is at the whole model.
    """
    shapes = {name: spec.shape for name, spec in param_specs(cfg).items()}
    if jax.default_backend() != "cpu":
        return {name: _cut(params[name], name, shape, first_units) for name, shape in shapes.items()}
    device = jax.devices()[0]

    def shared(view: np.ndarray, like: jax.Array) -> jax.Array:
        return like if view.shape == like.shape else jax.device_put(view, device, may_alias=True)

    def beginning(weight: Weight, name: str) -> Weight:
        if tuple(weight.shape) == shapes[name]:
            return weight
        leaves = jax.tree.leaves(weight)
        cut = _cut(jax.tree.map(np.asarray, weight), name, shapes[name], take_units)
        views = [shared(*pair) for pair in zip(jax.tree.leaves(cut), leaves, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(cut), views)

    return {name: beginning(params[name], name) for name in shapes}


def can_be_counted(params: Params, cfg: ModelConfig) -> bool:
    """Whether one graph can serve all levels of a model at each one's own cost: on a CPU with native kernels,
    where all units are in blocks and none are in experts."""
    if cfg.experts or jax.default_backend() != "cpu" or not native.kernels().native:
        return False
    matrices = (
        params[name]
        for name, spec in param_specs(cfg).items()
        if is_unit_parameter(name) and spec.role != "vector"
    )
    stored = (weight.base if isinstance(weight, Adapted) else weight for weight in matrices)
    return all(isinstance(weight, BlockedArray) for weight in stored)


def counted_sub_model(params: Params, cfg: ModelConfig, *, rank: int) -> dict[str, Weight]:
    """A sub-model as the whole model's parameters and the numbers of units that it has.

    Args:
      params: of the whole model (see `can_be_counted`).
      cfg: the sub-model.
      rank: how many ranks of the parameters' adapters are used; those beyond hold zeros.
    """
    units = [cfg.units(layer) for layer in range(cfg.layers)]
    counts = counts_of([each.kv_heads for each in units], [each.neurons for each in units], rank)
    return {**params, PARAMETER: jax.device_put(counts)}


def whole_adapter(
    cfg: ModelConfig, adapter: Mapping[str, np.ndarray], names: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """A sub-model's adapter in the shapes of the whole model's, with zeros for units and ranks it lacks.

    Args:
      cfg: the whole model.
      adapter: see `jaxllm.lora`; empty for none.
      names: of all parameters to have an adapter for, the rank.
    """
    specs, whole = param_specs(cfg), {}
    for name, rank in names.items():
        shape = specs[name].shape
        left, right = np.zeros((*shape[:-1], rank), np.float32), np.zeros((rank, shape[-1]), np.float32)
        if f"{name}.left" in adapter:
            given = adapter[f"{name}.left"]
            left[tuple(map(slice, given.shape))] = given
            right[: given.shape[-1]] = adapter[f"{name}.right"]
        whole |= {f"{name}.left": left, f"{name}.right": right}
    return whole


def _cut(weight: Weight, name: str, shape: tuple[int, ...], take: Callable[[Weight, int], Weight]) -> Weight:
    if tuple(weight.shape) == shape or not is_unit_parameter(name):
        return weight
    stacked = ".experts." in name
    has, wanted = weight.shape[int(stacked)], shape[int(stacked)]
    if has < wanted:
        raise ConfigError(f"{name} has {has} units, the sub-model {wanted}: cut it from the whole model")
    return narrow(weight, wanted) if stacked else take(weight, wanted)
