"""Calibrates integer prefill from observations on a text (mllm-NPU, arXiv 2407.05858, section 3.3).

- Steps. For each product, the largest magnitude of every input channel is observed. With a shadow, the step
  is one of these magnitudes over 127, such that few channels exceed it: each exceeding channel must make the
  step finer by a given share. A layer without a shadow takes the same step, and what exceeds it is clipped
  (*pruned*, as in the paper), or a *wide* one, the largest of them over 127, which clips no observed value:
  the one that changes its products less.
- Channels. Channels with outliers get rows of weights in floats. These stay in the mapped file, and the
  operating system reads their pages when a prompt needs them. (The paper keeps the rows of hot channels in
  memory.)
- Layers. The importance of a layer is how far its largest outlier exceeds its step. The least important
  layers get no shadow, as many as the allowed loss permits. If shadows in all layers are not enough, steps
  become finer and more channels exceed them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import shaped
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.int8_prefill.recipe import ShadowRecipe
from jaxllm.int8_prefill.reference import observed, plain_rule
from jaxllm.int8_prefill.shadow import (
    PRODUCTS,
    FloatRows,
    contracts_last_axis,
    product_matrices,
    product_sizes,
)
from jaxllm.int8_prefill.subgraphs import LayerCalibration
from jaxllm.kernels.native_products import TOP_LEVEL
from jaxllm.models.parameters import Params
from jaxllm.quant import contracted_rows

# [layer][product] -> a value per input channel, `[D]`.
ByProduct = list[list[np.ndarray]]
# Minimum scale of native kernels, used if all activations are zero.
_LEAST_STEP = 1e-20


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PrefillCalibration:
    """The calibration of a model's integer prefill, as host arrays.

    Attributes:
      levels: calibrated levels, in percent, ascending.
      steps: `[levels, L, 4]` float32, per product of `PRODUCTS`.
      shadowed: per layer, whether it has a shadow.
      channels: (layer, product) of layers with a shadow -> channels `[R]` int32 of the float rows, those
        with most outliers first, -1 for padding; R is the same for all.
      rows: (layer, product) -> float rows `[R, outputs]`, per weight of the product.
      losses: level -> share by which the perplexity grew on the calibration text and on a held-out text.
    """

    levels: tuple[int, ...]
    steps: np.ndarray
    shadowed: tuple[bool, ...]
    channels: Mapping[tuple[int, int], np.ndarray]
    rows: Mapping[tuple[int, int], tuple[np.ndarray, ...]]
    losses: Mapping[int, tuple[float, float]]

    def loss(self, level: int) -> float:
        """The larger of the two losses of a level; infinite if they were not measured."""
        return max(self.losses.get(level, (math.inf,)))

    def layers(self, level: int, cfg: ModelConfig) -> tuple[LayerCalibration, ...]:
        """The calibration of each layer, as host arrays.

        Args:
          cfg: the level's sub-model, or the whole model; it gives the products' inputs.

        Raises:
          ConfigError: the level was not calibrated.
        """
        if level not in self.levels:
            raise ConfigError(
                f"level {level} has no integer prefill; there are {', '.join(map(str, self.levels))}: "
                "calibrate again with `jaxllm calibrate prefill`"
            )
        steps = self.steps[self.levels.index(level)]

        def rows_of(layer: int) -> tuple[FloatRows, ...]:
            found = []
            for product in range(len(PRODUCTS)):
                inputs, _ = product_sizes(cfg, layer, product)
                place, channels = np.full(inputs, -1, np.int32), self.channels[layer, product]
                real = (channels >= 0) & (channels < inputs)
                place[channels[real]] = np.flatnonzero(real)
                found.append(FloatRows(place, self.rows[layer, product]))  # pyright: ignore[reportArgumentType]
            return tuple(found)

        return tuple(
            LayerCalibration(steps[layer], rows_of(layer) if with_shadow else None)
            for layer, with_shadow in enumerate(self.shadowed)
        )

    @property
    def float_rows(self) -> int:
        """R, the same for all products; 0 if no layer has a shadow."""
        return max(map(len, self.channels.values()), default=0)

    @property
    def row_bytes(self) -> int:
        """Bytes of all float rows."""
        return sum(each.nbytes for rows in self.rows.values() for each in rows)


def channel_tops(params: Params, tokens: jax.Array, *, cfg: ModelConfig) -> list[list[jax.Array]]:
    """The largest magnitude of each input channel `[D]` of all products, over tokens `[T]` of a text; NaN if
    an activation is NaN."""

    def look(layer: int, product: int, x: jax.Array) -> jax.Array:
        return jnp.max(jnp.abs(x), axis=0)

    return observed(params, tokens, look, cfg=cfg)


@shaped(steps="float32 L 4")
def outlier_counts(
    params: Params, tokens: jax.Array, steps: jax.Array, *, cfg: ModelConfig
) -> list[list[jax.Array]]:
    """Number of tokens that exceed 127 steps in each input channel `[D]` of all products, int32;
    `steps` is `[L, 4]`."""

    def look(layer: int, product: int, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.abs(x) > TOP_LEVEL * steps[layer, product], axis=0, dtype=jnp.int32)

    return observed(params, tokens, look, cfg=cfg)


def product_errors(
    params: Params, tokens: jax.Array, steps: tuple[jax.Array, jax.Array], *, cfg: ModelConfig
) -> list[list[jax.Array]]:
    """Errors of all products with quantized inputs over tokens `[T]`: `[2]` sums of squares, one for each
    of two `steps` `[L, 4]`, as shares of the exact results' own."""
    multiply = plain_rule(params, cfg)

    def look(layer: int, product: int, x: jax.Array) -> jax.Array:
        def squares(inputs: jax.Array) -> jax.Array:
            return jnp.asarray(sum(jnp.sum(jnp.square(each)) for each in multiply(layer, product, inputs)))

        def moved(step: jax.Array) -> jax.Array:
            return jnp.clip(jnp.round(x / step), -TOP_LEVEL, TOP_LEVEL) * step - x

        errors = jnp.stack([squares(moved(each[layer, product])) for each in steps])
        return errors / jnp.maximum(squares(x), np.float32(_LEAST_STEP))

    return observed(params, tokens, look, cfg=cfg)


def clipped_layers(errors: Sequence[list[list[np.ndarray]]]) -> tuple[bool, ...]:
    """Per layer, whether a clipping step changes its products less than a wide one, by the `product_errors`
    of several texts with these two steps."""
    clipping, wide = np.sum(np.asarray(errors), axis=(0, 2)).T
    return tuple((clipping <= wide).tolist())


def largest_of(tops: Sequence[ByProduct]) -> ByProduct:
    """The largest magnitudes over several texts.

    Raises:
      ConfigError: there is no text, or an activation was NaN or infinite.
    """
    if not tops:
        raise ConfigError("there is no text to calibrate on; give more")
    found = jax.tree.map(lambda *rows: np.max(rows, axis=0), *tops)
    if not all(np.isfinite(each).all() for layer in found for each in layer):
        raise ConfigError("activations are NaN or infinite on the calibration text; the model is broken")
    return found


class Observer:
    """Observes a model's activations in floats on a text, in rows `[T]` of one length."""

    def __init__(self, cfg: ModelConfig, floats: Params, texts: Sequence[np.ndarray]) -> None:
        self._floats, self._texts = floats, texts
        self._compiled = {
            look: jax.jit(functools.partial(look, cfg=cfg))
            for look in (channel_tops, outlier_counts, product_errors)
        }

    @functools.cached_property
    def tops(self) -> ByProduct:
        """See `channel_tops`, over the whole text."""
        return largest_of(self._over_rows(channel_tops))

    def counts(self, steps: np.ndarray) -> ByProduct:
        """See `outlier_counts`, over the whole text."""
        return jax.tree.map(lambda *rows: np.sum(rows, axis=0), *self._over_rows(outlier_counts, steps))

    def clipped(self, steps: tuple[np.ndarray, np.ndarray]) -> tuple[bool, ...]:
        """See `clipped_layers`; `steps` are clipping and wide ones."""
        return clipped_layers(self._over_rows(product_errors, steps))

    def _over_rows(self, look: Callable[..., Any], *more: Any) -> list[Any]:
        return [jax.device_get(self._compiled[look](self._floats, row, *more)) for row in self._texts]


def whole_steps(tops: ByProduct) -> np.ndarray:
    """The minimum steps `[L, 4]` float32 that clip no observed value."""
    return _as_steps([[each.max() for each in layer] for layer in tops])


def clipping_steps(tops: ByProduct, recipe: ShadowRecipe) -> np.ndarray:
    """The steps `[L, 4]` float32 of products with a shadow, by the recipe's limits on exceeding channels."""

    def top_of(sizes: np.ndarray) -> float:
        most = math.ceil(len(sizes) * recipe.most_channels - 1e-9)
        largest = np.sort(sizes)[::-1][: most + 1]
        largest = largest[largest > 0]
        if not len(largest):
            return 0.0
        gained = np.log(largest[0] / largest)
        return float(largest[np.argmax(gained - np.arange(len(largest)) * np.log1p(recipe.least_gain))])

    return _as_steps([[top_of(each) for each in layer] for layer in tops])


def _as_steps(tops: list[list[float]]) -> np.ndarray:
    return np.maximum(np.array(tops) / TOP_LEVEL, _LEAST_STEP).astype(np.float32)


def importances(tops: ByProduct, steps: np.ndarray) -> np.ndarray:
    """The importance of each layer's shadow, `[L]`: how far its largest outlier exceeds its step."""
    largest = np.array([[each.max() for each in layer] for layer in tops])
    return (largest / steps).max(axis=1)


def most_important(importance: np.ndarray, count: int) -> tuple[bool, ...]:
    """Per layer, whether it is among the `count` most important."""
    chosen = set(np.argsort(-importance, kind="stable")[:count].tolist())
    return tuple(layer in chosen for layer in range(len(importance)))


def shadow_counts(layers: int, pruned_share: float) -> list[int]:
    """Numbers of layers with a shadow to try in this order: as few as the share allows, then doubling."""
    count = math.ceil(layers * (1 - pruned_share) - 1e-9)
    found = []
    while count < layers:
        found.append(count)
        count = max(1, 2 * count)
    return [*found, layers]


def outlying_channels(counts: np.ndarray) -> np.ndarray:
    """Indices of channels with outliers, by falling count."""
    return np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)].astype(np.int32)


def assembled(
    cfg: ModelConfig,
    floats: Params,
    counts: ByProduct,
    *,
    levels: Mapping[int, tuple[np.ndarray, np.ndarray]],
    shadowed: tuple[bool, ...],
    clipped: tuple[bool, ...],
    losses: Mapping[int, tuple[float, float]] | None = None,
) -> PrefillCalibration:
    """A calibration from observations.

    Args:
      floats: its parameters at the best available precision.
      counts: outliers of each channel, at the steps of layers with a shadow.
      levels: level -> clipping steps `[L, 4]`, and wide ones.
      shadowed: per layer, whether it has a shadow.
      clipped: per layer, whether it has a clipping step without a shadow.
      losses: see `PrefillCalibration`.
    """
    mask = (np.array(shadowed) | np.array(clipped))[:, None]
    steps = [np.where(mask, *levels[level]) for level in sorted(levels)]
    found = {
        (layer, product): outlying_channels(counts[layer][product])
        for layer, with_shadow in enumerate(shadowed)
        for product in range(len(PRODUCTS))
        if with_shadow
    }
    # One shape for all layers, so that they share buckets.
    most = max(map(len, found.values()), default=0)
    channels, rows, half = {}, {}, float(np.finfo(np.float16).max)
    for (layer, product), own in found.items():
        padded = np.full(most, -1, np.int32)
        padded[: len(own)] = own
        channels[layer, product] = padded
        last = contracts_last_axis(product)
        rows[layer, product] = tuple(
            # In half precision, zero for padding channels.
            np.where(padded[:, None] >= 0, np.clip(row, -half, half), 0).astype(np.float16)
            for row in (
                np.asarray(contracted_rows(each, jnp.maximum(padded, 0), last=last))
                for each in product_matrices(floats, layer, product, cfg)
            )
        )
    return PrefillCalibration(
        levels=tuple(sorted(levels)),
        steps=np.stack(steps).astype(np.float32),
        shadowed=shadowed,
        channels=channels,
        rows=rows,
        losses=losses or {},
    )


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
      seed: seed of the choice of channels.
    """

    channels: int = 4
    factor: int = 64
    places: tuple[Place, ...] = PLACES
    seed: int = 0


def with_outliers(
    cfg: ModelConfig, params: Mapping[str, np.ndarray], recipe: OutlierRecipe
) -> dict[str, np.ndarray]:
    """Parameters of the same function with outliers among its activations.

    Small trained models hardly have outliers; large ones have them in the same few channels of all layers
    (LLM.int8(), arXiv 2208.07339). To compare quantization methods on small models, chosen channels are
    scaled up where they are produced, and down where they are consumed. Factors are powers of two, so that
    the model in floats computes the same results bit for bit.

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
