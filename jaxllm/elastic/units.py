"""Reorders the units of a model (ELMS, section 3.2: permutation consistent units).

An attention unit is a kv group: the rows of its keys, values and queries with their biases, and its rows of
the output matrix. A feed-forward unit is a neuron: its rows of the gate, up and down matrices with their
biases; in a mixture, each expert has its own neurons. Reordering units leaves the function of a layer
unchanged, but for the rounding of sums in another order.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import jax
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.elastic.ladder import is_unit_parameter
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import ENCODER

# The parameter with a bias per head, which all layers share.
_BIASES = "relative_positions"


@dataclasses.dataclass(frozen=True, eq=False)
class UnitOrder:
    """The units of a whole model, most important first.

    Attributes:
      groups: per layer, indices of its kv groups `[K]` int32.
      neurons: per layer, indices of its neurons `[F]` int32, or `[E, F]` for each of its experts.
      cross: per layer of the decoder of an encoder-decoder, indices of its kv groups over the source; empty
        for other models.
      encoder: order of its encoder's units; None for other models.

    With relative positions all layers have the same order of kv groups, because they share the biases.
    """

    groups: tuple[np.ndarray, ...]
    neurons: tuple[np.ndarray, ...]
    cross: tuple[np.ndarray, ...] = ()
    encoder: "UnitOrder | None" = None


def order_arrays(order: UnitOrder) -> dict[str, np.ndarray]:
    """An order, or other values of all units such as their scores, as named arrays for a file."""
    kinds = ("groups", "neurons", "cross")
    named = {f"{kind}.{layer}": each for kind in kinds for layer, each in enumerate(getattr(order, kind))}
    others = {} if order.encoder is None else order_arrays(order.encoder)
    return named | {ENCODER + name: each for name, each in others.items()}


def order_of_arrays(cfg: ModelConfig, arrays: Mapping[str, np.ndarray]) -> UnitOrder:
    """The inverse of `order_arrays`.

    Raises:
      KeyError: the arrays of a layer are missing.
    """

    def of(kind: str) -> tuple[np.ndarray, ...]:
        return tuple(arrays[f"{kind}.{layer}"] for layer in range(cfg.layers))

    if cfg.encoder is None:
        return UnitOrder(of("groups"), of("neurons"))
    encoder = order_of_arrays(cfg.encoder, of_encoder(arrays))
    return UnitOrder(of("groups"), of("neurons"), of("cross"), encoder)


def of_encoder(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The encoder's of some named arrays, named as those of a standalone model."""
    return {name.removeprefix(ENCODER): each for name, each in arrays.items() if name.startswith(ENCODER)}


def order_of_scores(cfg: ModelConfig, scores: Mapping[str, np.ndarray]) -> UnitOrder:
    """The order of units by falling scores; the sort is stable.

    Args:
      scores: scores by layer i: `groups.i` `[K]`, `neurons.i` `[F]` or `[E, F]`; for an encoder-decoder also
        `cross.i` `[K]`, and its encoder's with the prefix `ENCODER`. With relative positions the groups' are
        summed over the layers, each as a share of its layer's.

    Raises:
      ConfigError: a score is missing, or not finite.
    """

    def falling(score: np.ndarray) -> np.ndarray:
        score = np.asarray(score, np.float64)
        if not np.isfinite(score).all():
            raise ConfigError("the importance of units is not finite; the model or its calibration is broken")
        return np.argsort(-score, axis=-1, kind="stable").astype(np.int32)

    try:
        known = order_of_arrays(cfg, scores)
    except KeyError as error:
        raise ConfigError(f"the scores of {error} are missing") from error
    groups = known.groups
    if cfg.relative_buckets:
        wide = [np.asarray(each, np.float64) for each in groups]
        shares = [each / max(float(each.sum()), np.finfo(np.float64).tiny) for each in wide]
        groups = (np.sum(shares, axis=0),) * cfg.layers
    encoder = None if cfg.encoder is None else order_of_scores(cfg.encoder, of_encoder(scores))
    groups, neurons, cross = (tuple(map(falling, each)) for each in (groups, known.neurons, known.cross))
    return UnitOrder(groups, neurons, cross, encoder)


def reorder(
    cfg: ModelConfig, params: Iterable[tuple[str, np.ndarray]], order: UnitOrder
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields a whole model's float parameters, (name, array) pairs, with their units in another order.

    Raises:
      ConfigError: the order does not fit this model.
    """
    check_order(cfg, order)
    for name, value in params:
        if is_unit_parameter(name):
            yield name, _reordered(name, np.asarray(value), order)
        elif name.removeprefix(ENCODER) == _BIASES:
            of = order.encoder if name.startswith(ENCODER) and order.encoder is not None else order
            # Biases `[buckets, N]` move with the kv groups of their heads.
            by_group = np.asarray(value).reshape(len(value), len(of.groups[0]), -1)
            yield name, by_group[:, of.groups[0]].reshape(value.shape)
        else:
            yield name, value


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
    over_source = 0 if cfg.encoder is None else cfg.layers
    if (order.encoder is None) != (cfg.encoder is None) or len(order.cross) != over_source:
        raise ConfigError(
            "the order is of a decoder-only model, the model an encoder-decoder, or the reverse"
        )
    if cfg.encoder is not None and order.encoder is not None:
        check_order(cfg.encoder, order.encoder)
    if cfg.relative_buckets and not all(np.array_equal(each, order.groups[0]) for each in order.groups):
        raise ConfigError("with relative positions the kv groups of all layers must be in one order")
    if not len(order.groups) == len(order.neurons) == cfg.layers:
        raise ConfigError(f"the order is of {len(order.groups)} layers, the model has {cfg.layers}")
    for layer in range(cfg.layers):
        units = cfg.whole.units(layer)
        lead = (cfg.experts,) if cfg.is_sparse(layer) else ()
        cross = order.cross[layer : layer + 1]
        for what, places, count in (
            ("kv-groups", order.groups[layer], (units.kv_heads,)),
            ("neurons", order.neurons[layer], (*lead, units.neurons)),
            *(("kv-groups over the source", each, (units.kv_heads,)) for each in cross),
        ):
            whole = np.broadcast_to(np.arange(count[-1]), count)
            if places.shape != count or not np.array_equal(np.sort(places, axis=-1), whole):
                raise ConfigError(
                    f"the order of layer {layer}'s {what} is no permutation of {list(count)}; it belongs to "
                    "another model"
                )


def _reordered(name: str, value: np.ndarray, order: UnitOrder) -> np.ndarray:
    if name.startswith(ENCODER) and order.encoder is not None:
        name, order = name.removeprefix(ENCODER), order.encoder
    _, layer, part = name.split(".", 2)
    kinds = {"attn": order.groups, "cross": order.cross}
    places = kinds.get(part.partition(".")[0], order.neurons)[int(layer)]
    if places.ndim == 1:
        return value[places]
    return np.take_along_axis(value, places.reshape(*places.shape, *(1,) * (value.ndim - 2)), axis=1)
