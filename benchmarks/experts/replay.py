"""Judges predictors and eviction policies by the experts that a model visited."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxllm.bundle.experts import read_token_experts
from jaxllm.experts.activation_paths import PathCounts
from jaxllm.experts.eviction import Policy, Residents
from jaxllm.experts.token_experts import TokenExperts
from jaxllm.sampling import Sampling
from serving.engine import Engine
from serving.request import GenerationConfig
from serving.weights.experts.predictors import Predictor, make_predictor

_UNKNOWN = np.zeros(0, np.int32)
COMPARED = ("paths", "router", "tokens", "frequency")


@dataclasses.dataclass(frozen=True)
class Watched:
    """The visits of a model's tokens to experts, and their predictions.

    Attributes:
      visits: `[L_sparse, M, k]` int, of M decoded tokens.
      hits: by predictor, the share of each layer's visits that it predicted when the layer before was
        computed, of the first layer when the token was known.
    """

    visits: np.ndarray
    hits: Mapping[str, np.ndarray]


class _Watching(Predictor):
    """Asks all predictors at each layer of a decoded token, and predicts nothing itself."""

    def __init__(self, counts: PathCounts, tokens: TokenExperts) -> None:
        self._all = {name: make_predictor(name, counts, tokens) for name in COMPARED}
        self._predicted: dict[str, list[np.ndarray]] = {name: [] for name in COMPARED}
        self.passes: list[np.ndarray] = []
        self.found: dict[str, list[list[float]]] = {name: [] for name in COMPARED}

    def begin(self, tokens: np.ndarray = _UNKNOWN) -> None:
        """Tells all predictors the tokens of the next pass."""
        for each in self._all.values():
            each.begin(tokens)

    def probabilities(self, visited: list[np.ndarray], ahead: np.ndarray, steps: int) -> None:
        """Keeps each predictor's order of the next layer's experts."""
        if steps == 1:
            for name, each in self._all.items():
                chances = each.probabilities(visited, ahead, 1)
                assert chances is not None
                self._predicted[name].append(np.argsort(-chances, kind="stable"))

    def learn(self, visited: list[np.ndarray]) -> None:
        """Compares predictions with visits."""
        tokens, choices = visited[0].shape
        for name, predicted in self._predicted.items():
            # After the last layer the next token's first layer was predicted, before that token was known.
            if tokens == 1:
                pairs = zip(visited, predicted[:-1], strict=True)
                self.found[name].append(
                    [float(np.isin(each[0], best[:choices]).mean()) for each, best in pairs]
                )
            self._predicted[name] = []
        if tokens == 1:
            self.passes.append(np.stack(visited)[:, 0])
        for each in self._all.values():
            each.learn(visited)


def watch(engine: Engine, counts: PathCounts, prompts: Sequence[Sequence[int]], tokens: int) -> Watched:
    """Observes the experts that an engine visits in its answers; its experts are streamed."""
    watching = _Watching(counts, read_token_experts(engine.model.bundle))
    engine.runner.layers.experts.predictor = watching  # pyright: ignore
    for number, prompt in enumerate(prompts):
        sampling = Sampling(temperature=1.0, seed=number)
        engine.generate(prompt, GenerationConfig(max_tokens=tokens, ignore_eos=True, sampling=sampling))
    hits = {name: np.mean(each, axis=0) for name, each in watching.found.items()}
    return Watched(np.stack(watching.passes, axis=1), hits)


def hit_ratio(visits: np.ndarray, policy: Policy, room: int, frequency: np.ndarray) -> float:
    """Share of visits `[L, M, k]` whose expert is in a buffer with room for `room` experts.

    Args:
      visits: in the order in which tokens pass layers.
      policy: chooses the expert to evict.
      room: at least k.
      frequency: `[L, E]` earlier visits.
    """
    layers, tokens, _ = visits.shape
    frequency = frequency.astype(np.float64).copy()
    loaded, used = np.zeros(frequency.shape, int), np.zeros(frequency.shape, int)
    inside: list[tuple[int, int]] = []
    hits = tick = 0
    for token in range(tokens):
        for layer in range(layers):
            tick += 1
            wanted = [(layer, int(expert)) for expert in visits[layer, token]]
            for key in wanted:
                frequency[key] += 1
                used[key] = tick
            hits += sum(key in inside for key in wanted)
            for key in wanted:
                if key in inside:
                    continue
                if len(inside) >= room:
                    others = [other for other in inside if other not in wanted]
                    at = tuple(np.array(others).T)
                    residents = Residents(at[0], frequency[at], loaded[at], used[at])
                    inside.remove(others[int(np.argmin(policy(residents, layer, layers, tick)))])
                inside.append(key)
                loaded[key] = tick
    return hits / visits.size
