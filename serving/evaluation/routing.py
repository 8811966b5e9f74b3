"""Measures how a text uses the experts of a mixture, and the activation paths through its layers.

A token's activation path is the most likely expert of each sparse layer, in order. Experts are predictable
if few paths have most of a text's tokens (EdgeMoE, arXiv 2308.14352, section 3.3).
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.evaluation.perplexity import windows_of
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.runners.scorer import Scorer

# An expert with less than this share of an even one is counted as dead.
DEAD_SHARE = 0.05


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
    visits, paths, done = np.zeros((sparse, cfg.experts), np.int64), Counter(), 0
    for tokens, _ in windows:
        row, starts = np.zeros((1, length), np.int32), np.zeros((1, length), np.int32)
        row[0, : len(tokens)] = tokens
        # Padding is a document of its own.
        starts[0, len(tokens) :] = len(tokens)
        ids = scorer.route(row, starts)[:, 0, : len(tokens)]
        for layer in range(sparse):
            visits[layer] += np.bincount(ids[layer].reshape(-1), minlength=cfg.experts)
        paths.update(map(tuple, ids[:, :, 0].T.tolist()))
        done += len(tokens)
        if progress is not None:
            progress("score", done, total)
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
