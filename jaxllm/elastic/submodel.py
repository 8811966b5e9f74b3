"""Sub-models as views: the parameters of a level are the beginnings of the whole model's buffers."""

from collections.abc import Callable

import jax
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.elastic.ladder import is_unit_parameter
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import Params, param_specs
from jaxllm.quant import Weight, first_units, narrow, sliced, take_units


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
    specs = param_specs(cfg)
    return {name: _cut(sliced(params[name]), name, spec.shape, take_units) for name, spec in specs.items()}


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


def _cut(weight: Weight, name: str, shape: tuple[int, ...], take: Callable[[Weight, int], Weight]) -> Weight:
    if tuple(weight.shape) == shape or not is_unit_parameter(name):
        return weight
    stacked = ".experts." in name
    has, wanted = weight.shape[int(stacked)], shape[int(stacked)]
    if has < wanted:
        raise ConfigError(f"{name} has {has} units, the sub-model {wanted}: cut it from the whole model")
    return narrow(weight, wanted) if stacked else take(weight, wanted)
