"""Which steps, channels and layers integer prefill uses: found once on a text (arXiv 2407.05858, section
3.3).

- Steps. Of the inputs of a product the largest magnitude that each channel ever had is looked at. With a
  shadow the step is one of these over 127, so that few channels ever pass it: each that does must make the
  step so much finer. Without shadow it is the largest of them over 127, and nothing that was seen is clipped.
- Channels. Those with outliers get rows in floats, which stay in the mapped file: the system reads their
  pages when a prompt needs them. (The paper holds only rows of "hot" channels in memory, section 3.3.)
- Layers. Outliers of most layers hardly matter: by how far the largest one passes its step, all but the most
  important layers do without a shadow, as many as the tolerable loss allows. Where shadows in all layers are
  not enough, more channels may pass finer steps.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.kernels.stepwise import TOP_LEVEL
from jaxllm.models.parameters import Params
from jaxllm.prefill.products import PRODUCTS, contracts_last_axis, product_matrices, product_sizes
from jaxllm.prefill.reference import Rule, observed
from jaxllm.prefill.shadow import FloatRows
from jaxllm.prefill.subgraphs import LayerCalibration
from jaxllm.quant import contracted_rows

# Of each layer and product something of its input's channels, `[D]`.
ByProduct = list[list[np.ndarray]]
# What native kernels take for a step; activations that are all zero get the least.
_LEAST_STEP = 1e-20
# By which share integer prefill may make the perplexity grow, unless somebody says otherwise: what
# calibrating keeps to, and what an engine asks of a bundle.
MOST_LOSS = 0.01
# How often steps are made finer: by then one channel in four may pass.
_FINER = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShadowRecipe:
    """How outliers are told from the rest.

    Attributes:
      most_channels: the share of a product's channels that may pass the step in a layer with shadow.
      least_gain: by which share each of them must make the step finer; few are worth a shadow.
      pruned_share: of the layers, the least important, do without a shadow if the loss allows it.
    """

    most_channels: float = 0.03
    least_gain: float = 0.05
    pruned_share: float = 0.85

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 <= value <= 1:
                raise ConfigError(f"{field.name} must be in [0, 1], got {value}")

    def finer(self) -> "Iterator[ShadowRecipe]":
        """This recipe, and ever finer ones: each lets twice as many channels pass, for a lesser gain."""
        for power in range(_FINER + 1):
            yield dataclasses.replace(
                self,
                most_channels=min(1.0, self.most_channels * 2**power),
                least_gain=self.least_gain * 0.4**power,
            )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PrefillCalibration:
    """What integer prefill of a model takes, on the host.

    Attributes:
      levels: sub-models that steps are known of, in percent, ascending.
      steps: `[levels, L, 4]` float32, of `PRODUCTS`.
      shadowed: of each layer, whether it has a shadow.
      channels: by (layer, product) of layers with shadow the channels `[R]` int32 of float rows, those with
        most outliers first, -1 for rows that pad them; R is the same for all.
      rows: by (layer, product) for each weight of the product `[R, outputs]` floats.
      losses: by level, by which share the perplexity grew on the text and on one that was held out.
    """

    levels: tuple[int, ...]
    steps: np.ndarray
    shadowed: tuple[bool, ...]
    channels: Mapping[tuple[int, int], np.ndarray]
    rows: Mapping[tuple[int, int], tuple[np.ndarray, ...]]
    losses: Mapping[int, tuple[float, float]]

    def loss(self, level: int) -> float:
        """The larger of the two losses that were measured at a level; infinite where none was."""
        return max(self.losses.get(level, (math.inf,)))

    def layers(self, level: int, cfg: ModelConfig) -> tuple[LayerCalibration, ...]:
        """What the subgraphs of each layer take, as arrays of the host.

        Args:
          level: one of `levels`.
          cfg: whose inputs the products have: the level's sub-model, or the whole model.

        Raises:
          ConfigError: the level was not calibrated.
        """
        if level not in self.levels:
            raise ConfigError(
                f"level {level} has no integer prefill; there are {', '.join(map(str, self.levels))}: "
                "calibrate again with `jaxllm calibrate --prefill`"
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
        """R, the same for all products; 0 where no layer has a shadow."""
        return max(map(len, self.channels.values()), default=0)

    @property
    def row_bytes(self) -> int:
        """Bytes of all float rows."""
        return sum(each.nbytes for rows in self.rows.values() for each in rows)


def channel_tops(
    params: Params, tokens: jax.Array, *, cfg: ModelConfig, rule: Rule | None = None
) -> list[list[jax.Array]]:
    """The largest magnitude of each channel `[D]` of the inputs of all products, over tokens `[T]` of a text;
    NaN where an activation is."""

    def look(layer: int, product: int, x: jax.Array) -> jax.Array:
        del layer, product
        return jnp.max(jnp.abs(x), axis=0)

    return observed(params, tokens, look, cfg=cfg, rule=rule)


def outlier_counts(
    params: Params, tokens: jax.Array, steps: jax.Array, *, cfg: ModelConfig, rule: Rule | None = None
) -> list[list[jax.Array]]:
    """How many of the tokens pass 127 of the steps `[L, 4]` in each channel `[D]`, int32."""

    def look(layer: int, product: int, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.abs(x) > TOP_LEVEL * steps[layer, product], axis=0, dtype=jnp.int32)

    return observed(params, tokens, look, cfg=cfg, rule=rule)


def largest_of(tops: Sequence[ByProduct]) -> ByProduct:
    """The largest magnitudes over several texts.

    Raises:
      ConfigError: there is no text, or an activation was NaN or infinite.
    """
    if not tops:
        raise ConfigError("there is no text to calibrate on; give more")
    found = [
        [
            np.max([np.asarray(each[layer][product]) for each in tops], axis=0)
            for product in range(len(PRODUCTS))
        ]
        for layer in range(len(tops[0]))
    ]
    if not all(np.isfinite(each).all() for layer in found for each in layer):
        raise ConfigError("activations are NaN or infinite on the calibration text; the model is broken")
    return found


def whole_steps(tops: ByProduct) -> np.ndarray:
    """The step `[L, 4]` float32 of each product that clips nothing of what was seen."""
    return _as_steps([[each.max() for each in layer] for layer in tops])


def clipping_steps(tops: ByProduct, recipe: ShadowRecipe) -> np.ndarray:
    """The step `[L, 4]` float32 of each product with a shadow: that of the channels of which each is worth
    it."""

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
    """How far the largest outlier of each layer passes its step, `[L]`: what leaving its shadow out costs."""
    largest = np.array([[each.max() for each in layer] for layer in tops])
    return (largest / steps).max(axis=1)


def most_important(importance: np.ndarray, count: int) -> tuple[bool, ...]:
    """Of each layer, whether it is among so many of the most important."""
    chosen = set(np.argsort(-importance, kind="stable")[:count].tolist())
    return tuple(layer in chosen for layer in range(len(importance)))


def shadow_counts(layers: int, pruned_share: float) -> list[int]:
    """How many layers to give a shadow, tried one after the other until too little is lost: as few as the
    share asks for, then twice as many, and so on."""
    count = max(1, math.ceil(layers * (1 - pruned_share) - 1e-9))
    found = []
    while count < layers:
        found.append(count)
        count *= 2
    return [*found, layers]


def outlying_channels(counts: np.ndarray) -> np.ndarray:
    """Channels with outliers, those with most first."""
    return np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)].astype(np.int32)


def assembled(
    cfg: ModelConfig,
    floats: Params,
    counts: ByProduct,
    *,
    levels: Mapping[int, tuple[np.ndarray, np.ndarray]],
    shadowed: tuple[bool, ...],
    losses: Mapping[int, tuple[float, float]] | None = None,
) -> PrefillCalibration:
    """A calibration from what was observed.

    Args:
      cfg: the model.
      floats: its parameters, as exact as they are known.
      counts: outliers of each channel, with the steps of shadows.
      levels: by level the steps `[L, 4]` with shadow and without.
      shadowed: which layers have one.
      losses: see `PrefillCalibration`.
    """
    mask = np.array(shadowed)[:, None]
    steps = [np.where(mask, *levels[level]) for level in sorted(levels)]
    found = {
        (layer, product): outlying_channels(counts[layer][product])
        for layer, with_shadow in enumerate(shadowed)
        for product in range(len(PRODUCTS))
        if with_shadow
    }
    # One shape for all, so that layers share graphs.
    most = max(map(len, found.values()), default=0)
    channels, rows = {}, {}
    for (layer, product), own in found.items():
        padded = np.full(most, -1, np.int32)
        padded[: len(own)] = own
        channels[layer, product] = padded
        last = contracts_last_axis(product)
        rows[layer, product] = tuple(
            _float_rows(each, padded, last=last) for each in product_matrices(floats, layer, product, cfg)
        )
    return PrefillCalibration(
        levels=tuple(sorted(levels)),
        steps=np.stack(steps).astype(np.float32),
        shadowed=shadowed,
        channels=channels,
        rows=rows,
        losses=losses or {},
    )


def _float_rows(weight, channels: np.ndarray, *, last: bool) -> np.ndarray:
    """Rows of some channels in half precision, zeros for those that pad."""
    taken = np.asarray(contracted_rows(weight, jnp.maximum(channels, 0), last=last))
    top = float(np.finfo(np.float16).max)
    return np.where(channels[:, None] >= 0, np.clip(taken, -top, top), 0).astype(np.float16)
