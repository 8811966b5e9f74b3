"""Who will be visited next: what is read before the router has spoken."""

import abc
from collections.abc import Callable

import numpy as np

from jaxllm.experts.activation_paths import PathCounts, learn, next_experts
from serving.experts.options import PREDICTORS


class Predictor(abc.ABC):
    """Foresees experts. A pass says at each sparse layer what its router decided."""

    @abc.abstractmethod
    def probabilities(self, visited: list[np.ndarray], ahead: np.ndarray, steps: int) -> np.ndarray | None:
        """How probable visits are at a later layer.

        Args:
          visited: `[M, k]` int of each sparse layer of this pass so far, and of foreseen ones behind.
          ahead: `[E]`, see `AtExperts`; of the last layer that was computed.
          steps: how many layers behind that, from 1.

        Returns:
          `[E]`; None where it foresees nothing.
        """

    def learn(self, visited: list[np.ndarray]) -> None:
        """Sees a whole pass, `[M, k]` of each sparse layer."""
        del visited


class PathPredictor(Predictor):
    """By the experts of the two layers before (EdgeMoE, section 3.3); adapts to what is read."""

    def __init__(self, counts: PathCounts) -> None:
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


class RouterPredictor(Predictor):
    """By the next router, applied to this layer's hidden states."""

    def __init__(self, counts: PathCounts) -> None:
        self._counts = counts

    def probabilities(  # noqa: D102
        self, visited: list[np.ndarray], ahead: np.ndarray, steps: int
    ) -> np.ndarray | None:
        if not visited:
            return next_experts(self._counts, 0)
        return ahead if steps == 1 else None


class FrequencyPredictor(Predictor):
    """Whoever is visited most, whatever was."""

    def __init__(self, counts: PathCounts) -> None:
        self._counts = counts

    def probabilities(self, visited: list[np.ndarray], ahead: np.ndarray, steps: int) -> np.ndarray:  # noqa: D102
        del ahead, steps
        return next_experts(self._counts, len(visited))


class NoPredictor(Predictor):
    """Foresees nothing: experts are read when they are visited."""

    def __init__(self, counts: PathCounts) -> None:
        del counts

    def probabilities(self, visited: list[np.ndarray], ahead: np.ndarray, steps: int) -> None:  # noqa: D102
        del visited, ahead, steps


_MAKERS: dict[str, Callable[[PathCounts], Predictor]] = dict(
    zip(PREDICTORS, (RouterPredictor, PathPredictor, FrequencyPredictor, NoPredictor), strict=True)
)


def make_predictor(name: str, counts: PathCounts) -> Predictor:
    """A predictor by its name among `PREDICTORS`, from statistics of a text."""
    return _MAKERS[name](counts)
