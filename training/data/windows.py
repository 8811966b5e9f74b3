"""Draws batches from corpora that are too large to pack: windows of the token files, by grain.

A source's tokens are cut every `row_tokens` into windows, which grain shuffles without keeping their order in
memory and mixes by weight. As with packed rows, attention stops at documents' borders and the batch of a step
is a pure function of (documents, mixture, seed, step), so that a run resumes at any step. Unlike there, a
document may begin in one window and go on in another, which does not see its beginning; a source's tokens
after its last whole window are left out.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError
from training.data.corpus import TokenizedDocuments
from training.data.sources import Source


@dataclasses.dataclass(frozen=True, eq=False)
class WindowRows:
    """The rows of a run, by number; attributes as of `training.data.packing.PackedBatches`."""

    documents: TokenizedDocuments
    mixture: tuple[Source, ...]
    row_tokens: int
    seed: int

    def __post_init__(self) -> None:
        if not self.count:
            raise ConfigError(
                f"no source has {self.row_tokens + 1} tokens, a window and its last target; take shorter "
                'rows, more text, or loader = "packed"'
            )

    @property
    def count(self) -> int:
        """Windows of an epoch: of every source as often as its `repeats` says."""
        return round(sum(weight for _, _, weight in self._spans))

    def row(self, number: int) -> tuple[np.ndarray, ...]:
        """The five arrays `[T]` of row `number` (from 0, without an end)."""
        source, window = self._order[number]
        at = self._spans[source][0] + window * self.row_tokens
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
    def _spans(self) -> list[tuple[int, int, float]]:
        """Of each source its first token, its windows, and these as often as they are drawn in an epoch."""
        spans = []
        for number in range(max(len(self.mixture), 1)):
            own = np.flatnonzero(self.documents.sources == number)
            first, windows = 0, 0
            if len(own):
                # Sources follow one another in the files.
                first, end = (int(self.documents.starts[each]) for each in (own[0], own[-1] + 1))
                windows = max((end - first - 1) // self.row_tokens, 0)
            repeats = self.mixture[number].repeats if self.mixture else 1.0
            spans.append((first, windows, windows * repeats))
        return spans

    @functools.cached_property
    def _order(self) -> Any:
        """grain's endless data set of (source, window)."""
        grain = _grain()
        parts, weights = [], []
        for number, (_, windows, weight) in enumerate(self._spans):
            if weight:
                order = grain.MapDataset.range(windows).seed(self.seed + number).shuffle().repeat()
                parts.append(order.map(functools.partial(_with_source, number)))
                weights.append(weight)
        return grain.MapDataset.mix(parts, weights=[each / sum(weights) for each in weights])


def _with_source(source: int, window: int) -> tuple[int, int]:
    return source, int(window)


def _grain() -> Any:
    try:
        import grain  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError("loader = \"grain\" needs `pip install 'jaxllm[data]'`") from error
    return grain
