"""Measures how often two models choose the same next token, a lower bound of a drafter's accuracy."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.evaluation.perplexity import windows_of
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.runners.scorer import Scorer


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Greedy choices of two models after the same tokens of a text.

    Attributes:
      agreement: share of positions where both choose the same token.
      right: share of positions where the first model chooses the text's token.
      other_right: share of positions where the second model does.
      tokens: number of compared positions.
    """

    agreement: float
    right: float
    other_right: float
    tokens: int


def greedy_agreement(
    engine: Engine,
    other: Engine,
    documents: Sequence[str],
    *,
    window_tokens: int = 0,
    progress: Progress | None = None,
) -> Agreement:
    """Compares the greedy next tokens of two models, each given the text so far.

    Args:
      engine, other: models with the same tokenizer.
      documents: texts, scored separately.
      window_tokens: window length; 0 for the shorter of the engines' contexts.
      progress: callback for ("score", tokens done, tokens in all).

    Raises:
      ConfigError: the tokenizers differ, the window does not fit, or nothing is left to predict.
    """
    if not engine.tokenizer.same_tokens(other.tokenizer):
        raise ConfigError(
            "the two models have different tokenizers: their tokens cannot be compared; take a model of the "
            "same tokenizer"
        )
    shorter = min(engine.options.context_tokens, other.options.context_tokens)
    windows = windows_of(engine, documents, window_tokens or shorter)
    scorers = [Scorer(each.runner) for each in (engine, other)]
    for scorer in scorers:
        scorer.prepare(window_tokens or shorter, progress)
    counts, done, total = np.zeros(3, np.int64), 0, sum(len(targets) for _, targets in windows)
    for tokens, targets in windows:
        first, second = (scorer.predict(tokens, targets)[1] for scorer in scorers)
        wanted = np.asarray(targets)
        counts += [np.sum(first == second), np.sum(first == wanted), np.sum(second == wanted)]
        done += len(targets)
        if progress is not None:
            progress("score", done, total)
    agreement, right, other_right = (counts / total).tolist()
    return Agreement(agreement, right, other_right, total)
