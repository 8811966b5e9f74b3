"""Provides the weights of a mixture that is larger than memory, and predicts the experts of the next layers,
to prefetch them before their routers run."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxllm.bundle import Bundle
from jaxllm.bundle.calibrations import read_path_counts, read_token_experts
from jaxllm.errors import BudgetExceeded, BundleError
from jaxllm.experts.prediction import POLICIES, PathCounts, TokenExperts, learn, next_experts
from jaxllm.experts.routing import high_alone
from jaxllm.models.parameters import head_name
from jaxllm.quant import Weight
from jaxllm.serving.buckets.bucket import HIGH, any_expert
from jaxllm.serving.experts.cache import ExpertCache
from jaxllm.serving.experts.store import ExpertStore, PlaneKey, hot_bytes
from jaxllm.serving.ground.expert_options import PREDICTORS, ExpertOptions
from jaxllm.serving.host.direct_io import PieceReader
from jaxllm.serving.host.progress import Progress, loading
from jaxllm.serving.host.storage import Storage
from jaxllm.serving.weights.memory_plan import MemoryBudget, least_budget
from jaxllm.serving.weights.pieces import HeadPiece, head_pieces
from jaxllm.serving.weights.prefetch import Meanwhile

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


# Weight of the bundle's statistics relative to visits at run time, in tokens.
_PRIOR_TOKENS = 64.0
# The last tokens of a chunk, from which experts are predicted.
_TELLING_TOKENS = 16


class ExpertWeights:
    """A bundle's weights: experts in an expert buffer, all others resident.

    Attributes:
      store: locates the experts.
      cache: the expert buffer.
      counts: its counts.
      predictor: predictor of the next experts.
      options: options of eviction and prediction.
      head: the head as one piece.
      budget_bytes: memory limit of experts.
      planned_bytes: used bytes of the whole budget.
      staying_bytes: bytes of all weights but experts.
    """

    def __init__(
        self,
        bundle: Bundle,
        budget: MemoryBudget,
        *,
        storage: Storage | None = None,
        options: ExpertOptions | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Reads all weights but experts.

        Args:
          bundle: an open bundle that stores experts separately.
          budget: memory budget, including the fixed part.
          storage: options of reads.
          options: see `ExpertOptions`.
          progress: callback for ("load", bytes done, bytes in all).

        Raises:
          BudgetExceeded: the budget is too small.
          CheckpointError: the file is damaged or cannot be read.
        """
        budget_bytes, fixed_bytes = budget.total_bytes, budget.fixed_bytes
        self._bundle, self._memory_bytes, self.options = bundle, budget_bytes, options or ExpertOptions()
        self.store = ExpertStore(bundle)
        self.staying_bytes = hot = hot_bytes(bundle)
        self.budget_bytes = min(budget_bytes - fixed_bytes - hot, self.store.total_bytes)
        least = self.store.least_bytes()
        if self.budget_bytes < least:
            whole = least_budget(budget_bytes, least - self.budget_bytes)
            raise BudgetExceeded(
                f"a memory budget of {budget_bytes:,} bytes is too small: this model needs at least "
                f"{whole:,} ({whole - hot - least:,} for {budget.fixed_parts}, {hot:,} for what every token "
                f"needs, {least:,} for the {bundle.cfg.experts_per_token} experts that a token visits at one "
                "layer); give more, or ask for a shorter context"
            )
        self.planned_bytes = fixed_bytes + hot + self.budget_bytes
        self.head: list[HeadPiece] = head_pieces(bundle.layout, most_bytes=bundle.weight_bytes)
        loaded = loading(progress, hot)
        self._hot = bundle.load_all_but_experts(on_segment=lambda _, size: loaded(size))
        counts = read_path_counts(bundle)
        of_encoder = np.zeros((self.store.of_encoder, bundle.cfg.experts))
        alone = counts.alone / np.maximum(1.0, counts.alone.sum(-1, keepdims=True))
        self._reader = PieceReader(bundle.path, storage, error=BundleError)
        self.cache = ExpertCache(
            self.store,
            self._reader,
            budget_bytes=self.budget_bytes,
            policy=POLICIES[self.options.eviction],
            frequency=np.concatenate([of_encoder, _PRIOR_TOKENS * bundle.cfg.experts_per_token * alone]),
        )
        self.counts = self.cache.counts
        self.predictor: Predictor = make_predictor(self.options.predictor, counts, read_token_experts(bundle))

    @property
    def caching(self) -> str:
        """Mode of reads: "direct" or "buffered"."""
        return self._reader.caching

    def facts(self) -> dict[str, Any]:
        """The division of the budget and the counts of reads, for reports."""
        counts = self.counts
        return {
            "budget_bytes": self._memory_bytes,
            "planned_bytes": self.planned_bytes,
            "expert_bytes": self.budget_bytes,
            "all_experts_bytes": self.store.total_bytes,
            "expert_visits": counts.visits,
            "hit_rate": round(counts.hits / max(1, counts.visits), 4),
            "layer_hit_rates": counts.hit_rates(range(self.store.of_encoder, len(self.store.layers))),
            "encoder_layer_hit_rates": counts.hit_rates(range(self.store.of_encoder)),
            "foreseen": counts.foreseen,
            "read_bytes": counts.read_bytes,
            "low_plane_bytes": counts.low_bytes,
            "high_plane_share": round(counts.high_alone / max(1, counts.visits), 4),
            "expert_loss": self.options.loss,
            "waited_ms": round(1000 * counts.waited_s, 1),
            "caching": self.caching,
        }

    def frozen(self) -> dict[str, Weight]:
        """All parameters but experts by name, and the shapes of an expert of each form."""
        shapes: dict[str, Any] = {
            f"{any_expert(form)}.{part}": each
            for form in self.forms
            for part, each in self.store.any_expert(form).items()
        }
        return {**self._hot, **shapes}

    @property
    def bucket_options(self) -> dict[str, Any]:
        """Options of buckets of sparse layers, by name."""
        ahead = self.options.layers_ahead if self.predictor.reads_routers else 1
        return {"loss": self.options.loss, "ahead": ahead}

    @property
    def forms(self) -> tuple[str, ...]:
        """The forms in which experts are computed."""
        return (*self.store.forms, *((HIGH,) if self.options.loss else ()))

    @contextlib.contextmanager
    def head_rows(self, number: int, meanwhile: Meanwhile | None = None) -> Iterator[Weight]:
        """The weight of the head."""
        yield self._hot[head_name(self._bundle.cfg)]

    def expect(self, tokens: np.ndarray) -> None:
        """Announces a pass of the tokens `[M]`: prefetches the predicted experts of its first layers."""
        self.predictor.begin(tokens[-_TELLING_TOKENS:])
        choices, experts = self._bundle.cfg.experts_per_token, self._bundle.cfg.experts
        self.cache.expect(self.likely([], np.zeros(experts), min(experts, choices * len(tokens))))

    def likely(self, visited: Sequence[np.ndarray], ahead: np.ndarray, count: int) -> list[PlaneKey]:
        """The predicted planes after some layers of a pass, nearest layers first; high planes of a layer
        before its low ones, so that a wrong prediction costs half.

        Args:
          visited: `[M, k]` int per sparse layer so far.
          ahead: see `AtExperts`.
          count: maximum number of experts per layer.
        """
        seen, found = [each[-_TELLING_TOKENS:] for each in visited], list[PlaneKey]()
        tokens, choices = len(seen[-1]) if seen else 1, self._bundle.cfg.experts_per_token
        for step in range(1, self.options.layers_ahead + 1):
            if len(seen) == len(self.store.sparse):
                break
            chances = self.predictor.probabilities(seen, ahead, step)
            if chances is None:
                break
            best = np.argsort(-chances, kind="stable")
            worth = self.predictor.worthwhile(seen, chances, step)
            # Predict the required planes like the actual rule: by the probabilities of the chosen experts.
            alone = high_alone(chances[best[:choices]], self.options.loss)
            layer, experts = self.store.of_encoder + len(seen), [each for each in best[:count] if worth[each]]
            # Experts after the chosen ones are predicted like the last of these.
            needed = [1 if alone[min(place, len(alone) - 1)] else 2 for place in range(len(experts))]
            pairs = zip(experts, needed, strict=True)
            planes = [key for each, own in pairs for key in self.store.planes_of((layer, int(each)), own)]
            found += sorted(planes, key=lambda key: key[2])
            seen.append(np.broadcast_to(best[:choices], (tokens, choices)))
        return found

    def close(self) -> None:
        """Stops the threads and closes the file."""
        self.cache.close()
