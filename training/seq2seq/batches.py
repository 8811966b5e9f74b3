"""Makes batches of pairs of similar length, so that a step has little padding and few compiled shapes.

Row lengths are a short list; a pair's row has the minimum length that fits its source and its target. All
rows of a batch are of one length, and batches of shorter rows have more of them, so that every batch has
about as many tokens. Batches follow from (pairs, settings, step) only.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jaxllm.errors import ConfigError

# The source and the target of a pair, as token ids with their ends.
Pair = tuple[Sequence[int], Sequence[int]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PairBatch:
    """Pairs in rows of one length.

    Attributes:
      read: `[B, S]` int32, tokens of the sources.
      read_tokens: `[B]` int32, number of valid tokens of each.
      tokens: `[B, T]` int32, inputs of the decoder: the start token, then the target without its end.
      targets: `[B, T]` int32, the target.
      weights: `[B, T]` float32, 1 for each token of a target and 0 for padding.
      sources: `[B, T]` int32, number of each row's source of data.
    """

    read: np.ndarray
    read_tokens: np.ndarray
    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    sources: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class PairRows:
    """Encoded pairs in rows of a few lengths.

    Attributes:
      pairs: pairs of all sources of data; none is empty.
      of: number of each pair's source of data.
      lengths: lengths of rows in tokens, ascending; the last one cuts longer pairs.
      batch_tokens: tokens of a batch on each side, with padding.
      rows_multiple: divisor of the number of rows of every batch.
      start_id: token that the decoder begins with; it also pads rows.
    """

    pairs: Sequence[Pair]
    of: np.ndarray
    lengths: tuple[int, ...]
    batch_tokens: int
    rows_multiple: int
    start_id: int
    seed: int

    @functools.cached_property
    def length_of(self) -> np.ndarray:
        """The length of the row of each pair."""
        longest = np.array([max(map(len, pair)) for pair in self.pairs])
        places = np.searchsorted(self.lengths, np.minimum(longest, self.lengths[-1]))
        return np.array(self.lengths)[places]

    @property
    def batches_per_epoch(self) -> int:
        """Number of full batches of all lengths; the rest is left for another epoch's order.

        Raises:
          ConfigError: there are too few pairs for any batch.
        """
        found = sum(int((self.length_of == length).sum()) // self._rows(length) for length in self.lengths)
        if not found:
            raise ConfigError(
                f"{len(self.pairs):,} pairs do not fill a batch of any length; give more, or lower batch"
            )
        return found

    @property
    def padding_share(self) -> float:
        """Share of padding among all tokens of an epoch, on both sides."""
        real = sum(min(len(side), self.lengths[-1]) for pair in self.pairs for side in pair)
        return 1 - real / (2 * int(self.length_of.sum()))

    def batch_at(self, step: int) -> PairBatch:
        """The batch of a step (from 0): all pairs in a new order every epoch."""
        epoch, place = divmod(step, self.batches_per_epoch)
        return self._filled(*self._order(epoch)[place])

    def held_out(self) -> Iterator[PairBatch]:
        """All pairs once; the last batch of a length is padded with rows without weight."""
        for length in self.lengths:
            own, count = np.flatnonzero(self.length_of == length), self._rows(length)
            for first in range(0, len(own), count):
                yield self._filled(own[first : first + count], length)

    # An object lives as long as its run, so its cache retains nothing longer.
    @functools.lru_cache(maxsize=2)  # noqa: B019
    def _order(self, epoch: int) -> list[tuple[np.ndarray, int]]:
        generator = np.random.default_rng([self.seed, epoch])
        batches: list[tuple[np.ndarray, int]] = []
        for length in self.lengths:
            own, count = generator.permutation(np.flatnonzero(self.length_of == length)), self._rows(length)
            whole = len(own) // count
            batches += [(each, length) for each in own[: whole * count].reshape(whole, count)]
        return [batches[place] for place in generator.permutation(len(batches))]

    def _rows(self, length: int) -> int:
        return max(self.batch_tokens // length // self.rows_multiple, 1) * self.rows_multiple

    def _filled(self, places: np.ndarray, length: int) -> PairBatch:
        shape = (self._rows(length), length)
        read, targets = np.full(shape, self.start_id, np.int32), np.full(shape, self.start_id, np.int32)
        weights, sources = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
        # A row without a pair has one valid token, so that its attention is defined.
        read_tokens = np.ones(shape[0], np.int32)
        for row, place in enumerate(places.tolist()):
            source, target = (side[:length] for side in self.pairs[place])
            read[row, : len(source)], read_tokens[row] = source, len(source)
            targets[row, : len(target)], weights[row, : len(target)] = target, 1
            sources[row] = self.of[place]
        tokens = np.concatenate([np.full((shape[0], 1), self.start_id, np.int32), targets[:, :-1]], axis=1)
        return PairBatch(read, read_tokens, tokens, targets, weights, sources)
