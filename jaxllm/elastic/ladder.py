"""Chooses the units of each level's sub-model (ELMS, section 3.2).

A level is a share, in percent, of the parameters of all layers. Anchor layers, the most important ones, stay
whole as long as the share allows; the other layers shrink evenly, by whole units. Or a ladder says itself how
many units each level has of each layer (see `knapsack.py`). A sub-model has a prefix of each layer's units,
so that all levels read the same buffers from the start.

Every level is a part of the whole model, but not always of the next larger level: where that has one kv group
more in a layer, it may have a few neurons fewer.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxllm.config import WHOLE, LayerUnits, ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import ENCODER, param_specs

LEVELS = (20, 30, 40, 50, 60, 70, 80, 90, 100)
# Neurons are kept in multiples of this, which a kernel computes at once; of less in narrow layers.
_NEURON_STEP = 32
_STEPS_PER_LAYER = 40
# Fields that a bundle has only where they say something.
_LEFT_OUT = frozenset({"units", "encoder"})
# Number of steps in which shares of [0, 1] are tried.
_SHARES = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ladder:
    """The levels of a model.

    Attributes:
      levels: in percent, ascending; the last is 100, the whole model.
      anchors: indices of the anchor layers, which shrink last, ascending.
      units: per level but the last, per layer, its kv groups and neurons; empty: by share and anchors.
      encoder: of an encoder-decoder, the ladder of its encoder, of the same levels; None: by share alone.
    """

    levels: tuple[int, ...] = LEVELS
    anchors: tuple[int, ...] = ()
    units: tuple[tuple[tuple[int, int], ...], ...] = ()
    encoder: "Ladder | None" = None

    def __post_init__(self) -> None:
        whole = all(type(each) is int for each in (*self.levels, *self.anchors))
        if not whole or list(self.levels) != sorted(set(self.levels)) or self.levels[-1:] != (WHOLE,):
            raise ConfigError(
                f"levels must be ascending whole percentages that end with {WHOLE}, got {self.levels}"
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
        if any(len(pair) != 2 or any(type(n) is not int or n < 1 for n in pair) for pair in pairs):
            raise ConfigError("units of a layer must be a number of kv groups and one of neurons, at least 1")

    def to_json(self) -> dict[str, Any]:
        """A plain dict that `from_json` reads back."""
        data = dataclasses.asdict(self)
        data["encoder"] = None if self.encoder is None else self.encoder.to_json()
        return {name: value for name, value in data.items() if name not in _LEFT_OUT or value}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Ladder":
        """The ladder that `to_json` gave as a dict.

        Raises:
          ConfigError: a key is unknown or missing, or a value is out of its domain.
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


def sub_config(cfg: ModelConfig, ladder: Ladder, level: int) -> ModelConfig:
    """The sub-model of a level; of an encoder-decoder both sides have one.

    Args:
      cfg: the whole model.
      ladder: its levels.
      level: one of them.

    Raises:
      ConfigError: the ladder has no such level, or anchors that are no layers of the model.
    """
    if level not in ladder.levels:
        raise ConfigError(f"there is no level {level}; there are {', '.join(map(str, ladder.levels))}")
    if ladder.anchors[-1:] >= (cfg.layers,):
        raise ConfigError(f"layer {ladder.anchors[-1]} is an anchor of a model of {cfg.layers} layers")
    if cfg.encoder is not None:
        encoder = sub_config(cfg.encoder, ladder.encoder or Ladder(levels=ladder.levels), level)
        cfg = dataclasses.replace(cfg, encoder=encoder)
    if ladder.units and level != WHOLE:
        return _of_units(cfg, ladder.units[ladder.levels.index(level)])
    return _sub_config(cfg, ladder.anchors, level)


@functools.lru_cache(maxsize=1024)
def _of_units(cfg: ModelConfig, units: tuple[tuple[int, int], ...]) -> ModelConfig:
    kept = tuple(LayerUnits(kv_heads=groups, neurons=neurons) for groups, neurons in units)
    fits = len(kept) == cfg.layers and all(
        own.kv_heads <= whole.kv_heads and own.neurons <= whole.neurons
        for own, whole in zip(kept, map(cfg.units, range(cfg.layers)), strict=True)
    )
    if not fits:
        raise ConfigError("the units of a level are more than the model has; the levels are another model's")
    return dataclasses.replace(cfg, layer_units=kept)


@functools.lru_cache(maxsize=1024)
def _sub_config(cfg: ModelConfig, anchors: tuple[int, ...], level: int) -> ModelConfig:
    if level == WHOLE:
        return cfg
    costs = [unit_sizes(cfg, layer) for layer in range(cfg.layers)]
    budget = layer_parameters(cfg) * level / WHOLE

    def units(share: float, anchor_share: float) -> list[LayerUnits]:
        return [
            _layer_units(cfg, layer, anchor_share if layer in anchors else share, costs[layer])
            for layer in range(cfg.layers)
        ]

    def fits(kept: list[LayerUnits]) -> bool:
        return _size(kept, costs) <= budget

    # The other layers shrink to their least size before anchors shrink.
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
            kept["attn" if is_group_parameter(name) else "ffn"] += int(np.prod(spec.shape))
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


def is_group_parameter(name: str) -> bool:
    """Whether the units of such a parameter are kv groups, and not neurons."""
    return ".attn." in name or ".cross." in name


def neuron_step(neurons: int) -> int:
    """The number of which levels keep multiples, of a layer of so many neurons."""
    return min(_NEURON_STEP, 1 << max(0, (neurons // _STEPS_PER_LAYER).bit_length() - 1))


def _layer_units(cfg: ModelConfig, layer: int, share: float, cost: tuple[int, int]) -> LayerUnits:
    """The units of a layer at a share of its parameters: the nearest number of kv groups, and neurons for the
    rest."""
    whole, (group, neuron) = cfg.units(layer), cost
    heads = min(whole.kv_heads, max(1, round(share * whole.kv_heads)))
    rest = share * (whole.kv_heads * group + whole.neurons * neuron) - heads * group
    step = neuron_step(whole.neurons)
    neurons = int(rest / neuron + 1e-6)
    if neurons < whole.neurons:
        neurons = neurons // step * step
    return LayerUnits(kv_heads=heads, neurons=min(whole.neurons, max(step, neurons)))


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
