"""Proposes choices with a tiny LM, run by buckets of the live service or by programs.

One pass over a prompt scores its tokens and proposes a level and a prompt ratio; a longer prompt takes
several passes, of which the first decides. This module imports no JAX.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import numpy as np

from jaxllm.elastic.compression import MARKS, marked
from jaxllm.elastic.slo import SLOS, Slo
from jaxllm.errors import ConfigError
from jaxllm.serving.elastic.planner import Proposal
from jaxllm.tasks.tiny_reader import ReadTokens, TinyReader
from jaxllm.text.droppable import PromptTokens

Decision = Literal["safest", "lightest"]
_TIMED_RUNS = 7


class TinyClasses(ReadTokens, Protocol):
    """Tokens and classes of a tiny LM (see `jaxllm.bundle.tiny_lm.TinyLm`)."""

    @property
    def levels(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def prompt_ratios(self) -> tuple[float, ...]: ...  # noqa: D102


# Logits of a row in float32: of keeping each token `[1, T]`, of the levels and of the prompt ratios
# `[1, classes]`.
TinyOutputs = tuple[np.ndarray, np.ndarray, np.ndarray]


class TinyProposer:
    """Proposes with a tiny LM (see `Proposer`).

    Its heads are trained to give the probability that a choice is the lightest right one. "lightest", as in
    ELMS, uses the most likely class: it saves time that the objective allows, at the price of right answers.
    If a light choice is right, heavier ones mostly are, so that the cumulative probability up to a choice is
    that of the choice being right: "safest" uses the allowed choice with the largest.

    Attributes:
      prompt_ratios: ratios to choose from, ascending.
    """

    def __init__(
        self,
        tiny: TinyClasses,
        lengths: Sequence[int],
        run: Callable[[np.ndarray, np.ndarray], TinyOutputs],
        levels: Sequence[int],
        *,
        decision: Decision = "safest",
    ) -> None:
        """Times the passes.

        Args:
          tiny: the levels and ratios of its classes, and its tokens.
          lengths: lengths of rows that `run` accepts, ascending.
          run: reads a row `[1, T]` int32 with its mask `[1, T]` bool.
          levels: levels that the planner chooses from, ascending.
          decision: rule to choose by the probabilities.

        Raises:
          ConfigError: it was trained for none of these levels.
        """
        known = known_levels(tiny, levels)
        self.prompt_ratios = tiny.prompt_ratios
        self._tiny, self._levels, self._decision = tiny, tuple(levels), decision
        # Indices of the common levels in `levels` and in the tiny LM's classes.
        self._places = np.array([self._levels.index(level) for level in known])
        self._classes = np.array([tiny.levels.index(level) for level in known])
        self._reader, self._lengths, self._run = TinyReader.of(tiny), lengths, run
        self._pass_ms: dict[int, float] = {}
        for length in lengths:
            row, mask, times = np.zeros((1, length), np.int32), np.ones((1, length), bool), []
            # The first run sets up the bucket's kernels.
            for _ in range(_TIMED_RUNS + 1):
                began = time.perf_counter()
                run(row, mask)
                times.append(1000 * (time.perf_counter() - began))
            self._pass_ms[length] = statistics.median(times[1:])

    def propose(self, prompt: PromptTokens, slo: Slo, allowed: np.ndarray) -> Proposal:
        """The best of the allowed choices, and a score of each token of the prompt.

        Args:
          prompt: prompt of the request.
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
        """Number of passes, and the length of their rows (see `input_rows`)."""
        passes = max(1, -(-tokens // (self._lengths[-1] - MARKS)))
        longest = -(-tokens // passes) + MARKS
        return passes, next(length for length in self._lengths if length >= longest)

    def _read(self, prompt: PromptTokens, slo: Slo) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """Scores of the large model's tokens, and the decision's logits."""
        rows, mask = self._reader.rows(prompt)
        _, length = self._rows(int(mask[:, MARKS:].sum()))
        rows, mask = marked(rows, slo, self._tiny.mark_ids)[:, :length], mask[:, :length]
        outs = [self._run(rows[i : i + 1], mask[i : i + 1]) for i in range(len(rows))]
        keep, model, share = (np.concatenate(parts) for parts in zip(*outs, strict=True))
        likely = self._reader.keep_likely(prompt, keep, mask)
        return likely, (model[0].astype(np.float64), share[0].astype(np.float64))


def known_levels(tiny: TinyClasses, levels: Sequence[int]) -> list[int]:
    """The levels among some that a tiny LM chooses between.

    Raises:
      ConfigError: it was trained for none of them.
    """
    known = [level for level in levels if level in tiny.levels]
    if not known:
        raise ConfigError(
            f"the tiny LM chooses between levels {tiny.levels}, of which none is served ({levels})"
        )
    return known
