"""Packs documents into rows of a fixed length (see `rows.py`), and samples the batch of every step.

Attention stops at a document's beginning and positions count from it, so the other documents of a row have
no effect. Each epoch samples every source `repeats` times, packs anew and visits the rows in a new order.

Each process of a group fills only the rows of its own devices (`own`), and so reads its share of the token
files; the assignment of documents to rows does not depend on the number of processes.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.training.data.corpus import Corpus, TokenizedDocuments
from jaxllm.training.data.encoders import Encoder
from jaxllm.training.data.rows import (
    Batch,
    Batches,
    Rows,
    WindowBatches,
    best_fit,
    fill_row,
    filled,
    learnt_parts,
)
from jaxllm.training.data.sources import Source
from jaxllm.training.settings import TrainSettings


class PackedBatches(Batches):
    """Batches of packed documents."""

    def __post_init__(self) -> None:
        if not self.epoch(0):
            raise ConfigError(
                f"{len(self.documents.tokens)} training tokens are too few: every document needs two, one of "
                "them learnt, and a source with repeats below 1 must leave some"
            )

    def row(self, number: int) -> tuple[np.ndarray, ...]:
        """See `Batches`."""
        epoch, place = self._place(number)
        return fill_row(self.documents, self.epoch(epoch)[place], self.row_tokens, self.mixture)

    def epoch(self, number: int) -> list[np.ndarray]:
        """The rows of an epoch: each row's parts `[parts, 3]` int64 (document, first, last token + 1)."""
        return _epoch(self, number)

    def epochs_at(self, step: int) -> float:
        """See `Batches`."""
        epoch, place = self._place(step * self.batch)
        return epoch + place / len(self.epoch(epoch))

    def left_out(self) -> str:
        """See `Batches`."""
        every = np.arange(len(self.documents))
        _, parts = learnt_parts(self.documents, every, self.row_tokens, self.mixture)
        count = len(np.unique(parts[:, 0]))
        if not count:
            return ""
        return f"{len(parts):,} rows of prompts alone are left out, of {count:,} documents"

    def _place(self, pick: int) -> tuple[int, int]:
        epoch = 0
        while pick >= (rows := _epoch_rows(self, epoch)):
            pick -= rows
            epoch += 1
        return epoch, pick


@dataclasses.dataclass(frozen=True)
class Splits:
    """Tokens of a run: the training batches by step, and the held-out documents. Losses are measured on at
    most `most_batches` batches of them, 0 for all; for `own` see `PackedBatches`."""

    train: Batches
    held_out: TokenizedDocuments
    most_batches: int = 0
    own: Rows = None

    @classmethod
    def of(
        cls,
        corpus: Corpus,
        encoder: Encoder,
        settings: TrainSettings,
        folder: Path,
        *,
        loader: Literal["packed", "grain"] = "packed",
        own: Rows = None,
    ) -> "Splits":
        """Reads both splits' tokens from `folder`, after writing them if necessary.

        Args:
          corpus: the documents.
          encoder: encoder of the documents.
          settings: settings of the run.
          folder: folder of the token files.
          loader: way to make rows.
          own: the rows of each batch that this process fills (see `jaxllm.training.loop.parallel.own_rows`).

        Raises:
          ConfigError: there are too few to train on, or a package that the loader needs is not installed.
        """
        train, held_out = (corpus.tokenized(encoder, split, folder) for split in ("train", "held_out"))
        kind = WindowBatches if loader == "grain" else PackedBatches
        shape = settings.row_tokens, settings.batch, settings.seed
        batches = kind(train, corpus.sources, *shape, own)
        return cls(batches, held_out, settings.evaluation_batches, own)

    @property
    def source_names(self) -> list[str]:
        """The sources' names in metrics, by number."""
        return [source.name for source in self.train.mixture]

    def epochs_at(self, step: int) -> float:
        """Passes over the documents after `step` steps."""
        return self.train.epochs_at(step)

    def size(self) -> str:
        """Describes the amount of training data, for messages."""
        training, left_out = self.train.documents, self.train.left_out()
        size = f"{len(training):,} documents, {len(training.tokens):,} tokens"
        return f"{size} ({left_out})" if left_out else size

    def first_epoch(self) -> Iterator[Batch]:
        """The training batches of the first epoch, all rows of them."""
        steps = -(-len(self.train.epoch(0)) // self.train.batch)
        return (self.train.batch_at(step, whole=True) for step in range(steps))

    def held_out_batches(self) -> Iterator[Batch]:
        """Yields batches of held-out documents to measure losses on, weighted as in training."""
        shape = self.train.row_tokens, self.train.batch
        batches = evaluation_batches(self.held_out, *shape, self.train.mixture, own=self.own)
        return spread(batches, self.most_batches)


@functools.lru_cache(maxsize=4096)
def _epoch_rows(batches: PackedBatches, number: int) -> int:
    return len(_epoch(batches, number))


@functools.lru_cache(maxsize=4)
def _epoch(batches: PackedBatches, number: int) -> list[np.ndarray]:
    generator = np.random.default_rng([batches.seed, number])
    drawn = draw(batches.documents, batches.mixture, generator)
    parts, _ = learnt_parts(batches.documents, drawn, batches.row_tokens, batches.mixture)
    # A random order among parts of one length packs other documents together each time.
    parts = parts[generator.permutation(len(parts))]
    rows = best_fit(parts[:, 2] - parts[:, 1] - 1, batches.row_tokens)
    return [parts[rows[place]] for place in generator.permutation(len(rows))]


def draw(
    documents: TokenizedDocuments, mixture: Sequence[Source], generator: np.random.Generator
) -> np.ndarray:
    """Samples the documents of an epoch, by number, each `repeats` times; fractions at random."""
    if not mixture:
        return np.arange(len(documents))
    drawn = []
    for number, source in enumerate(mixture):
        own = np.flatnonzero(documents.sources == number)
        whole, share = divmod(source.repeats, 1)
        drawn += [np.tile(own, int(whole)), generator.permutation(own)[: round(share * len(own))]]
    return np.concatenate(drawn)


@dataclasses.dataclass(frozen=True, eq=False)
class EvaluationBatches(Sequence[Batch]):
    """Batches in which every learned token is a target exactly once, filled on access.

    Attributes:
      documents, mixture, row_tokens, own: see `PackedBatches`.
      parts: `[parts, 3]`, see `jaxllm.training.data.rows.cut`.
      rows: positions in `parts`, of each batch and row.
    """

    documents: TokenizedDocuments
    mixture: tuple[Source, ...]
    row_tokens: int
    parts: np.ndarray
    rows: tuple[tuple[list[int], ...], ...]
    own: Rows = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return dataclasses.replace(self, rows=self.rows[number])
        rows = self.rows[number]
        return filled(
            len(rows),
            self.own,
            lambda row: fill_row(self.documents, self.parts[rows[row]], self.row_tokens, self.mixture),
        )


def evaluation_batches(
    documents: TokenizedDocuments,
    row_tokens: int,
    batch: int,
    mixture: Sequence[Source] = (),
    *,
    own: Rows = None,
) -> EvaluationBatches:
    """The batches of documents for a loss; `own`: see `PackedBatches`."""
    parts, _ = learnt_parts(documents, np.arange(len(documents)), row_tokens, mixture)
    rows = best_fit(parts[:, 2] - parts[:, 1] - 1, row_tokens)
    # Rows without documents fill the last batch.
    rows += [[]] * (-len(rows) % batch)
    grouped = tuple(tuple(rows[first : first + batch]) for first in range(0, len(rows), batch))
    return EvaluationBatches(documents, tuple(mixture), row_tokens, parts, grouped, own)


def spread(batches: Iterable[Any], most: int) -> Iterator[Any]:
    """Yields at most `most` batches, at equal distances in their order; 0 for all.

    Rows are packed longest first, so the first ones have only long documents.
    """
    if not most:
        yield from batches
        return
    every = batches if isinstance(batches, Sequence) else list(batches)
    count = min(most, len(every))
    # The middle of each of `count` equal parts.
    yield from (every[(2 * number + 1) * len(every) // (2 * count)] for number in range(count))
