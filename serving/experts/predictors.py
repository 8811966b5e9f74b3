"""Predicts the experts of the next layers, to prefetch them before their routers run."""

import dataclasses

import numpy as np

from jaxllm.experts.prediction import PathCounts, TokenExperts, learn, next_experts
from jaxllm.serving.ground.expert_options import PREDICTORS

_UNKNOWN = np.zeros(0, np.int32)
# Minimum probability, in multiples of the mean, that is worth a prefetch: the evicted expert may be needed,
# too.
_WORTH_A_READ = 1.5
# Probability of an expert that a token did not visit, besides those that it did. Two layers ahead routers
# predict fewer visits than tokens do.
_UNSEEN = 0.05
# Total probability of the prefetched experts of a layer after the next one.
_MASS = 0.5


class Predictor:
    """Predicts experts from the tokens of a pass and the experts of its layers so far; the base class none,
    so that experts are read when they are visited.

    Args:
      counts, tokens: statistics of a text.

    Attributes:
      reads_routers: whether the routers of all predicted layers run ahead; else only the next one's.
    """

    reads_routers = False

    def __init__(self, counts: PathCounts, tokens: TokenExperts) -> None:
        self._counts, self._experts, self._tokens = counts, tokens, _UNKNOWN

    def begin(self, tokens: np.ndarray = _UNKNOWN) -> None:
        """Begins a pass of the tokens `[M]`; empty if they are unknown."""
        self._tokens = tokens

    def probabilities(self, visited: list[np.ndarray], ahead: np.ndarray, steps: int) -> np.ndarray | None:
        """Probabilities of visits at a later layer.

        Args:
          visited: `[M, k]` int per sparse layer of this pass so far, then per predicted layer.
          ahead: `[n, E]`, see `AtExperts`; of the last computed layer.
          steps: number of layers after the last computed one, from 1.

        Returns:
          `[E]`, with sum 1; None without a prediction.
        """
        return None

    def worthwhile(self, visited: list[np.ndarray], chances: np.ndarray, steps: int) -> np.ndarray:
        """The experts worth a prefetch, `[E]` bool, by their probabilities `chances` `[E]`."""
        return chances > _WORTH_A_READ / len(chances)

    def learn(self, visited: list[np.ndarray]) -> None:
        """Learns from a whole pass, `[M, k]` per sparse layer."""


class FrequencyPredictor(Predictor):
    """Predicts the most visited experts."""

    def probabilities(self, visited: list[np.ndarray], ahead: np.ndarray, steps: int) -> np.ndarray | None:  # noqa: D102
        return next_experts(self._counts, len(visited))


class PathPredictor(Predictor):
    """Predicts by the experts of the two layers before (EdgeMoE, section 3.3), and learns from each pass."""

    def __init__(self, counts: PathCounts, tokens: TokenExperts) -> None:
        own = {name: getattr(counts, name).copy() for name in ("alone", "after_one", "after_two")}
        super().__init__(dataclasses.replace(counts, **own), tokens)

    def probabilities(self, visited: list[np.ndarray], ahead: np.ndarray, steps: int) -> np.ndarray | None:  # noqa: D102
        two_before, before = (None, None, *visited)[-2:]
        return next_experts(self._counts, len(visited), before, two_before)

    def learn(self, visited: list[np.ndarray]) -> None:  # noqa: D102
        learn(self._counts, np.stack(visited))


class TokenPredictor(Predictor):
    """Predicts by tokens: a token mostly visits the same experts in any text."""

    def probabilities(self, visited: list[np.ndarray], ahead: np.ndarray, steps: int) -> np.ndarray | None:  # noqa: D102
        found = self._experts.chances(len(visited), self._tokens, self._counts.experts)
        return next_experts(self._counts, len(visited)) if found is None else found


class RouterPredictor(TokenPredictor):
    """Predicts by the next layers' routers, applied to this layer's hidden states, and weighted by the
    visits of tokens in any text; for the first layers by tokens only."""

    reads_routers = True

    def probabilities(self, visited: list[np.ndarray], ahead: np.ndarray, steps: int) -> np.ndarray | None:  # noqa: D102
        if len(visited) < steps:
            # Before the first layer no router has run.
            return super().probabilities(visited, ahead, steps)
        chances = ahead[steps - 1]
        known = self._experts.chances(len(visited), self._tokens, self._counts.experts)
        if known is None:
            return chances
        both = chances * (known + _UNSEEN)
        return both / max(float(both.sum()), 1e-30)

    def worthwhile(self, visited: list[np.ndarray], chances: np.ndarray, steps: int) -> np.ndarray:  # noqa: D102
        if len(visited) < steps:
            return super().worthwhile(visited, chances, steps)
        if steps == 1:
            # A router chooses its best experts by any difference.
            return np.ones(len(chances), bool)
        # Further ahead those that together have most of the probability.
        order = np.argsort(-chances, kind="stable")
        before = np.cumsum(chances[order]) - chances[order]
        worth = np.zeros(len(chances), bool)
        worth[order[before < _MASS]] = True
        return worth


_CLASSES = (RouterPredictor, PathPredictor, TokenPredictor, FrequencyPredictor, Predictor)


def make_predictor(name: str, counts: PathCounts, tokens: TokenExperts) -> Predictor:
    """The predictor named `name` in `PREDICTORS`, from statistics of a text."""
    return _CLASSES[PREDICTORS.index(name)](counts, tokens)
