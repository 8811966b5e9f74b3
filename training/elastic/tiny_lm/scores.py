"""Evaluates a trained tiny LM: scores for prompts, and its accuracy on held-out data."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.elastic.compression import marked, pooled
from jaxllm.elastic.slo import SLOS, Slo
from jaxllm.models import tiny_lm as tlm
from jaxllm.models.tiny_lm import TlmConfig
from jaxllm.tasks.questions import Question
from jaxllm.tasks.tiny_reader import TinyReader
from jaxllm.training.elastic.tiny_lm.batches import DecisionRows, ScoreBatch
from jaxllm.training.elastic.tiny_lm.self_labels import Answers, allowed_choices, lightest
from jaxllm.training.loop.checkpoints import Params

# Number of rows that are scored in one dispatch.
_SCORED_ROWS = 32


def keep_scores(
    cfg: TlmConfig, params: Mapping[str, Any], reader: TinyReader, questions: Sequence[Question]
) -> list[np.ndarray]:
    """Returns the probability of keeping each token of each question's prompt, under the loosest SLO: `[T]`
    float64 per question (see `TinyReader.keep_likely`)."""
    rows = [reader.rows(each.prompt) for each in questions]
    tokens, mask = (np.concatenate([row[i] for row in rows]) for i in range(2))
    tokens = marked(tokens, SLOS[0], reader.mark_ids)
    logits = np.concatenate(list(_in_batches(_scorer(cfg), params, tokens, mask)))
    found, at = [], 0
    for question, (row, real) in zip(questions, rows, strict=True):
        found.append(reader.keep_likely(question.prompt, logits[at : at + len(row)], real))
        at += len(row)
    return found


def keep_metrics(
    cfg: TlmConfig, params: Mapping[str, Any], batches: Iterable[ScoreBatch]
) -> dict[str, float]:
    """Returns accuracy on labelled tokens, kept if that is more likely than not, and precision, recall and
    F1 of kept ones; `majority` is the accuracy, `kept_f1` the F1, of giving all tokens one label."""
    score = _scorer(cfg)
    counts = np.zeros((2, 2))
    for batch in batches:
        chosen = np.asarray(score(params, batch.tokens, batch.mask)) > 0
        real = batch.weights > 0
        places = (batch.labels[real] > 0.5).astype(int), chosen[real].astype(int)
        np.add.at(counts, places, batch.weights[real])
    (_, wrong), (missed, right) = counts
    total, kept = max(counts.sum(), 1e-9), max(missed + right, 1e-9)
    shares = {
        "accuracy": counts.trace() / total,
        "precision": right / max(right + wrong, 1e-9),
        "recall": right / kept,
        "f1": 2 * right / max(2 * right + wrong + missed, 1e-9),
        "majority": max(kept, total - kept) / total,
        "kept_f1": 2 * kept / (kept + total),
    }
    return {name: round(float(each), 4) for name, each in shares.items()}


def decided(
    params: Params, tokens: jax.Array, mask: jax.Array, *, cfg: TlmConfig, dtype: DTypeLike = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """The decision of questions of R rows each, in one piece as in service.

    Args:
      params: of the tiny LM.
      tokens: `[B, R, T]` int32.
      mask: `[B, R, T]` bool.
      cfg: the tiny LM.
      dtype: of the activations.

    Returns:
      Logits of the levels `[B, levels]` and of the prompt's ratios `[B, ratios]`, float32.
    """
    flat = tokens.shape[0] * tokens.shape[1], tokens.shape[2]
    logits = tlm.decide(params, tokens.reshape(flat), mask.reshape(flat), cfg=cfg, dtype=dtype)
    model, share = (pooled(each.reshape(*tokens.shape[:2], -1)) for each in logits)
    return model, share


def decisions(cfg: TlmConfig, params: Mapping[str, Any], rows: DecisionRows) -> np.ndarray:
    """The tiny LM's choices `[N, S, 2]` for all questions under all objectives of some rows."""
    decide = jax.jit(functools.partial(decided, cfg=cfg))
    chosen = []
    for batch in rows.held_out():
        likely = [np.asarray(each).argmax(-1) for each in decide(params, batch.tokens, batch.mask)]
        chosen.append(np.stack(likely, axis=-1)[batch.weights[:, 0] > 0])
    ordered = np.empty_like(rows.labels)
    ordered[rows.order] = np.concatenate(chosen).reshape(rows.labels.shape)
    return ordered


def decision_metrics(chosen: np.ndarray, labels: np.ndarray, slos: Sequence[Slo]) -> dict[str, Any]:
    """Returns shares of decisions with the labelled level, the labelled prompt ratio and both, and both by
    SLO.

    `majority` is the share for a choice by only the SLO, the commonest label of each.

    Args:
      chosen, labels: `[N, S, 2]` int.
      slos: S objectives.
    """
    right = chosen == labels
    both = right.all(-1)
    pairs = labels @ np.array([1 << 16, 1])
    commonest = sum(np.unique(column, return_counts=True)[1].max() for column in pairs.T)
    by_slo = {str(slo): round(float(each), 4) for slo, each in zip(slos, both.mean(0), strict=True)}
    shares = {
        "accuracy": both.mean(),
        "model_accuracy": right[..., 0].mean(),
        "prompt_accuracy": right[..., 1].mean(),
        "majority": commonest / pairs.size,
    }
    return {name: round(float(each), 4) for name, each in shares.items()} | {"accuracy_by_slo": by_slo}


def answer_metrics(
    answers: Answers,
    chosen: np.ndarray,
    slos: Sequence[Slo],
    levels: Sequence[int],
    prompt_ratios: Sequence[float],
) -> dict[str, dict[str, float]]:
    """Returns shares of questions that decisions answer right within each SLO.

    Args:
      answers: answers to N questions.
      chosen: `[N, S, 2]` int, the decisions; one that does not meet its SLO is replaced by the default.
      slos: S objectives.
      levels, prompt_ratios: meanings of the classes.

    Returns:
      The share of questions answered right with the choice that was `decided`, the `default`, and the
      `best` choice for each, by SLO.
    """
    correct, shares = answers.correct, answers.shares
    choices = (slos, levels, prompt_ratios, shares)
    default = lightest(np.zeros_like(correct), *choices)
    questions, objectives = np.ogrid[: len(chosen), : len(slos)]
    meets = allowed_choices(*choices)[questions, objectives, chosen[..., 0], chosen[..., 1]]
    decisions = {
        "decided": np.where(meets[..., None], chosen, default),
        "default": default,
        "best": lightest(correct, *choices),
    }
    right = {name: correct[questions, each[..., 0], each[..., 1]].mean(0) for name, each in decisions.items()}
    return {
        str(slo): {name: round(float(each[number]), 4) for name, each in right.items()}
        for number, slo in enumerate(slos)
    }


@functools.lru_cache(maxsize=4)
def _scorer(cfg: TlmConfig) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(tlm.score, cfg=cfg))


def _in_batches(
    score: Callable[..., jax.Array], params: Mapping[str, Any], tokens: np.ndarray, mask: np.ndarray
) -> Iterable[np.ndarray]:
    """Scores of rows `[R, T]`, some rows at a time, in one dispatch."""
    for first in range(0, len(tokens), _SCORED_ROWS):
        places = np.minimum(np.arange(first, first + _SCORED_ROWS), len(tokens) - 1)
        yield np.asarray(score(params, tokens[places], mask[places]))[: len(tokens) - first]
