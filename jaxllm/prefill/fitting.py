"""From a model and a text to its calibration: observes it in floats, and chooses shadows by what they save.

Losses are how much the perplexity grows, as a share of that of the model as it is. They are measured by
`reference.py`, whose products are those of integer prefill; all other weights are as they are.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import WHOLE, ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import Params
from jaxllm.prefill.calibration import (
    MOST_LOSS,
    ByProduct,
    PrefillCalibration,
    ShadowRecipe,
    assembled,
    channel_tops,
    clipping_steps,
    importances,
    largest_of,
    most_important,
    outlier_counts,
    shadow_counts,
    whole_steps,
)
from jaxllm.prefill.products import PRODUCTS, contracted_axes
from jaxllm.prefill.reference import Rule, integer_rule, plain_rule, scores_by_rule
from jaxllm.prefill.subgraphs import LayerCalibration, require_integer_prefill
from jaxllm.quant import BlockedArray, quantize, to_blocks

# Of less text than this, chance decides which channels have outliers.
LEAST_TOKENS = 2048


def whole_rows(tokens: Sequence[int] | np.ndarray, length: int) -> list[np.ndarray]:
    """A text's tokens in rows of one length, the rest left out."""
    row = np.asarray(tokens, np.int32)
    return list(row[: len(row) // length * length].reshape(-1, length))


def per_tensor_weights(cfg: ModelConfig, floats: Params) -> dict[str, BlockedArray]:
    """The weights of all products at 8 bits with one scale per tensor, by name, on the host."""
    return {
        name: to_blocks(quantize(np.asarray(floats[name], np.float32), bits=8, axis=axis, per_tensor=True))
        for name, axis in contracted_axes(cfg).items()
    }


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Fitted:
    """What was found.

    Attributes:
      calibration: with its losses on both texts.
      recipe: by which, where the one that was asked for lost too much.
      lossy: levels that lose more than was allowed, or were not looked at because the whole model does.
    """

    calibration: PrefillCalibration
    recipe: ShadowRecipe
    lossy: tuple[int, ...]

    @property
    def worse_by(self) -> tuple[int, float]:
        """What is missing of what was asked for: so many levels, and of the whole model how much it loses."""
        return len(self.lossy), self.calibration.loss(WHOLE) if WHOLE in self.lossy else 0.0


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

    Steps and channels are found on one text; the first choice of layers is taken, from few shadows to all and
    then by ever finer recipes, by which no level loses too much on that text or on the one held out. If some
    level always does, the choice with fewest such levels is taken, and if the whole model does that by which
    it loses least.

    Args:
      cfg: a dense model.
      floats: its parameters, as exact as they are known.
      stored: the same at 8 bits, as they are served.
      texts: rows `[T]` int32 of one length, to calibrate on.
      held_out: rows of the same length, to say what it loses elsewhere.
      recipe: how outliers are told.
      most_loss: the growth of the perplexity that may be lost on either text.
      sub_models: config and parameters as they are served of levels besides the whole model.

    Raises:
      ConfigError: the model has experts, there is too little text, or its activations are not finite.
    """
    require_integer_prefill(cfg)
    for rows in (texts, held_out):
        if (tokens := sum(map(len, rows))) < LEAST_TOKENS:
            raise ConfigError(
                f"calibrating and holding out take {LEAST_TOKENS} tokens each, and there are {tokens}: "
                "give more text"
            )
    both = texts, held_out
    levels = {WHOLE: _Level(cfg, floats, stored, both)}
    levels |= {
        level: _Level(own, params, params, both) for level, (own, params) in (sub_models or {}).items()
    }
    best: Fitted | None = None
    for tried, choice in _choices(cfg, floats, texts, levels, recipe or ShadowRecipe()):
        losses = {WHOLE: levels[WHOLE].losses(choice.layers(WHOLE, cfg))}
        if max(losses[WHOLE]) <= most_loss:
            losses |= {
                level: each.losses(choice.layers(level, each.cfg))
                for level, each in levels.items()
                if level != WHOLE
            }
        lossy = tuple(
            level for level in sorted(levels) if not max(losses.get(level, (math.inf,))) <= most_loss
        )
        found = Fitted(calibration=dataclasses.replace(choice, losses=losses), recipe=tried, lossy=lossy)
        if best is None or found.worse_by < best.worse_by:
            best = found
        if not lossy:
            break
    assert best is not None
    return best


def _choices(
    cfg: ModelConfig,
    floats: Params,
    texts: Sequence[np.ndarray],
    levels: Mapping[int, "_Level"],
    recipe: ShadowRecipe,
) -> Iterator[tuple[ShadowRecipe, PrefillCalibration]]:
    """Calibrations without losses, the cheapest to serve first; and by which recipe."""
    count = jax.jit(functools.partial(outlier_counts, cfg=cfg))
    tops = levels[WHOLE].tops
    seen: set[tuple[bytes, tuple[bool, ...]]] = set()
    for each in recipe.finer():
        steps = {
            level: (clipping_steps(one.tops, each), whole_steps(one.tops)) for level, one in levels.items()
        }
        clipping = steps[WHOLE][0]
        counts = _summed(cfg, [jax.device_get(count(floats, row, clipping)) for row in texts])
        importance = importances(tops, clipping)
        for shadows in shadow_counts(cfg.layers, each.pruned_share):
            shadowed = most_important(importance, shadows)
            # A finer recipe may find the same steps.
            own = b"".join(pair[0][np.array(shadowed)].tobytes() for pair in steps.values()), shadowed
            if own in seen:
                continue
            seen.add(own)
            yield each, assembled(cfg, floats, counts, levels=steps, shadowed=shadowed)


class _Level:
    """What is known of a level: how large the inputs of its products are, and what it loses when read in
    integers.

    Attributes:
      cfg: its config.
      tops: see `channel_tops`.
    """

    def __init__(
        self, cfg: ModelConfig, floats: Params, stored: Params, texts: Sequence[Sequence[np.ndarray]]
    ) -> None:
        self.cfg, self._stored, self._texts = cfg, stored, texts
        self.tops = _largest(cfg, floats, texts[0])
        plain = _nats(cfg, lambda params, known: plain_rule(params, cfg))
        self._exact = [plain(floats, (), rows) for rows in texts]
        self._integer = _nats(cfg, lambda params, known: integer_rule(params, known, cfg))

    def losses(self, known: Sequence[LayerCalibration]) -> tuple[float, float]:
        """By which share the perplexity of both texts grows."""
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
    """The calibration of a model of random weights, whose speed alone matters: so many layers have a shadow,
    and it claims no losses."""
    recipe = recipe or ShadowRecipe()
    tops = _largest(cfg, floats, texts)
    clipping = clipping_steps(tops, recipe)
    count = jax.jit(functools.partial(outlier_counts, cfg=cfg))
    counts = _summed(cfg, [jax.device_get(count(floats, row, clipping)) for row in texts])
    shadowed = most_important(importances(tops, clipping), shadows)
    return assembled(
        cfg,
        floats,
        counts,
        levels={WHOLE: (clipping, whole_steps(tops))},
        shadowed=shadowed,
        losses={WHOLE: (0.0, 0.0)},
    )


def growth(nats: float, exact: float) -> float:
    """By which share the perplexity is larger, of losses in nats per token."""
    return math.exp(nats - exact) - 1


def _largest(cfg: ModelConfig, params: Params, texts: Sequence[np.ndarray]) -> ByProduct:
    look = jax.jit(functools.partial(channel_tops, cfg=cfg))
    return largest_of([jax.device_get(look(params, row)) for row in texts])


def _summed(cfg: ModelConfig, each: Sequence[ByProduct]) -> ByProduct:
    """Outliers of each channel of each product over several texts."""
    return [
        [np.sum([one[layer][product] for one in each], axis=0) for product in range(len(PRODUCTS))]
        for layer in range(cfg.layers)
    ]


def _nats(
    cfg: ModelConfig, rule_of: Callable[[Params, Sequence], Rule]
) -> Callable[[Params, Sequence, Sequence[np.ndarray]], float]:
    """What measures nats per token of texts under a rule."""

    @jax.jit
    def one(params: Params, known: Sequence, row: jax.Array) -> jax.Array:
        return -jnp.sum(scores_by_rule(params, row[:-1], row[1:], rule_of(params, known), cfg=cfg))

    def all_of(params: Params, known: Sequence, texts: Sequence[np.ndarray]) -> float:
        total = sum(float(one(params, known, row)) for row in texts)
        if not math.isfinite(total):
            raise ConfigError("the model's loss on the calibration text is not finite; it is broken")
        return total / sum(len(row) - 1 for row in texts)

    return all_of
