"""Chooses the units of each level (ELMS, section 3.2), and makes sub-models without copying weights.

A level is a share, in percent, of the parameters of all layers. Anchor layers, the most important ones, stay
whole as long as the share allows; the other layers shrink evenly, by whole units. Alternatively a ladder
defines the number of units of each level and layer (see `chosen_ladder`); a layer may then have no kv group
or no neuron, and its block adds nothing: depth is a second axis. A sub-model has a prefix of each layer's
units, so that all levels read the same buffers from the start.

Every level is a part of the whole model, but not always of the next larger level: if that has one kv group
more in a layer, it may have a few neurons fewer.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import FULL_LEVEL, LayerUnits, ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.kernels.native_call import PARAMETER, counts_of
from jaxllm.models.layer_stack import STACK, are_entries, can_be_addressed
from jaxllm.models.lora import Adapter, summed_factors
from jaxllm.models.parameters import ENCODER, Params, param_specs
from jaxllm.quant import Adapted, Weight, first_units, narrow, sliced, take_units

LEVELS = (20, 30, 40, 50, 60, 70, 80, 90, 100)
# Neurons are kept in multiples of this, which a kernel computes at once; of less in narrow layers.
_NEURON_STEP = 32
_STEPS_PER_LAYER = 40
# Fields that a bundle omits by default.
_LEFT_OUT = frozenset({"units", "encoder"})
# Number of steps in which shares of [0, 1] are tried.
_SHARES = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ladder:
    """The levels of a model.

    Attributes:
      levels: levels in percent, ascending; the last is 100, the whole model.
      anchors: indices of the anchor layers, which shrink last, ascending.
      units: per level but the last, per layer, numbers of kv groups and neurons; empty: by share and anchors.
      encoder: ladder of an encoder-decoder's encoder, with the same levels; None: by share only.
    """

    levels: tuple[int, ...] = LEVELS
    anchors: tuple[int, ...] = ()
    units: tuple[tuple[tuple[int, int], ...], ...] = ()
    encoder: "Ladder | None" = None

    def __post_init__(self) -> None:
        whole = all(type(each) is int for each in (*self.levels, *self.anchors))
        if not whole or list(self.levels) != sorted(set(self.levels)) or self.levels[-1:] != (FULL_LEVEL,):
            raise ConfigError(
                f"levels must be ascending whole percentages that end with {FULL_LEVEL}, got {self.levels}"
            )
        if self.levels[0] < 1:
            raise ConfigError(f"a level must be at least 1 percent, got {self.levels[0]}")
        if list(self.anchors) != sorted(set(self.anchors)) or min(self.anchors, default=0) < 0:
            raise ConfigError(f"anchors must be ascending numbers of layers, got {self.anchors}")
        if self.encoder is not None and (self.encoder.levels != self.levels or self.encoder.encoder):
            raise ConfigError(f"the encoder's levels must be those of the decoder, {self.levels}")
        if self.units and len(self.units) != len(self.levels) - 1:
            raise ConfigError(f"units of {len(self.units)} levels for {len(self.levels) - 1} below the whole")
        pairs = [pair for level in self.units for pair in level]
        if any(len(pair) != 2 or any(type(n) is not int or n < 0 for n in pair) for pair in pairs):
            raise ConfigError("units of a layer must be a number of kv groups and one of neurons, at least 0")

    def to_json(self) -> dict[str, Any]:
        """The ladder as a plain dict for `from_json`."""
        data = dataclasses.asdict(self)
        data["encoder"] = None if self.encoder is None else self.encoder.to_json()
        return {name: value for name, value in data.items() if name not in _LEFT_OUT or value}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Ladder":
        """Reads a dict made by `to_json`.

        Raises:
          ConfigError: a key is unknown or missing, or a value is out of range.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(data, dict) or data.keys() | _LEFT_OUT != names:
            raise ConfigError(f"malformed levels: expected {' and '.join(sorted(names))}, got {data!r:.80}")
        try:
            units = tuple(tuple(map(tuple, level)) for level in data.get("units", ()))
            encoder = None if data.get("encoder") is None else cls.from_json(data["encoder"])
            levels, anchors = tuple(data["levels"]), tuple(data["anchors"])
            return cls(levels=levels, anchors=anchors, units=units, encoder=encoder)
        except TypeError as error:
            raise ConfigError(f"malformed levels: {error}") from error


@functools.lru_cache(maxsize=1024)
def sub_config(cfg: ModelConfig, ladder: Ladder, level: int) -> ModelConfig:
    """The sub-model of one of the ladder's levels, of the whole model `cfg`; for an encoder-decoder of both
    sides.

    Raises:
      ConfigError: the ladder has no such level, or anchors that are not layers of the model.
    """
    if level not in ladder.levels:
        raise ConfigError(f"there is no level {level}; there are {', '.join(map(str, ladder.levels))}")
    if ladder.anchors[-1:] >= (cfg.layers,):
        raise ConfigError(f"layer {ladder.anchors[-1]} is an anchor of a model of {cfg.layers} layers")
    if cfg.encoder is not None:
        encoder = sub_config(cfg.encoder, ladder.encoder or Ladder(levels=ladder.levels), level)
        cfg = dataclasses.replace(cfg, encoder=encoder)
    if level == FULL_LEVEL:
        return cfg
    if ladder.units:
        stored = ladder.units[ladder.levels.index(level)]
        kept = [LayerUnits(kv_heads=groups, neurons=neurons) for groups, neurons in stored]
        if len(kept) != cfg.layers or any(
            own.kv_heads > whole.kv_heads or own.neurons > whole.neurons
            for own, whole in zip(kept, map(cfg.units, range(cfg.layers)), strict=True)
        ):
            raise ConfigError(
                "the units of a level are more than the model has; the levels are another model's"
            )
        return dataclasses.replace(cfg, layer_units=tuple(kept))
    costs = [unit_sizes(cfg, layer) for layer in range(cfg.layers)]
    budget = layer_parameters(cfg) * level / FULL_LEVEL

    def layer_units(layer: int, share: float) -> LayerUnits:
        """The nearest number of kv groups to a share of the layer's parameters, and neurons for the rest."""
        whole, (group, neuron) = cfg.units(layer), costs[layer]
        heads = min(whole.kv_heads, max(1, round(share * whole.kv_heads)))
        rest = share * (whole.kv_heads * group + whole.neurons * neuron) - heads * group
        step = neuron_step(whole.neurons)
        neurons = int(rest / neuron + 1e-6)
        if neurons < whole.neurons:
            neurons = neurons // step * step
        return LayerUnits(kv_heads=heads, neurons=min(whole.neurons, max(step, neurons)))

    def units(share: float, anchor_share: float) -> list[LayerUnits]:
        return [
            layer_units(layer, anchor_share if layer in ladder.anchors else share)
            for layer in range(cfg.layers)
        ]

    def fits(kept: list[LayerUnits]) -> bool:
        return _size(kept, costs) <= budget

    # The other layers shrink to their minimum size before anchors shrink.
    if fits(units(0.0, 1.0)):
        kept = units(_most(lambda share: fits(units(share, 1.0))), 1.0)
    else:
        kept = units(0.0, _most(lambda share: fits(units(0.0, share))))
    return dataclasses.replace(cfg, layer_units=tuple(kept))


def unit_sizes(cfg: ModelConfig, layer: int) -> tuple[int, int]:
    """Number of parameters of one kv group, and of one neuron (of all experts), of a layer."""
    whole, kept = cfg.whole, {"attn": 0, "ffn": 0}
    units = whole.units(layer)
    for name, spec in param_specs(whole).items():
        if name.startswith(f"layers.{layer}.") and is_unit_parameter(name):
            kept["attn" if ".attn." in name or ".cross." in name else "ffn"] += int(np.prod(spec.shape))
    return kept["attn"] // units.kv_heads, kept["ffn"] // units.neurons


def layer_parameters(cfg: ModelConfig) -> int:
    """Number of parameters of all units of a model or sub-model."""
    costs = [unit_sizes(cfg, layer) for layer in range(cfg.layers)]
    return _size([cfg.units(layer) for layer in range(cfg.layers)], costs)


def is_unit_parameter(name: str) -> bool:
    """Whether a parameter consists of units: those of layers do, but norms, output biases and routers."""
    name = name.removeprefix(ENCODER)
    part = name.split(".", 2)[2] if name.startswith("layers.") else ""
    outputs = ("attn.o_bias", "cross.o_bias", "ffn.down_bias")
    ours = part.startswith(("attn.", "cross.", "ffn.", "experts."))
    return ours and "norm" not in part and part not in outputs


def neuron_step(neurons: int) -> int:
    """The step of numbers of neurons of levels, for a layer with `neurons` neurons."""
    return min(_NEURON_STEP, 1 << max(0, (neurons // _STEPS_PER_LAYER).bit_length() - 1))


def _most(fits: Callable[[float], bool]) -> float:
    """The largest share in [0, 1] that fits; 0 is assumed to fit."""
    low, high = 0, _SHARES
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle / _SHARES) else (low, middle - 1)
    return low / _SHARES


def _size(kept: list[LayerUnits], costs: list[tuple[int, int]]) -> int:
    return sum(
        units.kv_heads * group + units.neurons * neuron
        for units, (group, neuron) in zip(kept, costs, strict=True)
    )


def chosen_ladder(
    cfg: ModelConfig,
    levels: tuple[int, ...],
    groups: Sequence[np.ndarray],
    neurons: Sequence[np.ndarray],
    *,
    depth: bool = False,
) -> Ladder:
    """The levels of a model, with their units chosen over all layers at once, by importance per parameter.

    The paper gives every layer but the anchors the same share. Here a level is a knapsack: its parameters are
    the capacity, kv groups and steps of neurons the items, importance their value. Units of a layer are added
    in their order, most important first, so that a greedy choice by importance per parameter is the optimum
    of the knapsack whose last item may be cut (Dantzig 1957), and no whole choice is better by more than that
    item. Every layer keeps at least a kv group and a step of neurons, unless levels may lack `depth`.

    Args:
      levels: levels in percent, ascending, the last one 100.
      groups: per layer the importances of its kv groups `[K]`, in any order.
      neurons: per layer those of its neurons, `[F]`, or `[E, F]` for experts.
      depth: whether a layer may have no kv group, or no neuron, in a level.

    Raises:
      ConfigError: malformed levels.
    """
    # The minimum of every level, per layer kv groups, neurons and parameters; and what may be added:
    # importance per parameter, layer, whether it is neurons, units, parameters.
    least: list[tuple[int, int, int]] = []
    items: list[tuple[float, int, bool, int, int]] = []
    for layer in range(cfg.layers):
        whole, (group, neuron) = cfg.units(layer), unit_sizes(cfg, layer)
        step = neuron_step(whole.neurons)
        kept = (0, 0) if depth else (1, step)
        least.append((kept[0], kept[1], kept[0] * group + kept[1] * neuron))
        falling = -np.sort(-np.asarray(groups[layer], np.float64))
        items += [(value / group, layer, False, 1, group) for value in falling[kept[0] :].tolist()]
        # A neuron of a level is one of every expert.
        each = -np.sort(-np.asarray(neurons[layer], np.float64), axis=-1)
        each = each.sum(0) if each.ndim == 2 else each
        for first in range(kept[1], whole.neurons, step):
            own = each[first : first + step]
            items.append((float(own.mean()) / neuron, layer, True, len(own), len(own) * neuron))
    items.sort(key=lambda item: -item[0])
    whole_size, units = layer_parameters(cfg), []
    for level in levels[:-1]:
        kept = [[groups, neurons] for groups, neurons, _ in least]
        room = whole_size * level / FULL_LEVEL - sum(size for *_, size in least)
        # Nothing is added to a layer's kind after an item that does not fit.
        closed: set[tuple[int, bool]] = set()
        for _, layer, kind, count, size in items:
            if size > room:
                closed.add((layer, kind))
            elif (layer, kind) not in closed:
                kept[layer][kind] += count
                room -= size
        units.append(tuple((groups, neurons) for groups, neurons in kept))
    return Ladder(levels=levels, units=tuple(units))


def layers_ladder(cfg: ModelConfig, levels: tuple[int, ...], importance: np.ndarray) -> Ladder:
    """The levels of a model as whole layers, the most important ones that fit: a baseline (LE of ELMS).

    Args:
      levels: levels in percent, ascending, the last one 100.
      importance: importances of the layers, `[L]`.
    """
    whole = [cfg.units(layer) for layer in range(cfg.layers)]
    sizes = [_size([own], [unit_sizes(cfg, layer)]) for layer, own in enumerate(whole)]
    units = []
    for level in levels[:-1]:
        room, kept = layer_parameters(cfg) * level / FULL_LEVEL, [(0, 0)] * cfg.layers
        for layer in np.argsort(-importance, kind="stable").tolist():
            if sizes[layer] <= room:
                kept[layer] = (whole[layer].kv_heads, whole[layer].neurons)
                room -= sizes[layer]
        units.append(tuple(kept))
    return Ladder(levels=levels, units=tuple(units))


# A sub-model of parameters in memory is either views of prefixes of the whole model's buffers, with its own
# buckets (`shared_sub_model`), or the whole model's parameters with counts of used units, for buckets that
# serve all levels (`counted_sub_model`); no weights are copied.


def sub_model(params: Params, cfg: ModelConfig) -> dict[str, Weight]:
    """The parameters of a sub-model: the first units of each parameter.

    Call it within a compiled step: weights in blocks are used in place, others are sliced. `shared_sub_model`
    makes the parameters outside of one.

    Args:
      params: parameters of the whole model, or some of them such as those of a layer, with their units in
        order; or of a larger sub-model with all of these units (not every larger level has them, see
        `jaxllm.elastic.ladder`); or the result of `shared_sub_model` or of `by_address`, which is returned
        unchanged, as are parameters of an encoder-decoder, whose sub-models are counted.

    Raises:
      ConfigError: the parameters are those of a sub-model that lacks some of the units.
    """
    if STACK in params or cfg.encoder is not None:
        return dict(params)
    return {
        name: _cut(sliced(params[name]), name, spec.shape, take_units)
        for name, spec in param_specs(cfg).items()
        if name in params
    }


def shared_sub_model(params: Params, cfg: ModelConfig) -> dict[str, Weight]:
    """`sub_model` of parameters in memory, outside of a compiled step, without copying weights.

    A slice outside of a compiled step is a copy, and on a CPU a slice inside of one is a copy too. So on a
    CPU the prefix of an array becomes a separate array over the same memory; on other devices, and for
    layers in stacks, it is marked, and the step slices it. Rows of a mixture's experts are not a prefix:
    their stack stays whole, and a step cuts an expert when it uses it, which for floats on a CPU is a copy,
    as for the whole model.
    """
    shapes = {name: spec.shape for name, spec in param_specs(cfg).items() if name in params}
    if jax.default_backend() != "cpu" or are_entries(params[name] for name in shapes):
        return {name: _cut(params[name], name, shape, first_units) for name, shape in shapes.items()}
    device = jax.devices()[0]

    def shared(view: np.ndarray, like: jax.Array) -> jax.Array:
        return like if view.shape == like.shape else jax.device_put(view, device, may_alias=True)

    def beginning(weight: Weight, name: str) -> Weight:
        if tuple(weight.shape) == shapes[name]:
            return weight
        if 0 in shapes[name]:
            return _cut(weight, name, shapes[name], take_units)
        leaves = jax.tree.leaves(weight)
        if any(isinstance(each, jax.ShapeDtypeStruct) for each in leaves):
            # Streamed weights are only given as shapes.
            return jax.eval_shape(lambda each: _cut(each, name, shapes[name], take_units), weight)
        cut = _cut(jax.tree.map(np.asarray, weight), name, shapes[name], take_units)
        views = [shared(*pair) for pair in zip(jax.tree.leaves(cut), leaves, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(cut), views)

    return {name: beginning(params[name], name) for name in shapes}


def can_be_counted(params: Params, cfg: ModelConfig) -> bool:
    """Whether one bucket can serve all levels of a model, each at its own cost: if its layers are read by
    address, and no units are in experts. Those of encoder-decoders are always counted: weights that are not
    in blocks then cost as much at every level as at the whole model."""
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
      params: parameters of the whole model (see `can_be_addressed`).
      level: config of the sub-model; None counts nothing.
      adapters: (adapter, scaling) pairs for matrices of layers, of the whole model or the sub-model; they
        are summed.
      ranks: ranks of the adapters of parameters, at least the sums of the given ones: the same for all
        sub-models that share buckets. Unused ranks are zero, and not computed.
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
    if not wanted:
        return jnp.zeros(shape, jnp.float32)
    if has < wanted:
        raise ConfigError(f"{name} has {has} units, the sub-model {wanted}: cut it from the whole model")
    return narrow(weight, wanted) if stacked else take(weight, wanted)
