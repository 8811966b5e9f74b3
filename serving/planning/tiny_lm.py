"""Runs the tiny LM: one pass over a prompt scores its tokens and proposes a level and a prompt ratio.

Its buckets, like the large model's, are compiled or read from disk when it is opened, for a few lengths up to
that of the rows it was trained on; a longer prompt takes several passes, whose logits are pooled.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np

from jaxllm.bundle.tiny_lm import TinyLm
from jaxllm.elastic.slo import SLOS, Slo
from jaxllm.elastic.tiny_lm_input import MARKS, marked, pooled
from jaxllm.errors import ConfigError
from jaxllm.kernels import native
from jaxllm.quant import Weight, quantize, to_blocks
from jaxllm.tasks.tiny_reader import TinyReader
from jaxllm.text.droppable import PromptTokens
from serving.buckets.bucket import shapes_of
from serving.buckets.bucket_table import BucketTable
from serving.buckets.store import BucketStore
from serving.buckets.tiny_lm import TinyLmBucket, TlmShapes
from serving.planning.proposer import Proposal

Decision = Literal["safest", "lightest"]
# Lengths of buckets below a whole row's, for shorter prompts.
_BUCKET_TOKENS = (32, 64, 128, 256, 512)
_TIMED_RUNS = 7
# Matrices that are looked up by row, not multiplied.
_LOOKED_UP = ("embed.tokens", "embed.positions", "embed.types")
# Fewest entries of a matrix whose native product is faster: below, rounding the activations costs more than
# XLA's float product.
_LARGE = 1 << 16


class TinyPlanner:
    """Proposes with a tiny LM (see `Proposer`).

    Its heads are trained to give the probability that a choice is the lightest that answers right.
    "lightest", as in ELMS, takes the likeliest class: it saves time that the objective allows, at the price
    of right answers. Where a light choice is right, heavier ones mostly are, so that the cumulative
    probability up to a choice is that of the choice being right: "safest" takes the allowed choice with the
    largest.

    Args:
      tiny: the tiny LM, with the levels and ratios of its classes.
      levels: that the planner chooses from, ascending.
      store: where its buckets are kept; None compiles them.
      decision: how a choice is made of the probabilities.

    Attributes:
      prompt_ratios: ratios that it may propose, ascending.

    Raises:
      ConfigError: it was trained for none of these levels.
    """

    def __init__(
        self,
        tiny: TinyLm,
        levels: Sequence[int],
        store: BucketStore | None = None,
        *,
        decision: Decision = "safest",
    ) -> None:
        known = [level for level in levels if level in tiny.levels]
        if not known:
            raise ConfigError(
                f"the tiny LM chooses between levels {tiny.levels}, of which none is served ({levels})"
            )
        self.prompt_ratios = tiny.prompt_ratios
        self._tiny, self._levels, self._decision = tiny, tuple(levels), decision
        # Indices in `levels` and in the tiny LM's classes of the levels that both have.
        self._places = np.array([self._levels.index(level) for level in known])
        self._classes = np.array([tiny.levels.index(level) for level in known])
        self._reader = TinyReader.of(tiny)
        self._params = _served(tiny)
        self._lengths = [each for each in _BUCKET_TOKENS if each < tiny.row_tokens] + [tiny.row_tokens]
        mine = None if store is None else store.of(tiny.cfg, self._params)
        self._buckets = BucketTable(TlmShapes(tiny.cfg, shapes_of(self._params)), mine)
        self._buckets.fill(TinyLmBucket(tokens=length) for length in self._lengths)
        self._pass_ms = {length: self._time(length) for length in self._lengths}

    def propose(self, prompt: PromptTokens, slo: Slo, allowed: np.ndarray) -> Proposal:
        """The best of the allowed choices, and a score of each token of the prompt.

        Args:
          prompt: of the request.
          slo: its objective.
          allowed: `[levels, prompt_ratios]` bool, one of them True.
        """
        scores, (model, share) = self._read(prompt, slo)
        likely = np.full(allowed.shape, -np.inf)
        likely[self._places] = self._likely(model)[self._classes, None] + self._likely(share)[None]
        choices = np.where(allowed, likely, -np.inf)
        if not np.isfinite(choices).any():
            choices = likely
        # The largest of equally likely ones.
        level, ratio = np.argwhere(choices == choices.max())[-1]
        return Proposal(level=self._levels[level], prompt_ratio=self.prompt_ratios[ratio], scores=scores)

    def scores(self, prompt: PromptTokens) -> np.ndarray:
        """The probability that each token of a prompt should be kept, `[T]` float64."""
        return self._read(prompt, SLOS[0])[0]

    def planning_ms(self, tokens: int) -> float:
        """Time of the passes over a prompt of so many of the large model's tokens, measured at opening."""
        passes, length = self._rows(tokens)
        return passes * self._pass_ms[length]

    def _likely(self, logits: np.ndarray) -> np.ndarray:
        """Logarithms of the probability of each class, by `decision`."""
        likely = np.exp(logits - logits.max())
        if self._decision == "safest":
            likely = np.cumsum(likely)
        return np.log(np.maximum(likely / likely.max(), np.finfo(np.float64).tiny))

    def _rows(self, tokens: int) -> tuple[int, int]:
        """Number of passes, and the length of the bucket that runs them (see `input_rows`)."""
        passes = max(1, -(-tokens // (self._lengths[-1] - MARKS)))
        longest = -(-tokens // passes) + MARKS
        return passes, next(each for each in self._lengths if each >= longest)

    def _read(self, prompt: PromptTokens, slo: Slo) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """Scores of the large model's tokens, and the decision's logits."""
        rows, mask = self._reader.rows(prompt)
        _, length = self._rows(int(mask[:, MARKS:].sum()))
        rows, mask = marked(rows, slo, self._tiny.mark_ids)[:, :length], mask[:, :length]
        read = self._buckets.get(TinyLmBucket(tokens=length))
        outs = [read(self._params, rows[i : i + 1], mask[i : i + 1]) for i in range(len(rows))]
        keep, (model, share) = jax.tree.map(lambda *parts: np.concatenate(parts), *outs)
        likely = self._reader.keep_likely(prompt, keep, mask)
        return likely, (pooled(model.astype(np.float64)), pooled(share.astype(np.float64)))

    def _time(self, length: int) -> float:
        row, mask = np.zeros((1, length), np.int32), np.ones((1, length), bool)
        read, times = self._buckets.get(TinyLmBucket(tokens=length)), []
        # The first run sets up the bucket's kernels.
        for _ in range(_TIMED_RUNS + 1):
            began = time.perf_counter()
            jax.block_until_ready(read(self._params, row, mask))
            times.append(1000 * (time.perf_counter() - began))
        return statistics.median(times[1:])


def _served(tiny: TinyLm) -> dict[str, Weight]:
    """The tiny LM's weights in the formats that are fastest: large matrices at 8 bits for native kernels."""
    native_here = jax.default_backend() == "cpu" and native.kernels().native
    served: dict[str, Weight] = {}
    for name, value in tiny.params.items():
        if native_here and value.ndim == 2 and value.size >= _LARGE and name not in _LOOKED_UP:
            wide = np.asarray(value, np.float32)
            served[name] = jax.tree.map(jax.device_put, to_blocks(quantize(wide, bits=8, axis=-1)))
        else:
            served[name] = jax.device_put(value)
    return served
