"""Cuts documents into parts that fit a row, packs parts into rows, and samples the batch of every step.

Attention stops at a document's beginning and positions count from it, so the other documents of a row have
no effect. Each epoch samples every source `repeats` times, packs anew and visits the rows in a new order.
Each process of a group fills only the rows of its own devices (`own`), and so reads its share of the token
files; the assignment of documents to rows does not depend on the number of processes.

Documents are placed undivided into rows by best fit, longest first (best-fit packing, arXiv 2404.10830).
Documents longer than a row are cut, and each part but the first begins with the last token of the previous
one, so that every token but a document's first is a target once. If prompts are not learned, the cuts are
counted from the document's end, so that the answer follows as much of its prompt as fits the row, and parts
without a learned token are left out.

Corpora that are too large to pack are read in windows of the token files, by grain. A source's tokens are cut
every `row_tokens` into windows, which grain shuffles without storing their order in memory and mixes by
weight. Unlike in packed rows, a document may begin in one window and continue in another, which does not see
its beginning; a source's tokens after its last full window are left out, and so are windows without a learned
token.
"""

import abc
import bisect
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.training.data.corpus import Corpus, TokenizedDocuments
from jaxllm.training.data.encoders import Encoder
from jaxllm.training.data.sources import Source
from jaxllm.training.settings import TrainSettings

# What a batch's rows are filled for: their numbers, ascending; None for all.
Rows = tuple[int, ...] | None


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
class Batches(abc.ABC):
    """The batches of a run: a pure function of (documents, mixture, seed, step), so that there is no position
    to save.

    Attributes:
      documents: documents to learn.
      mixture: the sources, by number; empty for every document once per epoch, at weight 1.
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

    @abc.abstractmethod
    def __post_init__(self) -> None:
        """Raises ConfigError unless there are rows."""

    def batch_at(self, step: int, *, whole: bool = False) -> Batch:
        """The batch of step `step` (from 0), with `whole` all rows of it. Batches run across epochs' ends."""
        own = None if whole else self.own
        return filled(self.batch, own, lambda number: self.row(step * self.batch + number))

    @abc.abstractmethod
    def row(self, number: int) -> tuple[np.ndarray, ...]:
        """The five arrays `[T]` of row `number` (from 0, without an end)."""

    @abc.abstractmethod
    def epoch(self, number: int) -> Sequence[Any]:
        """The rows of an epoch."""

    @abc.abstractmethod
    def epochs_at(self, step: int) -> float:
        """Passes over the mixture after `step` steps."""

    @abc.abstractmethod
    def left_out(self) -> str:
        """Describes what is never trained on, for messages; empty if there is nothing."""


def filled(batch: int, own: Rows, row: Callable[[int], tuple[np.ndarray, ...]]) -> Batch:
    """A batch of `batch` rows, with those of `own` filled by `row`."""
    found = {number: row(number) for number in (range(batch) if own is None else own)}
    nothing = tuple(map(np.zeros_like, next(iter(found.values()))))
    rows = [found.get(number, nothing) for number in range(batch)]
    return Batch(*(np.stack(each) for each in zip(*rows, strict=True)))


def learnt_parts(
    documents: TokenizedDocuments, chosen: np.ndarray, row_tokens: int, mixture: Sequence[Source]
) -> tuple[np.ndarray, np.ndarray]:
    """Cuts documents into parts, and separates those without a weight.

    Args:
      documents: documents to cut.
      chosen: numbers of documents.
      row_tokens: maximum number of targets of a part.
      mixture: the sources, by number; empty for weights of 1.

    Returns:
      The parts, see `cut`, and the parts that are left out.
    """
    given, learnt = np.ones((2, len(documents)))
    if mixture:
        given, learnt = np.array([source.weights for source in mixture])[documents.sources].T
    prompt = documents.prompt_tokens
    parts = cut(documents.lengths, chosen, row_tokens, from_end=(prompt > 0) & (given == 0))
    of, first, last = parts.T
    # Target i of a part is the document's token first + 1 + i.
    in_prompt = np.clip(np.minimum(last, prompt[of]) - first - 1, 0, None)
    weights = in_prompt * given[of] + (last - first - 1 - in_prompt) * learnt[of]
    return parts[weights > 0], parts[weights <= 0]


def cut(
    lengths: np.ndarray, chosen: np.ndarray, row_tokens: int, *, from_end: np.ndarray | None = None
) -> np.ndarray:
    """Returns the parts `[parts, 3]` (document, first, last token + 1) of documents of these lengths, each
    with at most `row_tokens` targets; documents of one token have none.

    Args:
      lengths: number of tokens of each document.
      chosen: numbers of the documents to cut.
      row_tokens: maximum number of targets of a part.
      from_end: whether a document has a short first part, instead of a short last one.
    """
    counts = -((1 - lengths[chosen]) // row_tokens)
    of = np.repeat(np.arange(len(chosen)), counts)
    first = (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)) * row_tokens
    if from_end is not None:
        short = np.where(from_end[chosen], counts * row_tokens - (lengths[chosen] - 1), 0)
        first -= short[of]
    last = np.minimum(first + row_tokens + 1, lengths[chosen[of]])
    return np.stack([chosen[of], np.maximum(first, 0), last], axis=1).astype(np.int64)


def best_fit(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    """Places sizes (in [1, capacity]) into as few rows as best fit finds, longest first.

    Returns:
      The places in `sizes` of each row's members.
    """
    rows: list[list[int]] = []
    # Rows by the space left in them, and the sizes of space in order.
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for place in np.argsort(-sizes, kind="stable"):
        size = int(sizes[place])
        at = bisect.bisect_left(rooms, size)
        if at == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[at]
            row = by_room[room].pop()
            if not by_room[room]:
                rooms.pop(at)
        rows[row].append(int(place))
        left = room - size
        if left:
            members = by_room.setdefault(left, [])
            if not members:
                bisect.insort(rooms, left)
            members.append(row)
    return rows


def fill_row(
    documents: TokenizedDocuments, parts: np.ndarray, row_tokens: int, mixture: Sequence[Source]
) -> tuple[np.ndarray, ...]:
    """The five arrays `[T]` of a `Batch`'s row with these parts."""
    tokens, targets, starts, sources = (np.zeros(row_tokens, np.int32) for _ in range(4))
    weights = np.zeros(row_tokens, np.float32)
    at = 0
    for document, first, last in parts:
        begin, end = at, at + int(last - first) - 1
        ids = documents.tokens[documents.starts[document] + first : documents.starts[document] + last]
        tokens[begin:end], targets[begin:end] = ids[:-1], ids[1:]
        starts[begin:end] = begin
        source = int(documents.sources[document])
        sources[begin:end] = source
        if mixture:
            # Target i is the document's token first + 1 + i.
            given = np.clip(documents.prompt_tokens[document] - first - 1, 0, end - begin)
            weights[begin : begin + given], weights[begin + given : end] = mixture[source].weights
        else:
            weights[begin:end] = 1.0
        at = end
    # Padding is a document of its own, which no loss counts.
    starts[at:] = min(at, row_tokens - 1)
    return tokens, targets, starts, weights, sources


class _Span(NamedTuple):
    """Windows of a source: first token of each, number per epoch, and number left out."""

    begins: np.ndarray
    per_epoch: float
    left_out: int


class WindowBatches(Batches):
    """Batches of windows (see the module); a run resumes at any step."""

    def __post_init__(self) -> None:
        if not self.count:
            raise ConfigError(
                f"no source has {self.row_tokens + 1} tokens, a window and its last target, one of them "
                'learnt; take shorter rows, more text, or loader = "packed"'
            )

    @property
    def count(self) -> int:
        """Number of windows of an epoch: those of every source `repeats` times."""
        return round(sum(span.per_epoch for span in self._spans))

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
        try:
            import grain  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError("loader = \"grain\" needs `pip install 'jaxllm[data]'`") from error
        parts, weights = [], []
        for number, span in enumerate(self._spans):
            if span.per_epoch:
                order = grain.MapDataset.range(len(span.begins)).seed(self.seed + number).shuffle().repeat()
                parts.append(order.map(lambda window, source=number: (source, int(window))))
                weights.append(span.per_epoch)
        return grain.MapDataset.mix(parts, weights=[each / sum(weights) for each in weights])


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
        return f"{len(parts):,} rows of prompts alone are left out, of {count:,} documents" if count else ""

    def _place(self, pick: int) -> tuple[int, int]:
        epoch = 0
        while pick >= (rows := _epoch_rows(self, epoch)):
            pick -= rows
            epoch += 1
        return epoch, pick


@dataclasses.dataclass(frozen=True)
class Splits:
    """Tokens of a run: the training batches by step, and the held-out documents. Losses are measured on at
    most `most_batches` batches of them, 0 for all."""

    train: Batches
    held_out: TokenizedDocuments
    most_batches: int = 0

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
          folder: folder of the token files.
          loader: way to make rows.
          own: the rows of each batch that this process fills (see `jaxllm.training.loop.parallel.own_rows`).

        Raises:
          ConfigError: there are too few to train on, or a package that the loader needs is not installed.
        """
        train, held_out = (corpus.tokenized(encoder, split, folder) for split in ("train", "held_out"))
        kind = WindowBatches if loader == "grain" else PackedBatches
        shape = settings.row_tokens, settings.batch, settings.seed
        return cls(kind(train, corpus.sources, *shape, own), held_out, settings.evaluation_batches)

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
        train = self.train
        shape, most = (train.row_tokens, train.batch), self.most_batches
        return evaluation_batches(self.held_out, *shape, train.mixture, own=train.own, most=most)


@functools.lru_cache(maxsize=4096)
def _epoch_rows(batches: PackedBatches, number: int) -> int:
    return len(_epoch(batches, number))


@functools.lru_cache(maxsize=4)
def _epoch(batches: PackedBatches, number: int) -> list[np.ndarray]:
    generator = np.random.default_rng([batches.seed, number])
    chosen = draw(batches.documents, batches.mixture, generator)
    parts, _ = learnt_parts(batches.documents, chosen, batches.row_tokens, batches.mixture)
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
    chosen = []
    for number, source in enumerate(mixture):
        own = np.flatnonzero(documents.sources == number)
        whole, share = divmod(source.repeats, 1)
        chosen += [np.tile(own, int(whole)), generator.permutation(own)[: round(share * len(own))]]
    return np.concatenate(chosen)


def evaluation_batches(
    documents: TokenizedDocuments,
    row_tokens: int,
    batch: int,
    mixture: Sequence[Source] = (),
    *,
    own: Rows = None,
    most: int = 0,
) -> Iterator[Batch]:
    """Yields batches of documents for a loss, in which every learned token is a target exactly once: at most
    `most` of them (see `spread`); for `own` see `Batches`."""
    parts, _ = learnt_parts(documents, np.arange(len(documents)), row_tokens, mixture)
    rows = best_fit(parts[:, 2] - parts[:, 1] - 1, row_tokens)
    # Rows without documents fill the last batch.
    rows += [[]] * (-len(rows) % batch)
    for some in spread([rows[first : first + batch] for first in range(0, len(rows), batch)], most):
        yield filled(batch, own, lambda row: fill_row(documents, parts[some[row]], row_tokens, mixture))  # noqa: B023


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
