"""From a model and a text to its calibration: observes it in floats, and chooses shadows by what they save.

Losses are how much the perplexity grows, as a share of that of the model as it is. They are measured by
`reference.py`, whose products are those of integer prefill; all other weights are as they are.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import WHOLE, ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import Params
from jaxllm.prefill.calibration import (
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
    search_shadow,
    whole_steps,
)
from jaxllm.prefill.products import PRODUCTS, contracted_axes
from jaxllm.prefill.reference import Rule, integer_rule, plain_rule, scores_by_rule
from jaxllm.prefill.subgraphs import require_integer_prefill
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


def fit_calibration(
    cfg: ModelConfig,
    floats: Params,
    stored: Params,
    texts: Sequence[np.ndarray],
    held_out: Sequence[np.ndarray],
    *,
    recipe: ShadowRecipe | None = None,
    most_loss: float = 0.01,
    sub_models: Mapping[int, tuple[ModelConfig, Params]] | None = None,
    report: Callable[[int], None] | None = None,
) -> PrefillCalibration:
    """Calibrates integer prefill.

    Args:
      cfg: a dense model.
      floats: its parameters, as exact as they are known.
      stored: the same at 8 bits, as they are served.
      texts: rows `[T]` int32 of one length, to calibrate on.
      held_out: rows of the same length, to say what it loses elsewhere.
      recipe: how outliers are told.
      most_loss: the growth of the perplexity that may be lost on the text: as many layers get a shadow as it
        takes.
      sub_models: config and parameters as they are served of levels besides the whole model.
      report: called with the number of passes over a text so far.

    Raises:
      ConfigError: the model has experts, there is too little text, or its activations are not finite.
    """
    require_integer_prefill(cfg)
    recipe = recipe or ShadowRecipe()
    for rows in (texts, held_out):
        if (tokens := sum(map(len, rows))) < LEAST_TOKENS:
            raise ConfigError(
                f"calibrating and holding out take {LEAST_TOKENS} tokens each, and there are {tokens}: "
                "give more text"
            )
    passes = 0

    def told() -> None:
        nonlocal passes
        passes += 1
        if report is not None:
            report(passes)

    tops = _largest(cfg, floats, texts)
    told()
    clipping, whole = clipping_steps(tops, recipe), whole_steps(tops)
    counts = _counts(cfg, floats, texts, clipping)
    told()
    importance = importances(tops, clipping)
    levels = {WHOLE: (clipping, whole)}
    plain = _nats(cfg, lambda params, known: plain_rule(params, cfg))
    exact = {WHOLE: [plain(floats, (), rows) for rows in (texts, held_out)]}
    told()

    def at(shadowed: tuple[bool, ...]) -> PrefillCalibration:
        return assembled(cfg, floats, counts, levels=levels, shadowed=shadowed, recipe=recipe)

    integer = _nats(cfg, lambda params, known: integer_rule(params, known, cfg))

    @functools.cache
    def loss_of(shadowed: tuple[bool, ...]) -> float:
        told()
        return growth(integer(stored, at(shadowed).layers(WHOLE, cfg), texts), exact[WHOLE][0])

    shadowed, loss = search_shadow(importance, loss_of, most_loss=most_loss, pruned_share=recipe.pruned_share)
    unseen = growth(integer(stored, at(shadowed).layers(WHOLE, cfg), held_out), exact[WHOLE][1])
    losses = {WHOLE: (loss, unseen)}
    for level, (own, params) in (sub_models or {}).items():
        own_tops = _largest(own, params, texts)
        levels[level] = clipping_steps(own_tops, recipe), whole_steps(own_tops)
        rule = _nats(own, lambda params, known, own=own: integer_rule(params, known, own))
        as_served = _nats(own, lambda params, known, own=own: plain_rule(params, own))
        known = at(shadowed).layers(level, own)
        found = [growth(rule(params, known, rows), as_served(params, (), rows)) for rows in (texts, held_out)]
        losses[level] = found[0], found[1]
        told()
    return assembled(cfg, floats, counts, levels=levels, shadowed=shadowed, recipe=recipe, losses=losses)


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
    counts = _counts(cfg, floats, texts, clipping)
    shadowed = most_important(importances(tops, clipping), shadows)
    return assembled(
        cfg,
        floats,
        counts,
        levels={WHOLE: (clipping, whole_steps(tops))},
        shadowed=shadowed,
        recipe=recipe,
        losses={WHOLE: (0.0, 0.0)},
    )


def growth(nats: float, exact: float) -> float:
    """By which share the perplexity is larger, of losses in nats per token."""
    return math.exp(nats - exact) - 1


def _largest(cfg: ModelConfig, params: Params, texts: Sequence[np.ndarray]) -> ByProduct:
    look = jax.jit(functools.partial(channel_tops, cfg=cfg))
    return largest_of([jax.device_get(look(params, row)) for row in texts])


def _counts(cfg: ModelConfig, params: Params, texts: Sequence[np.ndarray], steps: np.ndarray) -> ByProduct:
    """Outliers of each channel of each product over all texts."""
    count = jax.jit(functools.partial(outlier_counts, cfg=cfg))
    each = [jax.device_get(count(params, row, steps)) for row in texts]
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
