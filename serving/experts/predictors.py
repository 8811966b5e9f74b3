"""Predicts the experts of the next layers, to prefetch them before their routers run."""

import abc
from collections.abc import Callable

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


class Predictor(abc.ABC):
    """Predicts experts from the tokens of a pass and the experts of its layers so far.

    Attributes:
      reads_routers: whether the routers of all predicted layers run ahead; else only the next one's.
    """

    reads_routers = False

    def begin(self, tokens: np.ndarray = _UNKNOWN) -> None:
        """Begins a pass of the tokens `[M]`; empty if they are unknown."""
        del tokens

    @abc.abstractmethod
    def probabilities(self, visited: list[np.ndarray], ahead: np.ndarray, steps: int) -> np.ndarray | None:
        """Probabilities of visits at a later layer.

        Args:
          visited: `[M, k]` int per sparse layer of this pass so far, then per predicted layer.
          ahead: `[n, E]`, see `AtExperts`; of the last computed layer.
          steps: number of layers after the last computed one, from 1.

        Returns:
          `[E]`, with sum 1; None without a prediction.
        """

    def worthwhile(self, visited: list[np.ndarray], chances: np.ndarray, steps: int) -> np.ndarray:
        """The experts worth a prefetch, `[E]` bool, by their probabilities `chances` `[E]`."""
        del visited, steps
        return chances > _WORTH_A_READ / len(chances)

    def learn(self, visited: list[np.ndarray]) -> None:
        """Learns from a whole pass, `[M, k]` per sparse layer."""
        del visited


class PathPredictor(Predictor):
    """Predicts by the experts of the two layers before (EdgeMoE, section 3.3), and learns from each pass."""

    def __init__(self, counts: PathCounts, tokens: TokenExperts) -> None:
        del tokens
        self._counts = PathCounts(
            counts.alone.copy(), counts.after_one.copy(), counts.pairs, counts.after_two.copy()
        )

    def probabilities(self, visited: list[np.ndarray], ahead: np.ndarray, steps: int) -> np.ndarray:  # noqa: D102
        del ahead, steps
        layer = len(visited)
        before = visited[-1] if layer else None
        return next_experts(self._counts, layer, before, visited[-2] if layer > 1 else None)

    def learn(self, visited: list[np.ndarray]) -> None:  # noqa: D102
        learn(self._counts, np.stack(visited))


class TokenPredictor(Predictor):
    """Predicts by tokens: a token mostly visits the same experts in any text."""

    def __init__(self, counts: PathCounts, tokens: TokenExperts) -> None:
        self._counts, self._experts, self._tokens = counts, tokens, _UNKNOWN

    def begin(self, tokens: np.ndarray = _UNKNOWN) -> None:  # noqa: D102
        self._tokens = tokens

    def probabilities(  # noqa: D102
        self, visited: list[np.ndarray], ahead: np.ndarray, steps: int
    ) -> np.ndarray | None:
        del ahead, steps
        layer = len(visited)
        found = self._experts.chances(layer, self._tokens, self._counts.experts)
        return next_experts(self._counts, layer) if found is None else found


class RouterPredictor(TokenPredictor):
    """Predicts by the next layers' routers, applied to this layer's hidden states, and weighted by the
    visits of tokens in any text; for the first layers by tokens only."""

    reads_routers = True

    def probabilities(  # noqa: D102
        self, visited: list[np.ndarray], ahead: np.ndarray, steps: int
    ) -> np.ndarray | None:
        if len(visited) < steps:
            # Before the first layer no router has run.
            return super().probabilities(visited, ahead, steps)
        chances = ahead[steps - 1]
        known = self._experts.chances(len(visited), self._tokens, self._counts.experts)
        if known is None:
            return chances
        both = chances * (known + _UNSEEN)
        return both / max(float(both.sum()), 1e-30)

    def worthwhile(  # noqa: D102
        self, visited: list[np.ndarray], chances: np.ndarray, steps: int
    ) -> np.ndarray:
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


class FrequencyPredictor(Predictor):
    """Predicts the most visited experts."""

    def __init__(self, counts: PathCounts, tokens: TokenExperts) -> None:
        del tokens
        self._counts = counts

    def probabilities(self, visited: list[np.ndarray], ahead: np.ndarray, steps: int) -> np.ndarray:  # noqa: D102
        del ahead, steps
        return next_experts(self._counts, len(visited))


class NoPredictor(Predictor):
    """Predicts none: experts are read when they are visited."""

    def __init__(self, counts: PathCounts, tokens: TokenExperts) -> None:
        del counts, tokens

    def probabilities(self, visited: list[np.ndarray], ahead: np.ndarray, steps: int) -> None:  # noqa: D102
        del visited, ahead, steps


_MAKERS: dict[str, Callable[[PathCounts, TokenExperts], Predictor]] = dict(
    zip(
        PREDICTORS,
        (RouterPredictor, PathPredictor, TokenPredictor, FrequencyPredictor, NoPredictor),
        strict=True,
    )
)


def make_predictor(name: str, counts: PathCounts, tokens: TokenExperts) -> Predictor:
    """The predictor named `name` in `PREDICTORS`, from statistics of a text."""
    return _MAKERS[name](counts, tokens)
