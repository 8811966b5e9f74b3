"""Measures models by texts: perplexity, agreement of two models, and use of experts.

Agreement of greedy choices is a lower bound of a drafter's accuracy. A token's activation path is the most
likely expert of each sparse layer, in order: experts are predictable if few paths have most of a text's
tokens (EdgeMoE, arXiv 2308.14352, section 3.3).
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.evaluation.intervals import Interval, perplexity_interval
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.runners.scorer import Scorer
from jaxllm.serving.speculation.drafters import high_planes_runner

Window = tuple[list[int], list[int]]
# An expert with less than this share of an even one is counted as dead.
DEAD_SHARE = 0.05


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
      level: the level that predicted, in percent.
      interval: the perplexity's 95 % interval (see `jaxllm.serving.evaluation.intervals`).
    """

    perplexity: float
    bits_per_byte: float
    tokens: int
    documents: int
    window_tokens: int
    level: int
    interval: Interval


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


@dataclasses.dataclass(frozen=True)
class ExpertUse:
    """The use of experts by a text.

    Attributes:
      shares: share of visits to each expert, for each sparse layer; 1 / E for even use.
      least, most: the minimum and maximum share over all layers, relative to an even one.
      dead: number of experts with less than `DEAD_SHARE` of an even share, over all layers.
      paths: number of distinct activation paths seen.
      possible_paths: number of possible paths.
      top_paths_share: share of the tokens on the most frequent tenth of the paths seen; 0.1 if all were
        equally frequent.
      tokens: number of tokens of the text.
    """

    shares: tuple[tuple[float, ...], ...]
    least: float
    most: float
    dead: int
    paths: int
    possible_paths: int
    top_paths_share: float
    tokens: int


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
    losses = -np.concatenate(
        [scorer.score(*each).astype(np.float64) for each in _reported(windows, progress)]
    )
    loss = float(losses.sum())
    size_bytes = sum(len(text.encode()) for text in documents)
    return Perplexity(
        perplexity=math.exp(loss / total),
        bits_per_byte=loss / math.log(2) / size_bytes,
        tokens=total,
        documents=len(documents),
        window_tokens=window,
        level=engine.level,
        interval=perplexity_interval(losses),
    )


def windows_of(engine: Engine, documents: Sequence[str], window: int) -> list[Window]:
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
    counts, total = np.zeros(3, np.int64), sum(len(targets) for _, targets in windows)
    for tokens, targets in _reported(windows, progress):
        first, second = (scorer.predict(tokens, targets)[1] for scorer in scorers)
        wanted = np.asarray(targets)
        counts += [np.sum(first == second), np.sum(first == wanted), np.sum(second == wanted)]
    agreement, right, other_right = (counts / total).tolist()
    return Agreement(agreement, right, other_right, total)


def expert_use(engine: Engine, documents: Sequence[str], *, progress: Progress | None = None) -> ExpertUse:
    """Counts the experts that the tokens of texts visit, each text fed whole or in windows of the context.

    Raises:
      ConfigError: the model has no experts, or the text no tokens.
    """
    cfg = engine.cfg
    if not cfg.experts:
        raise ConfigError(f"{engine.model.bundle.layout.name} has no experts whose use could be counted")
    length = engine.options.context_tokens
    windows = windows_of(engine, documents, length)
    scorer = Scorer(engine.runner)
    scorer.prepare_routing(length, progress)
    total = sum(len(tokens) for tokens, _ in windows)
    sparse = sum(cfg.sparse_layers)
    visits, paths = np.zeros((sparse, cfg.experts), np.int64), Counter()
    for tokens, _ in _reported(windows, progress):
        row, starts = np.zeros((1, length), np.int32), np.zeros((1, length), np.int32)
        row[0, : len(tokens)] = tokens
        # Padding is a document of its own.
        starts[0, len(tokens) :] = len(tokens)
        ids = scorer.route(row, starts)[:, 0, : len(tokens)]
        for layer in range(sparse):
            visits[layer] += np.bincount(ids[layer].reshape(-1), minlength=cfg.experts)
        paths.update(map(tuple, ids[:, :, 0].T.tolist()))
    shares = visits / visits.sum(axis=1, keepdims=True)
    counts = sorted(paths.values(), reverse=True)
    tenth = counts[: max(1, len(counts) // 10)]
    return ExpertUse(
        shares=tuple(tuple(round(share, 4) for share in layer) for layer in shares.tolist()),
        least=float(shares.min() * cfg.experts),
        most=float(shares.max() * cfg.experts),
        dead=int(np.sum(shares * cfg.experts < DEAD_SHARE)),
        paths=len(counts),
        possible_paths=cfg.experts**sparse,
        top_paths_share=sum(tenth) / total,
        tokens=total,
    )


def _reported(windows: Sequence[Window], progress: Progress | None) -> Iterator[Window]:
    """Windows, each reported to `progress` once it is done."""
    done, total = 0, sum(len(tokens) for tokens, _ in windows)
    for window in windows:
        yield window
        done += len(window[0])
        if progress is not None:
            progress("score", done, total)
