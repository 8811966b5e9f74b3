"""Sub-models of a whole model's parameters in memory, of which no weight is copied.

Either as views, the beginnings of the whole model's buffers, with graphs of their own (`shared_sub_model`),
or as numbers of units beside the whole parameters, for graphs that serve all levels (`counted_sub_model`).
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.elastic.adapter_buffer import AdapterPlace
from jaxllm.elastic.ladder import is_unit_parameter
from jaxllm.errors import ConfigError
from jaxllm.kernels import native
from jaxllm.models.parameters import Params, param_specs
from jaxllm.quant import AdaptedFromBuffer, BlockedArray, Weight, first_units, narrow, sliced, take_units
from jaxllm.used_units import PARAMETER, counts_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CountedSubModel:
    """A sub-model as a graph takes it that serves all sub-models of a model.

    Attributes:
      whole: parameters of the whole model.
      counts: `[L, 3]` int32, what of it is used (see `jaxllm.used_units`).
      adapters: `[N]` float32, the sub-model's adapters in the shapes of the whole model's; None without any.
      places: where in them each parameter's is.
    """

    whole: Params
    counts: jax.Array
    adapters: jax.Array | None
    places: tuple[AdapterPlace, ...] = dataclasses.field(metadata={"static": True})

    @property
    def params(self) -> dict[str, Weight]:
        """What the model's functions take."""
        params = {**self.whole, PARAMETER: self.counts}
        if self.adapters is not None:
            for name, at, rank in self.places:
                params[name] = AdaptedFromBuffer(self.whole[name], self.adapters, at, rank)
        return params


def layer_part(params: CountedSubModel, layer: int, like: int) -> CountedSubModel:
    """One layer of a sub-model under the names of another, whose graphs it shares.

    Its adapters are a part of the buffer, and lie in it as those of every layer of the same kind do.
    """
    own, other = f"layers.{layer}.", f"layers.{like}."
    whole = {
        other + name.removeprefix(own): each for name, each in params.whole.items() if name.startswith(own)
    }
    counts = np.array(params.counts)
    counts[like] = counts[layer]
    places = [place for place in params.places if place.name.startswith(own)]
    if params.adapters is None or not places:
        return CountedSubModel(whole, jax.device_put(counts), None, ())
    first = min(place.at for place in places)
    after = [place.at for place in params.places if place.at > max(place.at for place in places)]
    part = np.asarray(params.adapters)[first : min(after, default=None)]
    moved = tuple(
        place._replace(name=other + place.name.removeprefix(own), at=place.at - first) for place in places
    )
    return CountedSubModel(
        whole, jax.device_put(counts), jax.device_put(part, jax.devices()[0], may_alias=True), moved
    )


def whole_params(params: Params | CountedSubModel) -> Params:
    """The parameters without counts and adapters, if these tell what is used of them."""
    return params.whole if isinstance(params, CountedSubModel) else params


def sub_model(params: Params | CountedSubModel, cfg: ModelConfig) -> dict[str, Weight]:
    """The parameters of a sub-model: of each whole parameter its first units.

    In a graph these are slices, or nothing at all for weights in blocks. `shared_sub_model` makes them
    outside of graphs.

    Args:
      params: of the whole model, with its units in order, or of a larger sub-model that has all of these
        units (not every larger level has, see `jaxllm.elastic.ladder`), or what `shared_sub_model` or
        `counted_sub_model` made of them.
      cfg: the sub-model.

    Raises:
      ConfigError: the parameters are of a sub-model that lacks some of the units.
    """
    if isinstance(params, CountedSubModel):
        return params.params
    return part_of_sub_model({name: params[name] for name in param_specs(cfg)}, cfg)


def part_of_sub_model(params: Params | CountedSubModel, cfg: ModelConfig) -> dict[str, Weight]:
    """`sub_model` of some of the parameters: those of one layer, say."""
    if isinstance(params, CountedSubModel):
        return params.params
    specs = param_specs(cfg)
    return {name: _cut(sliced(each), name, specs[name].shape, take_units) for name, each in params.items()}


def shared_sub_model(params: Params, cfg: ModelConfig) -> dict[str, Weight]:
    """`sub_model` of parameters in memory that copies no weight.

    A slice outside of a graph is a copy, and on a CPU a slice in a graph is one, too. So on a CPU an array's
    beginning becomes an array of its own over the same memory; on other devices it is marked, for `sub_model`
    to slice in the graph. Rows of a mixture's experts are no beginning: their stack stays whole, and a graph
    cuts an expert where it takes it out, which for floats on a CPU is a copy, as it is at the whole model.
    """
    return shared_part({name: params[name] for name in param_specs(cfg)}, cfg)


def shared_part(params: Params, cfg: ModelConfig) -> dict[str, Weight]:
    """`shared_sub_model` of some of the parameters: those of one layer, say."""
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
            # Of weights that come by pieces the shapes alone are there.
            return jax.eval_shape(lambda each: _cut(each, name, shapes[name], take_units), weight)
        cut = _cut(jax.tree.map(np.asarray, weight), name, shapes[name], take_units)
        views = [shared(*pair) for pair in zip(jax.tree.leaves(cut), leaves, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(cut), views)

    return {name: beginning(params[name], name) for name in shapes}


def can_be_counted(params: Params, cfg: ModelConfig) -> bool:
    """Whether one graph can serve all levels of a model at each one's own cost: on a CPU with native kernels,
    where all units are in blocks and none are in experts."""
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
    places: tuple[AdapterPlace, ...] = (),
    adapters: np.ndarray | None = None,
    rank: int = 0,
) -> CountedSubModel:
    """A sub-model as the whole model's parameters and the numbers of units that it has.

    Args:
      params: of the whole model (see `can_be_counted`).
      cfg: the sub-model.
      places: of adapters, the same for all sub-models that share graphs.
      adapters: in these places, if there are any (see `fill_buffer`).
      rank: how many ranks of adapters are used; those beyond hold zeros.
    """
    units = [cfg.units(layer) for layer in range(cfg.layers)]
    counts = counts_of([each.kv_heads for each in units], [each.neurons for each in units], rank)
    device = jax.devices()[0]
    buffer = None if adapters is None else jax.device_put(adapters, device, may_alias=True)
    return CountedSubModel(params, jax.device_put(counts), buffer, places)


def _cut(weight: Weight, name: str, shape: tuple[int, ...], take: Callable[[Weight, int], Weight]) -> Weight:
    if tuple(weight.shape) == shape or not is_unit_parameter(name):
        return weight
    stacked = ".experts." in name
    has, wanted = weight.shape[int(stacked)], shape[int(stacked)]
    if has < wanted:
        raise ConfigError(f"{name} has {has} units, the sub-model {wanted}: cut it from the whole model")
    return narrow(weight, wanted) if stacked else take(weight, wanted)
