"""Samples batches from corpora that are too large to pack: windows of the token files, by grain.

A source's tokens are cut every `row_tokens` into windows, which grain shuffles without storing their order
in memory and mixes by weight. As with packed rows, attention stops at documents' borders and the batch of a
step is a pure function of (documents, mixture, seed, step), so a run resumes at any step. Unlike there, a
document may begin in one window and continue in another, which does not see its beginning; a source's
tokens after its last full window are left out, and so are windows without a learned token.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.training.data.rows import Batches


class _Span(NamedTuple):
    """Windows of a source: first token of each, number per epoch, and number left out."""

    begins: np.ndarray
    drawn: float
    left_out: int


class WindowBatches(Batches):
    """Batches of windows (see the module)."""

    def __post_init__(self) -> None:
        if not self.count:
            raise ConfigError(
                f"no source has {self.row_tokens + 1} tokens, a window and its last target, one of them "
                'learnt; take shorter rows, more text, or loader = "packed"'
            )

    @property
    def count(self) -> int:
        """Number of windows of an epoch: those of every source `repeats` times."""
        return round(sum(span.drawn for span in self._spans))

    def epoch(self, number: int) -> range:
        """The numbers of an epoch's rows."""
        return range(number * self.count, (number + 1) * self.count)

    def epochs_at(self, step: int) -> float:
        """See `Batches`."""
        return step * self.batch / self.count

    def left_out(self) -> str:
        """See `Batches`."""
        count = sum(span.left_out for span in self._spans)
        return f"{count:,} rows of prompts alone are left out" if count else ""

    def row(self, number: int) -> tuple[np.ndarray, ...]:
        """See `Batches`."""
        source, chosen = self._order[number]
        at = int(self._spans[source].begins[chosen])
        ids = np.asarray(self.documents.tokens[at : at + self.row_tokens + 1], np.int32)
        place = np.arange(at, at + self.row_tokens + 1)
        of = np.searchsorted(self.documents.starts, place, side="right") - 1
        begins = self.documents.starts[of]
        inside = of[1:] == of[:-1]
        prompt = place[1:] - begins[1:] < self.documents.prompt_tokens[of[1:]]
        sources = self.documents.sources[of[1:]]
        given, learnt = 1.0, 1.0
        if self.mixture:
            given, learnt = self.mixture[source].weights
        weights = np.where(inside, np.where(prompt, given, learnt), 0).astype(np.float32)
        starts = np.maximum(begins[:-1] - at, 0).astype(np.int32)
        return ids[:-1], ids[1:], starts, weights, sources.astype(np.int32)

    @functools.cached_property
    def _spans(self) -> list[_Span]:
        spans = []
        for number in range(max(len(self.mixture), 1)):
            own = np.flatnonzero(self.documents.sources == number)
            begins, every = np.zeros(0, np.int64), 0
            weights, repeats = (1.0, 1.0), 1.0
            if self.mixture:
                weights, repeats = self.mixture[number].weights, self.mixture[number].repeats
            if len(own):
                # Sources follow one another in the files.
                first, end = (int(self.documents.starts[each]) for each in (own[0], own[-1] + 1))
                every = max((end - first - 1) // self.row_tokens, 0)
                begins = first + self.row_tokens * np.arange(every)
                begins = begins[self._learns(begins, own, weights)]
            spans.append(_Span(begins, len(begins) * repeats, every - len(begins)))
        return spans

    def _learns(self, begins: np.ndarray, own: np.ndarray, weights: tuple[float, float]) -> np.ndarray:
        """Whether each window of a source's documents `own` has a target with a weight."""
        lengths, prompt = self.documents.lengths[own], self.documents.prompt_tokens[own]
        given, learnt = weights
        # Of each document the places of its weighted targets; its first token is none.
        lowest = np.maximum(prompt, 1) if not given else np.ones_like(lengths)
        highest = np.minimum(prompt, lengths) if not learnt else lengths
        counts = np.maximum(highest - lowest, 0)
        before = np.cumsum(counts) - counts

        def up_to(place: np.ndarray) -> np.ndarray:
            of = np.searchsorted(self.documents.starts[own], place, side="right") - 1
            return before[of] + np.clip(place - self.documents.starts[own][of] - lowest[of], 0, counts[of])

        return up_to(begins + self.row_tokens + 1) > up_to(begins + 1)

    @functools.cached_property
    def _order(self) -> Any:
        """grain's endless data set of (source, window)."""
        grain = _grain()
        parts, weights = [], []
        for number, span in enumerate(self._spans):
            if span.drawn:
                order = grain.MapDataset.range(len(span.begins)).seed(self.seed + number).shuffle().repeat()
                parts.append(order.map(functools.partial(_with_source, number)))
                weights.append(span.drawn)
        return grain.MapDataset.mix(parts, weights=[each / sum(weights) for each in weights])


def _with_source(source: int, window: int) -> tuple[int, int]:
    return source, int(window)


def _grain() -> Any:
    try:
        import grain  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError("loader = \"grain\" needs `pip install 'jaxllm[data]'`") from error
    return grain
