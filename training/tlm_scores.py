"""What a trained tiny LM says: scores for prompts, and how right it is on what was held out."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.elastic.compression import spread, word_count, word_scores
from jaxllm.elastic.reading import marked, read_scores, reading_rows
from jaxllm.elastic.slo import SLOS, Slo
from jaxllm.models import tlm
from jaxllm.models.tlm import TlmConfig
from jaxllm.tasks.droppable import prompt_tokens
from jaxllm.tasks.shortened import Question
from training.self_labels import Answers, allowed_choices, lightest
from training.tlm_batches import DecisionRows, ScoreBatch, TinyReader

# Rows that are scored in one dispatch.
_SCORED_ROWS = 32


def keep_scores(
    cfg: TlmConfig, params: Mapping[str, Any], reader: TinyReader, questions: Sequence[Question]
) -> list[np.ndarray]:
    """How likely each token of each question's prompt should be kept: `[T]` float64 per question.

    A word has the mean probability of its tokens as the tiny LM reads them, under the loosest SLO, and all of
    the large model's tokens of the word have that.
    """
    prompts = [prompt_tokens(reader.tokenizer, each.example, reader=reader.own) for each in questions]
    rows = [reading_rows(prompt.ids, reader.row_tokens) for prompt in prompts]
    tokens, mask = (np.concatenate([row[i] for row in rows]) for i in range(2))
    tokens = marked(tokens, SLOS[0], reader.mark_ids)
    logits = np.concatenate(list(_in_batches(_scorer(cfg), params, tokens, mask)))
    found, at = [], 0
    for question, prompt, (row, real) in zip(questions, prompts, rows, strict=True):
        likely = 1 / (1 + np.exp(-read_scores(logits[at : at + len(row)], real).astype(np.float64)))
        at += len(row)
        count = word_count(prompt.text, prompt.boundaries)
        found.append(spread(word_scores(likely, prompt.words, count), question.prompt.words))
    return found


def keep_metrics(
    cfg: TlmConfig, params: Mapping[str, Any], batches: Iterable[ScoreBatch]
) -> dict[str, float]:
    """How well labels of tokens are found, where more than even odds keep one: accuracy, and precision,
    recall and F1 of what is kept; `majority` is the accuracy, `kept_f1` the F1, of giving all one label."""
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


def decisions(cfg: TlmConfig, params: Mapping[str, Any], rows: DecisionRows) -> np.ndarray:
    """The tiny LM's choices `[N, S, 2]` for all questions under all objectives of some rows."""
    decide = jax.jit(functools.partial(tlm.decide, cfg=cfg))
    chosen = []
    for batch in rows.held_out():
        likely = [np.asarray(each).argmax(-1) for each in decide(params, batch.tokens, batch.mask)]
        chosen.append(np.stack(likely, axis=-1)[batch.weights[:, 0] > 0])
    return np.concatenate(chosen).reshape(rows.labels.shape)


def decision_metrics(chosen: np.ndarray, labels: np.ndarray, slos: Sequence[Slo]) -> dict[str, Any]:
    """How often the labelled level, the labelled prompt and both are decided on, and both by SLO.

    `majority` is how often both are right for who decides by the SLO alone, and knows the commonest label of
    each.

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
    """What decisions are worth: how many questions are answered right within each SLO.

    Args:
      answers: of N questions.
      chosen: `[N, S, 2]` int, the decisions; one that does not meet its SLO is replaced by the default.
      slos: S objectives.
      levels, prompt_ratios: what the classes stand for.

    Returns:
      By SLO the share of questions answered right with what was `decided`, with the `default`, and with what
      is `best` for each.
    """
    correct, shares = answers.correct, answers.shares
    choices = (slos, levels, prompt_ratios, shares)
    default = lightest(np.zeros_like(correct), *choices)
    questions, objectives = np.ogrid[: len(chosen), : len(slos)]
    meets = allowed_choices(*choices)[questions, objectives, chosen[..., 0], chosen[..., 1]]
    ways = {
        "decided": np.where(meets[..., None], chosen, default),
        "default": default,
        "best": lightest(correct, *choices),
    }
    right = {name: correct[questions, way[..., 0], way[..., 1]].mean(0) for name, way in ways.items()}
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
    """Scores of rows `[R, T]`, some rows at a time, in one graph."""
    for first in range(0, len(tokens), _SCORED_ROWS):
        places = np.minimum(np.arange(first, first + _SCORED_ROWS), len(tokens) - 1)
        yield np.asarray(score(params, tokens[places], mask[places]))[: len(tokens) - first]
