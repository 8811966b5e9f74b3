"""Measures the perplexity of a text under an engine's model."""

import dataclasses
import math
from collections.abc import Sequence

from jaxllm.errors import ConfigError
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.runners.scorer import Scorer
from jaxllm.serving.speculation.drafters import high_planes_runner


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """The perplexity of a text.

    Attributes:
      perplexity: exp of the mean negative log-likelihood per predicted token.
      bits_per_byte: the same loss per byte of the text, comparable between tokenizers (except for a
        document's first token, which has no loss if the tokenizer adds no BOS).
      tokens: number of predicted tokens (the first of each document is given, not predicted).
      documents: number of documents.
      window_tokens: maximum number of tokens of context of a prediction.
    """

    perplexity: float
    bits_per_byte: float
    tokens: int
    documents: int
    window_tokens: int


def perplexity(
    engine: Engine,
    documents: Sequence[str],
    *,
    window_tokens: int = 0,
    high_planes: bool = False,
    progress: Progress | None = None,
) -> Perplexity:
    """Measures the perplexity of `documents`, each split into windows without overlap.

    Within a window a token is predicted from all tokens before it; every token but a document's first
    is predicted once. The tokenizer's own special tokens (a BOS) start each document.

    Args:
      engine: the model.
      documents: texts, scored separately.
      window_tokens: window length; 0 for the engine's context.
      high_planes: whether to predict with only the high planes of nested weights, as in self-drafting.
      progress: callback for ("score", tokens done, tokens in all).

    Raises:
      ConfigError: the window does not fit, nothing is left to predict, or `high_planes` is requested and
        weights are not nested, or not resident.
    """
    window = window_tokens or engine.options.context_tokens
    windows = windows_of(engine, documents, window)
    total = sum(len(targets) for _, targets in windows)
    runner = high_planes_runner(engine.model) if high_planes else engine.runner
    scorer = Scorer(runner)
    scorer.prepare(window, progress)
    loss, done = 0.0, 0
    for tokens, targets in windows:
        loss -= float(scorer.score(tokens, targets).sum(dtype="float64"))
        done += len(targets)
        if progress is not None:
            progress("score", done, total)
    size_bytes = sum(len(text.encode()) for text in documents)
    return Perplexity(
        perplexity=math.exp(loss / total),
        bits_per_byte=loss / math.log(2) / size_bytes,
        tokens=total,
        documents=len(documents),
        window_tokens=window,
    )


def windows_of(engine: Engine, documents: Sequence[str], window: int) -> list[tuple[list[int], list[int]]]:
    """Texts as (tokens, the token after each), split into windows without overlap.

    Raises:
      ConfigError: the window does not fit, or nothing is left to predict.
    """
    if not 1 <= window <= engine.options.context_tokens:
        raise ConfigError(f"the window must be in [1, {engine.options.context_tokens}] tokens, got {window}")
    windows = []
    for text in documents:
        ids = engine.tokenizer.encode(text)
        for at in range(0, len(ids) - 1, window):
            targets = ids[at + 1 : at + window + 1]
            windows.append((ids[at : at + len(targets)], targets))
    if not windows:
        raise ConfigError("the text has no token to predict; give a longer one")
    return windows
