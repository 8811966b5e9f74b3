"""Computes Rouge of a generated answer (Lin 2004), by Google's `rouge-score`, which papers report."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxllm.errors import ConfigError

MEASURES = ("rouge1", "rouge2", "rougeL")


def rouge(references: Sequence[str], text: str) -> dict[str, float]:
    """Returns F1 of unigrams, of bigrams and of the longest common subsequence, with stemmed words.

    With several references, each measure is that of the one with the best score.

    Raises:
      ConfigError: `rouge-score` is not installed.
    """
    found = _scorer()(references, text)
    return {measure: float(found[measure].fmeasure) for measure in MEASURES}


def require_rouge() -> None:
    """Checks that `rouge-score` is installed, before any measurement.

    Raises:
      ConfigError: it is not.
    """
    _scorer()


@functools.cache
def _scorer() -> Callable[..., Any]:
    try:
        from rouge_score import rouge_scorer
    except ImportError as error:
        raise ConfigError(
            "tasks that are judged by Rouge need rouge-score: pip install 'jaxllm[eval]', or leave them out"
        ) from error
    return rouge_scorer.RougeScorer(list(MEASURES), use_stemmer=True).score_multi
