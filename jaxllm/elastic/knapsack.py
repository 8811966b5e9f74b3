"""Chooses each level's units over all layers at once, by what they matter per parameter.

The paper gives every layer but the anchors the same share (`ladder.py`). Here a level is a knapsack: its
parameters are the capacity, kv groups and steps of neurons the items, importance their value. Units of a
layer are taken in their order, most important first, so that a greedy choice by importance per parameter is
the optimum of the knapsack whose last item may be cut (Dantzig 1957), and no whole choice is better by more
than that item. Every layer keeps a kv group and a step of neurons.
"""

from collections.abc import Sequence

import numpy as np

from jaxllm.config import WHOLE, ModelConfig
from jaxllm.elastic.ladder import Ladder, layer_parameters, neuron_step, unit_sizes

# Of an item: importance per parameter, layer, whether it is neurons, units, parameters.
_Item = tuple[float, int, bool, int, int]


def chosen_ladder(
    cfg: ModelConfig, levels: tuple[int, ...], groups: Sequence[np.ndarray], neurons: Sequence[np.ndarray]
) -> Ladder:
    """The levels of a model, with their units chosen over all layers.

    Args:
      cfg: the whole model.
      levels: in percent, ascending, the last one 100.
      groups: per layer the importances of its kv groups `[K]`, in any order.
      neurons: per layer those of its neurons, `[F]`, or `[E, F]` for experts.

    Raises:
      ConfigError: malformed levels.
    """
    least, items = _items(cfg, groups, neurons)
    items.sort(key=lambda item: -item[0])
    whole = layer_parameters(cfg)
    units = [_filled(least, items, whole * level / WHOLE) for level in levels if level != WHOLE]
    return Ladder(levels=levels, units=tuple(units))


def _items(
    cfg: ModelConfig, groups: Sequence[np.ndarray], neurons: Sequence[np.ndarray]
) -> tuple[list[tuple[int, int, int]], list[_Item]]:
    """What every level has, per layer kv groups, neurons and parameters; and the items that may be added."""
    least, items = [], []
    for layer in range(cfg.layers):
        whole, (group, neuron) = cfg.units(layer), unit_sizes(cfg, layer)
        step = neuron_step(whole.neurons)
        least.append((1, step, group + step * neuron))
        falling = -np.sort(-np.asarray(groups[layer], np.float64))
        items += [(value / group, layer, False, 1, group) for value in falling[1:].tolist()]
        # A neuron of a level is one of every expert.
        each = -np.sort(-np.asarray(neurons[layer], np.float64), axis=-1)
        each = each.sum(0) if each.ndim == 2 else each
        for first in range(step, whole.neurons, step):
            own = each[first : first + step]
            items.append((float(own.mean()) / neuron, layer, True, len(own), len(own) * neuron))
    return least, items


def _filled(
    least: list[tuple[int, int, int]], items: list[_Item], capacity: float
) -> tuple[tuple[int, int], ...]:
    """The kv groups and neurons of each layer: the first items that fit. Of a layer's kind nothing is taken
    behind an item that does not fit."""
    kept = [[groups, neurons] for groups, neurons, _ in least]
    room = capacity - sum(size for *_, size in least)
    closed: set[tuple[int, bool]] = set()
    for _, layer, kind, count, size in items:
        if (layer, kind) in closed:
            continue
        if size > room:
            closed.add((layer, kind))
            continue
        kept[layer][kind] += count
        room -= size
    return tuple((groups, neurons) for groups, neurons in kept)
