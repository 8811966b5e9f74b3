"""Puts activation outliers into a model without changing its function.

Small trained models hardly have outliers; large ones have them in the same few channels of all layers
(LLM.int8(), arXiv 2208.07339). To compare quantization methods on small models, chosen channels are scaled up
where they are produced, and down where they are consumed. Factors are powers of two, so that the model in
floats computes the same results bit for bit. Benchmarks say when a model has such outliers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError

# "norm": channels of the norms before attention and feed-forward block; "value": dimensions of value heads;
# "neuron": neurons of the feed-forward block.
Place = Literal["norm", "value", "neuron"]
PLACES: tuple[Place, ...] = ("norm", "value", "neuron")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutlierRecipe:
    """The channels that become outliers.

    Attributes:
      channels: number of channels per place and layer; channels of norms are the same in all layers, as in
        large models.
      factor: a power of two; half of the channels get half of it.
      places: kinds of channels.
      seed: of the draw of channels.
    """

    channels: int = 4
    factor: int = 64
    places: tuple[Place, ...] = PLACES
    seed: int = 0

    def __post_init__(self) -> None:
        if self.channels < 1:
            raise ConfigError(f"outliers take at least one channel, got {self.channels}")
        if self.factor < 2 or self.factor & (self.factor - 1):
            raise ConfigError(f"the factor of outliers must be a power of two above 1, got {self.factor}")
        if not self.places or not set(self.places) <= set(PLACES):
            raise ConfigError(f"outliers are in some of {', '.join(PLACES)}, got {self.places}")


def with_outliers(
    cfg: ModelConfig, params: Mapping[str, np.ndarray], recipe: OutlierRecipe
) -> dict[str, np.ndarray]:
    """Parameters of the same function with outliers among its activations.

    Args:
      cfg: a dense model. Scaling neurons needs a gated block, or relu, with which the factor commutes.
      params: floats by name; they are not changed.
      recipe: the outliers.

    Raises:
      ConfigError: the model has no channels of a kind, or fewer of them.
    """
    if cfg.experts:
        raise ConfigError("outliers are not put into mixtures of experts: these have no integer prefill")
    if "value" in recipe.places and cfg.qkv_clip:
        raise ConfigError("values that are clipped cannot be scaled; leave out the place 'value'")
    if "neuron" in recipe.places and not cfg.gated_ffn and cfg.activation != "relu":
        raise ConfigError(
            f"neurons without a gate cannot be scaled past {cfg.activation}; leave out the place 'neuron'"
        )
    draw = np.random.default_rng(recipe.seed)
    found = {name: np.array(value) for name, value in params.items()}
    everywhere = _chosen(draw, cfg.hidden_size, recipe)
    for layer in range(cfg.layers):
        prefix = f"layers.{layer}."
        if "norm" in recipe.places:
            gate = ["ffn.gate"] if cfg.gated_ffn else []
            readers = {"attn_norm": ["attn.q", "attn.k", "attn.v"], "ffn_norm": [*gate, "ffn.up"]}
            for norm, names in readers.items():
                _scale(found, f"{prefix}{norm}.scale", np.s_[everywhere], recipe, up=True)
                _scale(found, f"{prefix}{norm}.bias", np.s_[everywhere], recipe, up=True)
                for name in names:
                    _scale(found, prefix + name, np.s_[..., everywhere], recipe, up=False)
        if "value" in recipe.places:
            head, size = draw.integers(cfg.kv_heads), cfg.head_dim
            inside = _chosen(draw, size, recipe)
            _scale(found, f"{prefix}attn.v", np.s_[head, inside], recipe, up=True, rows=True)
            _scale(found, f"{prefix}attn.v_bias", np.s_[head, inside], recipe, up=True)
            for group in range(cfg.group):
                at = group * size + inside
                _scale(found, f"{prefix}attn.o", np.s_[head, at], recipe, up=False, rows=True)
        if "neuron" in recipe.places:
            neurons = _chosen(draw, cfg.ffn_size, recipe)
            _scale(found, f"{prefix}ffn.up", np.s_[neurons], recipe, up=True, rows=True)
            _scale(found, f"{prefix}ffn.up_bias", np.s_[neurons], recipe, up=True)
            _scale(found, f"{prefix}ffn.down", np.s_[neurons], recipe, up=False, rows=True)
    return found


def _chosen(draw: np.random.Generator, channels: int, recipe: OutlierRecipe) -> np.ndarray:
    if recipe.channels > channels:
        raise ConfigError(f"{recipe.channels} of {channels} channels cannot be outliers; ask for fewer")
    return draw.permutation(channels)[: recipe.channels]


def _scale(
    params: dict[str, np.ndarray],
    name: str,
    at: Any,
    recipe: OutlierRecipe,
    *,
    up: bool,
    rows: bool = False,
) -> None:
    """Multiplies or divides chosen channels of a parameter, if the model has it."""
    if name not in params:
        return
    factors = np.full(recipe.channels, recipe.factor, params[name].dtype)
    factors[::2] = recipe.factor // 2
    factors = factors if up else 1 / factors
    params[name][at] *= factors[:, None] if rows else factors
