"""Predicts a token's experts from its activation path so far, or from its token id, and chooses the resident
expert to evict (EdgeMoE, arXiv 2308.14352, section 3.3).

The experts of a layer depend on those of the two layers before. Counts over a text estimate P(expert c at
layer n | experts a at n-2 and b at n-1). With several experts per token each visit is counted once for every
pair (a, b) of the sets, and a prediction is the mean over the pairs.

Counts are smoothed by backing off: the estimate from two layers is mixed with that from one layer, and this
with the frequency of an expert, each weighing as much as `BACK_OFF` visits (MacKay and Peto, 1995). So the
prediction of the first layer is its frequencies, and that of the second layer depends on the first.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import numpy as np

from jaxllm.errors import ConfigError

BACK_OFF = 4.0
# Maximum number of stored pairs per layer, the most frequent ones: all of them with up to 64 experts.
_MOST_PAIRS = 4096
# Maximum sum of a row of counts while a model runs.
MOST_WEIGHT = 64.0


@dataclasses.dataclass(frozen=True, eq=False)
class PathCounts:
    """Counts of visits to experts, by sparse layer and by the experts of the layers before.

    Attributes:
      alone: `[L, E]` float32, visits to each expert.
      after_one: `[L, E, E]` float32, `[n, b, c]`: visits to c by tokens that had visited b at layer n-1;
        zeros at the first layer.
      pairs: `[L, P]` int32, stored pairs as a·E + b, -1 for none; the first two layers have none.
      after_two: `[L, P, E]` float32, visits after each pair.
    """

    alone: np.ndarray
    after_one: np.ndarray
    pairs: np.ndarray
    after_two: np.ndarray

    @classmethod
    def none(cls, *, layers: int, experts: int) -> "PathCounts":
        """Counts of zero."""
        return cls(
            np.zeros((layers, experts), np.float32),
            np.zeros((layers, experts, experts), np.float32),
            np.zeros((layers, 0), np.int32),
            np.zeros((layers, 0, experts), np.float32),
        )

    @property
    def layers(self) -> int:
        """Number of sparse layers (L)."""
        return self.alone.shape[0]

    @property
    def experts(self) -> int:
        """Experts of a layer (E)."""
        return self.alone.shape[1]

    @functools.cached_property
    def places(self) -> np.ndarray:
        """Per layer, the index of each pair in `after_two`, -1 for none: `[L, E²]` int32."""
        found = np.full((self.layers, self.experts**2), -1, np.int32)
        for layer, pairs in enumerate(self.pairs):
            known = np.flatnonzero(pairs >= 0)
            found[layer, pairs[known]] = known
        return found

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Arrays for storage: counts as float16, whose rounding is below the counts' sampling error."""
        most = np.finfo(np.float16).max
        counts = {"alone": self.alone, "after_one": self.after_one, "after_two": self.after_two}
        # Scaled down if they exceed float16: only their ratios matter.
        scale = min(1.0, float(most) / max(1.0, float(self.alone.max())))
        return {
            "pairs": self.pairs,
            **{name: (scale * each).astype(np.float16) for name, each in counts.items()},
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], *, layers: int, experts: int) -> "PathCounts":
        """The inverse of `to_arrays`.

        Raises:
          ConfigError: the arrays are malformed, or belong to another model.
        """
        try:
            pairs = np.asarray(arrays["pairs"])
            counts = {
                name: np.asarray(arrays[name], np.float32) for name in ("alone", "after_one", "after_two")
            }
        except KeyError as error:
            raise ConfigError(f"the statistics of activation paths lack {error}") from error
        shapes = {
            "alone": (layers, experts),
            "after_one": (layers, experts, experts),
            "after_two": (*pairs.shape, experts),
        }
        sound = (
            pairs.dtype == np.int32
            and pairs.ndim == 2
            and len(pairs) == layers
            and pairs.max(initial=-1) < experts**2
        )
        if not sound or any(counts[name].shape != shape for name, shape in shapes.items()):
            raise ConfigError("the statistics of activation paths are of another model")
        if not all(np.isfinite(each).all() and each.min(initial=0) >= 0 for each in counts.values()):
            raise ConfigError("the statistics of activation paths are no counts: negative or not finite")
        return cls(pairs=pairs, **counts)


def count_paths(ids: np.ndarray, experts: int) -> PathCounts:
    """Counts the visits of a text's tokens.

    Args:
      ids: `[L, M, k]` int, the experts that each of M tokens visited at each sparse layer.
    """
    layers = ids.shape[0]
    width = min(_MOST_PAIRS, experts**2)
    alone = np.stack([np.bincount(each.reshape(-1), minlength=experts) for each in ids]).astype(np.float32)
    after_one = np.zeros((layers, experts, experts), np.float32)
    pairs, after_two = np.full((layers, width), -1, np.int32), np.zeros((layers, width, experts), np.float32)
    for layer in range(1, layers):
        at = ids[layer - 1][:, :, None] * experts + ids[layer][:, None, :]
        after_one[layer] = np.bincount(at.reshape(-1), minlength=experts**2).reshape(experts, experts)
    for layer in range(2, layers):
        pair = ids[layer - 2][:, :, None] * experts + ids[layer - 1][:, None, :]
        seen = np.bincount(pair.reshape(-1), minlength=experts**2)
        kept = np.sort(np.argsort(-seen, kind="stable")[:width])
        place = np.full(experts**2, -1)
        place[kept] = np.arange(width)
        at = place[pair].reshape(len(pair), -1, 1) * experts + ids[layer][:, None, :]
        at = at[np.broadcast_to(place[pair].reshape(len(pair), -1, 1) >= 0, at.shape)]
        pairs[layer] = kept
        after_two[layer] = np.bincount(at, minlength=width * experts).reshape(width, experts)
    return PathCounts(alone, after_one, pairs, after_two)


def next_experts(
    counts: PathCounts, layer: int, before: np.ndarray | None = None, two_before: np.ndarray | None = None
) -> np.ndarray:
    """The predicted probability of a visit to each expert of a layer.

    Args:
      layer: the sparse layer, from 0.
      before: `[M, k]` int, the experts that M tokens visited at the layer before; None if unknown.
      two_before: the same for two layers before.

    Returns:
      `[E]` float32, the mean over the tokens, which sums to one.
    """
    alone = counts.alone[layer]
    chance = (alone + 1.0) / (alone.sum() + len(alone))
    if layer < 1 or before is None:
        return chance.astype(np.float32)
    rows = counts.after_one[layer]
    behind_one = (rows + BACK_OFF * chance) / (rows.sum(-1, keepdims=True) + BACK_OFF)
    if layer < 2 or two_before is None:
        return behind_one[before.reshape(-1)].mean(0).astype(np.float32)
    where = _places_of(counts, layer, two_before, before).reshape(-1)
    last = np.repeat(before[:, None, :], two_before.shape[1], axis=1).reshape(-1)
    # Pairs that are not stored have counts of zero.
    rows, known = np.zeros((len(where), counts.experts)), where >= 0
    rows[known] = counts.after_two[layer][where[known]]
    behind_two = (rows + BACK_OFF * behind_one[last]) / (rows.sum(-1, keepdims=True) + BACK_OFF)
    return behind_two.mean(0).astype(np.float32)


def learn(counts: PathCounts, ids: np.ndarray) -> None:
    """Adds the visits of more tokens to the counts, in place, because copying them for every token would
    take longer than a layer.

    A row of counts is scaled down once its sum exceeds `MOST_WEIGHT`, so that recent tokens have influence.
    `ids` is `[L, M, k]` int, see `count_paths`.
    """
    experts = counts.experts

    def add(rows: np.ndarray, row: np.ndarray, expert: np.ndarray, most: float) -> None:
        np.add.at(rows, (row, expert), 1.0)
        total = rows[row].sum(-1)
        if np.any(total > most):
            heavy = np.unique(row[total > most])
            rows[heavy] *= most / rows[heavy].sum(-1, keepdims=True)

    for layer, now in enumerate(ids):
        # Frequencies have a greater limit: they change slowly.
        add(counts.alone, np.full(now.size, layer), now.reshape(-1), experts * MOST_WEIGHT)
        if layer < 1:
            continue
        before, visited = np.broadcast_arrays(ids[layer - 1][:, :, None], now[:, None, :])
        add(counts.after_one[layer], before.reshape(-1), visited.reshape(-1), MOST_WEIGHT)
        if layer < 2:
            continue
        where, visited = np.broadcast_arrays(
            _places_of(counts, layer, ids[layer - 2], ids[layer - 1])[:, :, None], now[:, None, :]
        )
        add(counts.after_two[layer], where[where >= 0], visited[where >= 0], MOST_WEIGHT)


def _places_of(counts: PathCounts, layer: int, two_before: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Indices in `after_two` of all pairs of each token `[M, k²]`, -1 for pairs that are not stored."""
    pair = two_before[:, :, None] * counts.experts + before[:, None, :]
    return counts.places[layer][pair.reshape(len(pair), -1)]


@dataclasses.dataclass(frozen=True, eq=False)
class TokenExperts:
    """The experts that each token id of a text visited most.

    In the first layers a router's input depends mostly on the token itself. So the ids of the next tokens
    (the one just sampled, those that a draft proposes) predict their experts before any layer is computed.

    Attributes:
      tokens: `[T]` int32, ascending, the ids that occurred.
      experts: `[L, T, k]` int, per sparse layer.
    """

    tokens: np.ndarray
    experts: np.ndarray

    @classmethod
    def none(cls, layers: int, choices: int) -> "TokenExperts":
        """Statistics without any token."""
        return cls(np.zeros(0, np.int32), np.zeros((layers, 0, choices), np.uint8))

    def chances(self, layer: int, tokens: np.ndarray, experts: int) -> np.ndarray | None:
        """The predicted probability of a visit of some tokens to each expert of a layer.

        Args:
          layer: the sparse layer, from 0.
          tokens: `[M]` int.
          experts: number of experts of the layer (E).

        Returns:
          `[E]` float32, which sums to one: the mean over the tokens that occurred in the text; None if none
            did.
        """
        at = np.searchsorted(self.tokens, tokens)
        within = at < len(self.tokens)
        known = at[within][self.tokens[at[within]] == tokens[within]]
        if not len(known):
            return None
        visits = np.bincount(self.experts[layer, known].reshape(-1), minlength=experts)
        return (visits / visits.sum()).astype(np.float32)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Arrays to store."""
        return {"tokens": self.tokens, "token_experts": self.experts}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, np.ndarray], *, layers: int, experts: int, choices: int
    ) -> "TokenExperts":
        """The inverse of `to_arrays`; `none` if there are no arrays.

        Raises:
          ConfigError: the arrays are malformed, or belong to another model.
        """
        if "tokens" not in arrays:
            return cls.none(layers, choices)
        tokens, visited = np.asarray(arrays["tokens"]), np.asarray(arrays.get("token_experts"))
        sound = tokens.dtype == np.int32 and tokens.ndim == 1 and visited.dtype == _width(experts)
        sound = sound and visited.shape == (layers, len(tokens), choices)
        sound = sound and visited.min(initial=0) >= 0 and visited.max(initial=0) < experts
        if not sound or np.any(np.diff(tokens) <= 0):
            raise ConfigError("the statistics of tokens' experts are of another model")
        return cls(tokens, visited)


def count_tokens(ids: np.ndarray, tokens: np.ndarray, experts: int) -> TokenExperts:
    """Counts the visits of a text's tokens.

    Args:
      ids: `[L, M, k]` int, the experts that each of M tokens visited at each sparse layer.
      tokens: `[M]` int, their ids.
    """
    seen, which = np.unique(tokens, return_inverse=True)
    most = []
    for layer in ids:
        at = which[:, None] * experts + layer
        visits = np.bincount(at.reshape(-1), minlength=len(seen) * experts).reshape(-1, experts)
        most.append(np.argsort(-visits, axis=-1, kind="stable")[:, : ids.shape[-1]])
    return TokenExperts(seen.astype(np.int32), np.stack(most).astype(_width(experts)))


def _width(experts: int) -> type[np.generic]:
    return np.uint8 if experts <= 256 else np.int32


@dataclasses.dataclass(frozen=True, eq=False)
class Residents:
    """The N resident experts.

    Attributes:
      layers: `[N]` int, the sparse layer of each, from 0.
      frequency: `[N]` float, number of visits to each, resident or not.
      loaded: `[N]` int, tick at which each was loaded.
      used: `[N]` int, tick of each one's last visit.
    """

    layers: np.ndarray
    frequency: np.ndarray
    loaded: np.ndarray
    used: np.ndarray


# (residents, current layer, number of sparse layers, current tick) -> scores `[N]`; the lowest is evicted.
Policy = Callable[[Residents, int, int, int], np.ndarray]


def nearness(layers: np.ndarray, at: int, total: int) -> np.ndarray:
    """Proximity of layers after layer `at` of `total`: total - 1 for the next layer, down to 0 for layer
    `at`, which is next needed in the next forward pass (EdgeMoE, equation 2)."""
    return (total - layers + at) % total


POLICIES: dict[str, Policy] = {
    # EdgeMoE's (section 3.3.3) keeps experts that are visited often and whose layer comes soon: layers are
    # computed in order, so experts of the layers just computed are needed last. The second term orders those
    # of the current layer, whose nearness is 0: of equally near experts the least visited is evicted.
    "frequency-nearness": lambda those, at, total, now: (
        those.frequency * nearness(those.layers, at, total) + 1e-6 * those.frequency
    ),
    # The expert loaded first.
    "fifo": lambda those, at, total, now: those.loaded.astype(np.float64),
    # The least recently used expert.
    "lru": lambda those, at, total, now: those.used.astype(np.float64),
    # The expert with the fewest visits; of equals the least recently used one.
    "lfu": lambda those, at, total, now: those.frequency + 1e-9 * those.used,
    # By frequency divided by the time since the last visit.
    "lfru": lambda those, at, total, now: those.frequency / (1 + now - those.used),
}
