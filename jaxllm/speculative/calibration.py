"""Calibrates a drafter's probabilities by what the target has accepted, while it answers.

What a token's probability means depends on who drafts and who draws: a target at fewer bits is surer than its
probabilities say, a small model less, and under a sampler both differ again. So outcomes are counted by the
rank of a token among the drafter's choices and by its probability. Each cell of the counts shifts log-odds by
what was accepted beside what was promised; between the centres of two cells shifts are interpolated, so that
the order of branches is kept. Without counts nothing is shifted.
"""

import dataclasses
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes
from jaxllm.speculative.tree import TokenTree

# Ranks with counts of their own, the last for all further ones; centres of cells, in log-odds.
RANKS = 3
_FIRST, _APART, CELLS = -8.0, 2.0, 9
_CENTRES = _FIRST + _APART * np.arange(CELLS)
# Outcomes that the drafter's own word counts for, and the most that are remembered: texts change.
_PRIOR, _MEMORY = 8.0, 200.0


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Outcomes by rank and probability, older ones fading.

    Attributes:
      seen: `[RANKS, CELLS]` float64, drafted tokens whose parent was accepted.
      promised: `[RANKS, CELLS]` float64, the sum of their probabilities.
      accepted: `[RANKS, CELLS]` float64, those that the target took.
    """

    seen: np.ndarray
    promised: np.ndarray
    accepted: np.ndarray

    @classmethod
    def fresh(cls) -> Self:
        """No outcomes."""
        return cls(*(np.zeros((RANKS, CELLS)) for _ in range(3)))

    def after(self, ranks: np.ndarray, probabilities: np.ndarray, accepted: np.ndarray) -> "Calibration":
        """The counts after further outcomes.

        Args:
          ranks: `[n]` int, from 0 on.
          probabilities: `[n]`, of the drafter.
          accepted: `[n]` bool.
        """
        place = (_log_odds(probabilities) - _FIRST) / _APART
        cells = np.minimum(ranks, RANKS - 1), np.clip(np.rint(place), 0, CELLS - 1).astype(np.int64)
        counts = [self.seen.copy(), self.promised.copy(), self.accepted.copy()]
        for count, new in zip(counts, (1.0, probabilities, accepted), strict=True):
            np.add.at(count, cells, new)
        kept = _MEMORY / np.maximum(counts[0], _MEMORY)
        return Calibration(*(count * kept for count in counts))

    def shifts(self) -> np.ndarray:
        """What is added to log-odds, `[RANKS, CELLS]` float32 (see `calibrated`)."""
        centres = 1 / (1 + np.exp(-_CENTRES))
        weight = self.seen + _PRIOR
        promised = (self.promised + _PRIOR * centres) / weight
        accepted = (self.accepted + _PRIOR * promised) / weight
        return (_log_odds(accepted) - _log_odds(promised)).astype(np.float32)


def calibrated(probabilities: jax.Array, shifts: jax.Array) -> jax.Array:
    """The chances that the target takes the likeliest tokens, given that it took their parent.

    Args:
      probabilities: `[T, *]` float32, of the drafter for the likeliest tokens after T nodes, falling.
      shifts: `[RANKS, CELLS]` float32 (see `Calibration.shifts`).

    Returns:
      `[T, *]` float32, below 1.
    """
    axes = Axes("calibrated")
    axes.check(jnp.float32, "T *", probabilities=probabilities)
    axes.check(jnp.float32, f"{RANKS} {CELLS}", shifts=shifts)
    least = np.float32(1 / (1 + np.exp(-_FIRST)))
    bounded = jnp.clip(probabilities, least, 1 - least)
    odds = jnp.log(bounded) - jnp.log1p(-bounded)
    place = (odds - np.float32(_FIRST)) / np.float32(_APART)
    before = jnp.clip(place.astype(jnp.int32), 0, CELLS - 2)
    share = place - before.astype(jnp.float32)
    ranks = jnp.minimum(jnp.arange(probabilities.shape[1], dtype=jnp.int32), RANKS - 1)[None]
    shift = (1 - share) * shifts[ranks, before] + share * shifts[ranks, before + 1]
    # What is out of bounds keeps its distance to them: unlikely tokens stay in their order.
    return jax.nn.sigmoid(odds + shift) * jnp.minimum(probabilities / bounded, np.float32(1))


def outcomes(tree: TokenTree, path: Sequence[int], token: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a verification says of a drafted tree: the arguments of `Calibration.after`.

    Args:
      tree: on the host.
      path: the accepted nodes, from the root on.
      token: the target's token after them.

    Returns:
      Ranks `[n]` int64, probabilities `[n]` and acceptance `[n]` bool of all children of accepted nodes.
    """
    count = int(tree.count)
    parents, tokens = np.asarray(tree.parents)[:count], np.asarray(tree.tokens)[:count]
    probabilities = np.asarray(tree.probabilities)[:count].astype(np.float64)
    taken = dict(zip(path, [*(int(tokens[node]) for node in path[1:]), token], strict=True))
    children = np.flatnonzero(np.isin(parents, path))
    family, own = parents[children], probabilities[children]
    # Siblings lie in the order of nodes, so that of equally likely ones the first ranks higher.
    surer = (own[None] > own[:, None]) | ((own[None] == own[:, None]) & (children[None] < children[:, None]))
    ranks = ((family[None] == family[:, None]) & surer).sum(axis=1)
    right = np.array([tokens[node] == taken[int(parents[node])] for node in children], bool)
    return ranks, own, right


def _log_odds(probabilities: np.ndarray) -> np.ndarray:
    least = 1 / (1 + np.exp(-_FIRST))
    bounded = np.clip(probabilities, least, 1 - least)
    return np.log(bounded) - np.log1p(-bounded)
