"""Reorders the units of a model (ELMS, section 3.2: permutation consistent units).

An attention unit is a kv group: the rows of its keys, values and queries with their biases, and its rows of
the output matrix. A feed-forward unit is a neuron: its rows of the gate, up and down matrices with their
biases; in a mixture, each expert has its own neurons. Reordering units leaves the function of a layer
unchanged, but for the rounding of sums in another order.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.elastic.ladder import is_unit_parameter
from jaxllm.errors import ConfigError


@dataclasses.dataclass(frozen=True, eq=False)
class UnitOrder:
    """The units of a whole model, most important first.

    Attributes:
      groups: per layer, indices of its kv groups `[K]` int32.
      neurons: per layer, indices of its neurons `[F]` int32, or `[E, F]` for each of its experts.
    """

    groups: tuple[np.ndarray, ...]
    neurons: tuple[np.ndarray, ...]


def unit_arrays(groups: Sequence[np.ndarray], neurons: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Values of all units by layer, as named arrays for a file."""
    named = {f"groups.{layer}": each for layer, each in enumerate(groups)}
    return named | {f"neurons.{layer}": each for layer, each in enumerate(neurons)}


def units_of_arrays(
    arrays: Mapping[str, np.ndarray], layers: int
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """The inverse of `unit_arrays`: values of kv groups and of neurons, by layer.

    Raises:
      KeyError: the arrays of a layer are missing.
    """
    groups, neurons = (
        tuple(arrays[f"{kind}.{layer}"] for layer in range(layers)) for kind in ("groups", "neurons")
    )
    return groups, neurons


def order_units(groups: Iterable[np.ndarray], neurons: Iterable[np.ndarray]) -> UnitOrder:
    """The order of units by falling importance, given by layer: `[K]`, and `[F]` or `[E, F]`. Ties keep their
    order."""

    def falling(importance: np.ndarray) -> np.ndarray:
        importance = np.asarray(importance, np.float64)
        if not np.isfinite(importance).all():
            raise ConfigError("the importance of units is not finite; the model or its calibration is broken")
        return np.argsort(-importance, axis=-1, kind="stable").astype(np.int32)

    return UnitOrder(tuple(map(falling, groups)), tuple(map(falling, neurons)))


def reorder(
    cfg: ModelConfig, params: Iterable[tuple[str, np.ndarray]], order: UnitOrder
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields a model's float parameters with their units in another order.

    Args:
      cfg: the whole model.
      params: (name, array) pairs.
      order: of its units.

    Raises:
      ConfigError: the order does not fit this model.
    """
    check_order(cfg, order)
    for name, value in params:
        yield name, _reordered(name, np.asarray(value), order) if is_unit_parameter(name) else value


def reorder_adapter(adapter: Mapping[str, np.ndarray | jax.Array], order: UnitOrder) -> dict[str, np.ndarray]:
    """A low-rank adapter (see `jaxllm.models.lora`) for the model with its units in another order."""
    moved = {}
    for name, value in adapter.items():
        parameter, _, part = name.rpartition(".")
        ours = part == "left" and is_unit_parameter(parameter)
        moved[name] = _reordered(parameter, np.asarray(value), order) if ours else np.asarray(value)
    return moved


def check_order(cfg: ModelConfig, order: UnitOrder) -> None:
    """Raises ConfigError unless an order has every unit of a model exactly once."""
    if not len(order.groups) == len(order.neurons) == cfg.layers:
        raise ConfigError(f"the order is of {len(order.groups)} layers, the model has {cfg.layers}")
    for layer in range(cfg.layers):
        units = cfg.whole.units(layer)
        lead = (cfg.experts,) if cfg.is_sparse(layer) else ()
        for what, places, count in (
            ("kv-groups", order.groups[layer], (units.kv_heads,)),
            ("neurons", order.neurons[layer], (*lead, units.neurons)),
        ):
            whole = np.broadcast_to(np.arange(count[-1]), count)
            if places.shape != count or not np.array_equal(np.sort(places, axis=-1), whole):
                raise ConfigError(
                    f"the order of layer {layer}'s {what} is no permutation of {list(count)}; it belongs to "
                    "another model"
                )


def _reordered(name: str, value: np.ndarray, order: UnitOrder) -> np.ndarray:
    _, layer, part = name.split(".", 2)
    places = (order.groups if part.startswith("attn.") else order.neurons)[int(layer)]
    if places.ndim == 1:
        return value[places]
    return np.take_along_axis(value, places.reshape(*places.shape, *(1,) * (value.ndim - 2)), axis=1)
