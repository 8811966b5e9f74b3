"""Fits a calibration to a model and a text: observes activations in floats, and chooses layers with a shadow
by loss.

A loss is the growth of the perplexity, as a share of the unchanged model's perplexity. It is measured with
`reference.py`, which computes the products of integer prefill and leaves everything else unchanged.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.int8_prefill.calibration import (
    Observer,
    PrefillCalibration,
    assembled,
    clipping_steps,
    importances,
    most_important,
    shadow_counts,
    whole_steps,
)
from jaxllm.int8_prefill.recipe import MOST_LOSS, ShadowRecipe
from jaxllm.int8_prefill.reference import Rule, integer_rule, plain_rule, scores_by_rule
from jaxllm.int8_prefill.shadow import PRODUCTS, contracts_last_axis, product_names
from jaxllm.int8_prefill.subgraphs import LayerCalibration
from jaxllm.models.features import require_feature
from jaxllm.models.parameters import Params
from jaxllm.quant import BlockedArray, quantize, to_blocks

# With less text, chance decides which channels have outliers.
LEAST_TOKENS = 2048


def whole_rows(tokens: Sequence[int] | np.ndarray, length: int) -> list[np.ndarray]:
    """A text's tokens in rows of one length; an incomplete last row is left out."""
    row = np.asarray(tokens, np.int32)
    return list(row[: len(row) // length * length].reshape(-1, length))


def product_weights(cfg: ModelConfig, floats: Params, *, per_tensor: bool) -> dict[str, BlockedArray]:
    """The weights of all products at 8 bits with one scale per channel or tensor, by name, on the host."""
    found = {}
    for layer, product in itertools.product(range(cfg.layers), range(len(PRODUCTS))):
        axis = -1 if contracts_last_axis(product) else -2
        for name in product_names(layer, product, cfg):
            weight = np.asarray(floats[name], np.float32)
            found[name] = to_blocks(quantize(weight, bits=8, axis=axis, per_tensor=per_tensor))
    return found


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Fitted:
    """The result of a fit.

    Attributes:
      calibration: calibration with its losses on both texts.
      recipe: the final recipe, finer than the given one if that lost too much.
      clipped: per layer, whether it has no shadow and clips values beyond its step.
      lossy: levels with more loss than allowed, or not measured because the whole model has.
    """

    calibration: PrefillCalibration
    recipe: ShadowRecipe
    clipped: tuple[bool, ...]
    lossy: tuple[int, ...]

    @property
    def worse_by(self) -> tuple[int, float]:
        """A key to compare failed fits, lower is better: number of lossy levels, loss of the whole model if
        lossy."""
        return len(self.lossy), self.calibration.loss(FULL_LEVEL) if FULL_LEVEL in self.lossy else 0.0


def fit_calibration(
    cfg: ModelConfig,
    floats: Params,
    stored: Params,
    texts: Sequence[np.ndarray],
    held_out: Sequence[np.ndarray],
    *,
    recipe: ShadowRecipe | None = None,
    most_loss: float = MOST_LOSS,
    sub_models: Mapping[int, tuple[ModelConfig, Params]] | None = None,
) -> Fitted:
    """Calibrates integer prefill.

    One text determines steps and channels, and whether a layer without a shadow clips values beyond a step
    or widens it. Choices of layers are tried from few shadows to all, then with finer recipes; the first
    with which no level loses more than `most_loss` on that text or on the held-out one is used. If there is
    none, the choice with the fewest lossy levels is used; if the whole model is always lossy, the choice
    with its minimum loss.

    Args:
      cfg: config of a dense model.
      floats: its parameters at the best available precision.
      stored: the same parameters at 8 bits, as served.
      texts: rows `[T]` int32 of one length, for calibration.
      held_out: rows of the same length, to measure losses on another text.
      recipe: settings that separate outliers.
      most_loss: maximum growth of the perplexity on either text, as a share.
      sub_models: level -> config and parameters as served, for levels besides the whole model.

    Raises:
      ConfigError: the model has experts, there is too little text, or its activations are not finite.
    """
    require_feature(cfg, "integer prefill")
    for rows in (texts, held_out):
        if (tokens := sum(map(len, rows))) < LEAST_TOKENS:
            raise ConfigError(
                f"calibration and held-out text require {LEAST_TOKENS} tokens each, and there are {tokens}: "
                "give more text"
            )
    both = texts, held_out
    levels = {FULL_LEVEL: _Level(cfg, floats, stored, both)}
    levels |= {
        level: _Level(own, params, params, both) for level, (own, params) in (sub_models or {}).items()
    }
    best: Fitted | None = None
    for tried, clipped, choice in _choices(cfg, floats, levels, recipe or ShadowRecipe()):
        losses = {FULL_LEVEL: levels[FULL_LEVEL].losses(choice.layers(FULL_LEVEL, cfg))}
        if max(losses[FULL_LEVEL]) <= most_loss:
            losses |= {
                level: each.losses(choice.layers(level, each.cfg))
                for level, each in levels.items()
                if level != FULL_LEVEL
            }
        lossy = tuple(
            level for level in sorted(levels) if not max(losses.get(level, (math.inf,))) <= most_loss
        )
        calibration = dataclasses.replace(choice, losses=losses)
        found = Fitted(calibration=calibration, recipe=tried, clipped=clipped, lossy=lossy)
        if best is None or found.worse_by < best.worse_by:
            best = found
        if not lossy:
            break
    assert best is not None
    return best


def _choices(
    cfg: ModelConfig,
    floats: Params,
    levels: Mapping[int, "_Level"],
    recipe: ShadowRecipe,
) -> Iterator[tuple[ShadowRecipe, tuple[bool, ...], PrefillCalibration]]:
    """Yields calibrations without losses, the cheapest to serve first, with their recipes and the layers that
    clip."""
    observer = levels[FULL_LEVEL].observer
    seen: set[tuple[bytes, tuple[bool, ...]]] = set()
    for each in recipe.finer():
        steps = {
            level: (clipping_steps(one.observer.tops, each), whole_steps(one.observer.tops))
            for level, one in levels.items()
        }
        clips, counts = observer.clipped(steps[FULL_LEVEL]), observer.counts(steps[FULL_LEVEL][0])
        importance = importances(observer.tops, steps[FULL_LEVEL][0])
        for shadows in shadow_counts(cfg.layers, each.pruned_share):
            shadowed = most_important(importance, shadows)
            clipped = tuple(clip and not own for clip, own in zip(clips, shadowed, strict=True))
            # A finer recipe may give the same steps.
            finer = np.array(shadowed) | np.array(clipped)
            own = b"".join(pair[0][finer].tobytes() for pair in steps.values()), shadowed
            if own in seen:
                continue
            seen.add(own)
            choice = assembled(cfg, floats, counts, levels=steps, shadowed=shadowed, clipped=clipped)
            yield each, clipped, choice


class _Level:
    """One level under calibration: its config, the observer of its activations, and its losses."""

    def __init__(
        self, cfg: ModelConfig, floats: Params, stored: Params, texts: Sequence[Sequence[np.ndarray]]
    ) -> None:
        self.cfg, self._stored, self._texts = cfg, stored, texts
        self.observer = Observer(cfg, floats, texts[0])
        plain = _nats(cfg, lambda params, known: plain_rule(params, cfg))
        self._exact = [plain(floats, (), rows) for rows in texts]
        self._integer = _nats(cfg, lambda params, known: integer_rule(params, known, cfg))

    def losses(self, known: Sequence[LayerCalibration]) -> tuple[float, float]:
        """The growth of the perplexity of both texts, as shares."""
        here, elsewhere = (
            growth(self._integer(self._stored, known, rows), exact)
            for rows, exact in zip(self._texts, self._exact, strict=True)
        )
        return here, elsewhere


def random_calibration(
    cfg: ModelConfig,
    floats: Params,
    texts: Sequence[np.ndarray],
    *,
    shadows: int,
    recipe: ShadowRecipe | None = None,
) -> PrefillCalibration:
    """A calibration of a model with random weights, for measurements of speed: a given number of layers has a
    shadow, and there are no losses."""
    recipe = recipe or ShadowRecipe()
    observer = Observer(cfg, floats, texts)
    clipping = clipping_steps(observer.tops, recipe)
    return assembled(
        cfg,
        floats,
        observer.counts(clipping),
        levels={FULL_LEVEL: (clipping, whole_steps(observer.tops))},
        shadowed=most_important(importances(observer.tops, clipping), shadows),
        clipped=(False,) * cfg.layers,
        losses={FULL_LEVEL: (0.0, 0.0)},
    )


def growth(nats: float, exact: float) -> float:
    """The growth of the perplexity as a share, from losses in nats per token."""
    return math.exp(nats - exact) - 1


def _nats(
    cfg: ModelConfig, rule_of: Callable[[Params, Sequence[Any]], Rule]
) -> Callable[[Params, Sequence[Any], Sequence[np.ndarray]], float]:
    """A function that measures the nats per token of texts under a rule."""

    @jax.jit
    def one(params: Params, known: Sequence[Any], row: jax.Array) -> jax.Array:
        return -jnp.sum(scores_by_rule(params, row[:-1], row[1:], rule_of(params, known), cfg=cfg))

    def all_of(params: Params, known: Sequence[Any], texts: Sequence[np.ndarray]) -> float:
        total = sum(float(one(params, known, row)) for row in texts)
        if not math.isfinite(total):
            raise ConfigError("the model's loss on the calibration text is not finite; it is broken")
        return total / sum(len(row) - 1 for row in texts)

    return all_of
