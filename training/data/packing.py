"""Packs documents into rows of a fixed length (see `rows.py`), and samples the batch of every step.

Attention stops at a document's beginning and positions count from it, so the other documents of a row have
no effect.

The batch of a step is a pure function of (documents, mixture, seed, step): there is no position to save.
Each epoch samples every source `repeats` times, packs anew and visits the rows in a new order.

Each process of a group fills only the rows of its own devices (`own`), and so reads its share of the token
files; the assignment of documents to rows does not depend on the number of processes.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.training.data.corpus import Corpus, TokenizedDocuments
from jaxllm.training.data.encoders import Encoder
from jaxllm.training.data.rows import best_fit, fill_row, learnt_parts
from jaxllm.training.data.sources import Source
from jaxllm.training.data.windows import WindowRows
from jaxllm.training.settings import TrainSettings

# What a batch's rows are filled for: their numbers, ascending; None for all.
Rows = tuple[int, ...] | None
# How training rows are made: packed documents, or windows by grain.
Loader = Literal["packed", "grain"]
LOADERS = ("packed", "grain")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Rows of packed documents.

    Attributes:
      tokens: `[B, T]` int32, the inputs.
      targets: `[B, T]` int32, the token after each.
      starts: `[B, T]` int32, position in the row of the beginning of each token's document.
      weights: `[B, T]` float32, weight of each target's loss; 0 in padding.
      sources: `[B, T]` int32, number of each document's source.

    Rows of other processes are zero.
    """

    tokens: np.ndarray
    targets: np.ndarray
    starts: np.ndarray
    weights: np.ndarray
    sources: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class PackedBatches:
    """Batches of a run, by step.

    Attributes:
      documents: documents to pack.
      mixture: the sources, by number; empty for every document once per epoch, at weight 1.
      row_tokens: T.
      batch: B, rows per step.
      seed: seed of the order.
      own: rows of each batch that this process fills.
    """

    documents: TokenizedDocuments
    mixture: tuple[Source, ...]
    row_tokens: int
    batch: int
    seed: int
    own: Rows = None

    def __post_init__(self) -> None:
        if not self.epoch(0):
            raise ConfigError(
                f"{len(self.documents.tokens)} training tokens are too few: every document needs two, one of "
                "them learnt, and a source with repeats below 1 must leave some"
            )

    def batch_at(self, step: int, *, whole: bool = False) -> Batch:
        """The batch of step `step` (from 0), with `whole` all rows of it. Batches run across epochs' ends."""

        def row(number: int) -> tuple[np.ndarray, ...]:
            epoch, place = self._place(step * self.batch + number)
            return self._row(self.epoch(epoch)[place])

        return filled(self.batch, None if whole else self.own, row)

    def epoch(self, number: int) -> list[np.ndarray]:
        """The rows of an epoch: each row's parts `[parts, 3]` int64 (document, first, last token + 1)."""
        return _epoch(self, number)

    def epochs_at(self, step: int) -> float:
        """Passes over the mixture after `step` steps."""
        epoch, place = self._place(step * self.batch)
        return epoch + place / len(self.epoch(epoch))

    def left_out(self) -> str:
        """Describes what is never trained on, for messages; empty if there is nothing."""
        every = np.arange(len(self.documents))
        _, parts = learnt_parts(self.documents, every, self.row_tokens, self.mixture)
        count = len(np.unique(parts[:, 0]))
        if not count:
            return ""
        return f"{len(parts):,} rows of prompts alone are left out, of {count:,} documents"

    def _place(self, pick: int) -> tuple[int, int]:
        epoch = 0
        while pick >= (rows := self._rows(epoch)):
            pick -= rows
            epoch += 1
        return epoch, pick

    def _rows(self, epoch: int) -> int:
        return _epoch_rows(self, epoch)

    def _row(self, parts: np.ndarray) -> tuple[np.ndarray, ...]:
        return fill_row(self.documents, parts, self.row_tokens, self.mixture)


@dataclasses.dataclass(frozen=True, eq=False)
class WindowBatches:
    """The batches of a run, by step, of windows of the token files (see `jaxllm.training.data.windows`); for
    `own` see `PackedBatches`."""

    rows: WindowRows
    batch: int
    own: Rows = None

    @property
    def documents(self) -> TokenizedDocuments:
        """Documents that windows are cut from."""
        return self.rows.documents

    @property
    def mixture(self) -> tuple[Source, ...]:
        """The sources, by number."""
        return self.rows.mixture

    @property
    def row_tokens(self) -> int:
        """T."""
        return self.rows.row_tokens

    def batch_at(self, step: int, *, whole: bool = False) -> Batch:
        """The batch of step `step` (from 0), with `whole` all rows of it."""
        own = None if whole else self.own
        return filled(self.batch, own, lambda number: self.rows.row(step * self.batch + number))

    def epoch(self, number: int) -> range:
        """The numbers of an epoch's rows."""
        return range(number * self.rows.count, (number + 1) * self.rows.count)

    def epochs_at(self, step: int) -> float:
        """Passes over the mixture after `step` steps."""
        return step * self.batch / self.rows.count

    def left_out(self) -> str:
        """Describes what is never trained on, for messages; empty if there is nothing."""
        count = self.rows.left_out
        return f"{count:,} rows of prompts alone are left out" if count else ""


@dataclasses.dataclass(frozen=True)
class Splits:
    """Tokens of a run: the training batches by step, and the held-out documents. Losses are measured on at
    most `most_batches` batches of them, 0 for all; for `own` see `PackedBatches`."""

    train: PackedBatches | WindowBatches
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
        loader: Loader = "packed",
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
        shape = settings.row_tokens, settings.batch
        if loader == "grain":
            rows = WindowRows(train, corpus.sources, settings.row_tokens, settings.seed)
            batches = WindowBatches(rows, settings.batch, own)
        else:
            batches = PackedBatches(train, corpus.sources, *shape, settings.seed, own)
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


def filled(batch: int, own: Rows, row: Callable[[int], tuple[np.ndarray, ...]]) -> Batch:
    """A batch of `batch` rows, with those of `own` filled by `row`."""
    found = {number: row(number) for number in (range(batch) if own is None else own)}
    nothing = tuple(map(np.zeros_like, next(iter(found.values()))))
    rows = [found.get(number, nothing) for number in range(batch)]
    return Batch(*(np.stack(each) for each in zip(*rows, strict=True)))


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
