"""Sub-models as views: the parameters of a level are the beginnings of the whole model's buffers."""

import jax
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.elastic.ladder import is_unit_parameter
from jaxllm.models.parameters import Params, param_specs
from jaxllm.quant import Weight, narrow, take_units


def sub_model(params: Params, cfg: ModelConfig) -> dict[str, Weight]:
    """The parameters of a sub-model: of each whole parameter its first units.

    In a graph these are slices, or nothing at all for weights in blocks. `shared_sub_model` makes them
    outside of graphs.

    Args:
      params: of the whole model, with its units in order, or of a larger sub-model.
      cfg: the sub-model.
    """
    return {name: _first_units(params[name], name, spec.shape) for name, spec in param_specs(cfg).items()}


def shared_sub_model(params: Params, cfg: ModelConfig) -> dict[str, Weight]:
    """`sub_model` of parameters in memory that copies no weight on a CPU.

    XLA would copy a slice of an array, in a graph or outside; here an array's beginning becomes an array of
    its own over the same memory. On other devices parameters come whole, to be cut in the graph.
    """
    if jax.default_backend() != "cpu":
        return dict(params)
    specs, device = param_specs(cfg), jax.devices()[0]

    def shared(view: np.ndarray, like: jax.Array) -> jax.Array:
        return like if view.shape == like.shape else jax.device_put(view, device, may_alias=True)

    def first_units(weight: Weight, name: str) -> Weight:
        if tuple(weight.shape) == specs[name].shape:
            return weight
        views = jax.tree.map(np.asarray, weight)
        cut = _first_units(views, name, specs[name].shape)
        return jax.tree.unflatten(
            jax.tree.structure(cut),
            [shared(*pair) for pair in zip(jax.tree.leaves(cut), jax.tree.leaves(weight), strict=True)],
        )

    return {name: first_units(params[name], name) for name in specs}


def _first_units(weight: Weight, name: str, shape: tuple[int, ...]) -> Weight:
    if tuple(weight.shape) == shape or not is_unit_parameter(name):
        return weight
    return narrow(weight, shape[1]) if ".experts." in name else take_units(weight, shape[0])
