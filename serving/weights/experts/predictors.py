"""Predicts which experts will be visited next, so that they are read before the router has spoken."""

import abc
from collections.abc import Callable

import numpy as np

from jaxllm.experts.activation_paths import PathCounts, learn, next_experts
from jaxllm.experts.token_experts import TokenExperts
from serving.weights.experts.options import PREDICTORS

_UNKNOWN = np.zeros(0, np.int32)
# By statistics nobody is read who is foreseen little more than others: who leaves may be wanted as well.
_WORTH_READING = 1.5


class Predictor(abc.ABC):
    """Foresees experts. A pass says what it will read, and at each sparse layer what its router decided."""

    def begin(self, tokens: np.ndarray = _UNKNOWN) -> None:
        """What is foreseen from here on is of a pass of these tokens `[M]`, none where nobody knows them."""
        del tokens

    @abc.abstractmethod
    def probabilities(self, visited: list[np.ndarray], ahead: np.ndarray, steps: int) -> np.ndarray | None:
        """How probable visits are at a later layer.

        Args:
          visited: `[M, k]` int of each sparse layer of this pass so far, and of foreseen ones behind.
          ahead: `[E]`, see `AtExperts`; of the last layer that was computed.
          steps: how many layers behind that, from 1.

        Returns:
          `[E]`, which sums to one; None where it foresees nothing.
        """

    def worthwhile(self, visited: list[np.ndarray], chances: np.ndarray, steps: int) -> np.ndarray:
        """Whom of a layer it is worth to read before they are asked for, `[E]` bool, by what `probabilities`
        said so many `steps` behind `visited`."""
        del visited, steps
        return chances > _WORTH_READING / len(chances)

    def learn(self, visited: list[np.ndarray]) -> None:
        """Sees a whole pass, `[M, k]` of each sparse layer."""
        del visited


class PathPredictor(Predictor):
    """By the experts of the two layers before (EdgeMoE, section 3.3); adapts to what is read."""

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
    """By what is read: a token mostly visits whom it visited in another text."""

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
    """By the next router, applied to this layer's hidden states; of the first layer, and of those that are
    further off than a router sees, by the tokens."""

    def probabilities(  # noqa: D102
        self, visited: list[np.ndarray], ahead: np.ndarray, steps: int
    ) -> np.ndarray | None:
        return ahead if visited and steps == 1 else super().probabilities(visited, ahead, steps)

    def worthwhile(  # noqa: D102
        self, visited: list[np.ndarray], chances: np.ndarray, steps: int
    ) -> np.ndarray:
        # A router chooses its best, however little better they are.
        by_router = visited and steps == 1
        return np.ones(len(chances), bool) if by_router else super().worthwhile(visited, chances, steps)


class FrequencyPredictor(Predictor):
    """Whoever is visited most, whatever was."""

    def __init__(self, counts: PathCounts, tokens: TokenExperts) -> None:
        del tokens
        self._counts = counts

    def probabilities(self, visited: list[np.ndarray], ahead: np.ndarray, steps: int) -> np.ndarray:  # noqa: D102
        del ahead, steps
        return next_experts(self._counts, len(visited))


class NoPredictor(Predictor):
    """Foresees nothing: experts are read when they are visited."""

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
    """A predictor by its name among `PREDICTORS`, from statistics of a text."""
    return _MAKERS[name](counts, tokens)
