"""Cuts documents into parts that fit a row, places parts into rows, and fills rows and batches.

Documents are placed undivided into rows by best fit, longest first (best-fit packing, arXiv 2404.10830).
Documents longer than a row are cut, and each part but the first begins with the last token of the previous
one, so that every token but a document's first is a target once. If prompts are not learned, the cuts are
counted from the document's end, so that the answer follows as much of its prompt as fits the row, and parts
without a learned token are left out.
"""

import abc
import bisect
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.training.data.corpus import TokenizedDocuments
from jaxllm.training.data.sources import Source

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
    documents: TokenizedDocuments, drawn: np.ndarray, row_tokens: int, mixture: Sequence[Source]
) -> tuple[np.ndarray, np.ndarray]:
    """Cuts documents into parts, and separates those without a weight.

    Args:
      documents: documents to cut.
      drawn: numbers of documents.
      row_tokens: maximum number of targets of a part.
      mixture: the sources, by number; empty for weights of 1.

    Returns:
      The parts, see `cut`, and the parts that are left out.
    """
    given, learnt = np.ones((2, len(documents)))
    if mixture:
        given, learnt = np.array([source.weights for source in mixture])[documents.sources].T
    prompt = documents.prompt_tokens
    parts = cut(documents.lengths, drawn, row_tokens, from_end=(prompt > 0) & (given == 0))
    of, first, last = parts.T
    # Target i of a part is the document's token first + 1 + i.
    in_prompt = np.clip(np.minimum(last, prompt[of]) - first - 1, 0, None)
    weights = in_prompt * given[of] + (last - first - 1 - in_prompt) * learnt[of]
    return parts[weights > 0], parts[weights <= 0]


def cut(
    lengths: np.ndarray, drawn: np.ndarray, row_tokens: int, *, from_end: np.ndarray | None = None
) -> np.ndarray:
    """Returns the parts `[parts, 3]` (document, first, last token + 1) of documents of these lengths, each
    with at most `row_tokens` targets; documents of one token have none.

    Args:
      lengths: number of tokens of each document.
      drawn: numbers of the documents to cut.
      row_tokens: maximum number of targets of a part.
      from_end: whether a document has a short first part, instead of a short last one.
    """
    counts = -((1 - lengths[drawn]) // row_tokens)
    of = np.repeat(np.arange(len(drawn)), counts)
    first = (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)) * row_tokens
    if from_end is not None:
        short = np.where(from_end[drawn], counts * row_tokens - (lengths[drawn] - 1), 0)
        first -= short[of]
    last = np.minimum(first + row_tokens + 1, lengths[drawn[of]])
    return np.stack([drawn[of], np.maximum(first, 0), last], axis=1).astype(np.int64)


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
