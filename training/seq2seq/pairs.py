"""Reads pairs of texts, splits and encodes them, and makes batches of pairs of similar length, so that a step
has little padding and few compiled shapes.

Row lengths are a short list; a pair's row has the minimum length that fits its source and its target. All
rows of a batch are of one length, and batches of shorter rows have more of them, so that every batch has
about as many tokens. Batches follow from (pairs, settings, step) only.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.tasks.example import Record, held_out, paired_lines, read_jsonl, text_field
from jaxllm.text import tokenizer as model_tokenizer
from jaxllm.training.data.rows import spread
from jaxllm.training.data.sources import Source
from jaxllm.training.settings import TrainSettings

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


@dataclasses.dataclass(frozen=True, eq=False)
class TextPairs:
    """Pairs of texts.

    Attributes:
      texts: source and target of each pair.
      of: number of each pair's source of data.
      one_way: numbers of the sources of data whose targets are no sources: labels, and several targets of
        one source.
    """

    texts: Sequence[tuple[str, str]]
    of: Sequence[int]
    one_way: frozenset[int] = frozenset()

    def digest(self) -> str:
        """Names their content."""
        return hashlib.blake2b(repr((self.texts, self.of)).encode(), digest_size=16).hexdigest()

    def split(self, share: float) -> "tuple[TextPairs, TextPairs]":
        """Splits into a training set and a held-out `share`. Only a pair's texts decide, in either
        direction: a sentence is never on both sides with its translation. For one-way pairs the source
        decides (`held_out`)."""
        sides: list[list[int]] = [[], []]
        for place, (texts, of) in enumerate(zip(self.texts, self.of, strict=True)):
            key = texts[0] if of in self.one_way else "\0".join(sorted(texts))
            sides[held_out(key, share)].append(place)
        taken, kept = (
            TextPairs([self.texts[each] for each in side], [self.of[each] for each in side], self.one_way)
            for side in sides
        )
        if not taken.texts or not kept.texts:
            raise ConfigError(
                f"of {len(self.texts)} pairs {len(kept.texts)} are held out by a held_out_share of {share}: "
                "give more pairs, or another share"
            )
        return taken, kept


def read_pairs(sources: Sequence[Source], data: Path | None = None) -> TextPairs:
    """Reads the pairs of all sources, in order; pairs with an empty side are left out.

    Args:
      data: folder of relative paths; the working directory by default.

    Raises:
      ConfigError: a file cannot be read, two files have different numbers of lines, or a record lacks a
        field.
    """
    texts: list[tuple[str, str]] = []
    of: list[int] = []
    for number, source in enumerate(sources):
        files = [Path(data or ".") / name for name in source.pairs]
        if source.fields:
            records = read_json_pairs(files[0], *source.fields)
            found = [(text, target) for text, targets in records for target in targets]
        else:
            found = list(read_pair_files(files[0], files[1]).texts)
        texts += found
        of += [number] * len(found)
    return TextPairs(texts, of, frozenset(n for n, each in enumerate(sources) if each.fields))


def read_json_pairs(path: Path, source: str, target: str) -> list[tuple[str, list[str]]]:
    """The sources of a file of JSON lines with all targets of each; one without any is left out.

    Args:
      path: a file with a JSON object per line.
      source: the field of the source.
      target: the field of the target, or of a list of targets.

    Raises:
      ConfigError: the file cannot be read, or a record lacks a field.
    """

    def make(record: Record) -> list[tuple[str, list[str]]]:
        text, given = text_field(record, source).strip(), record.get(target)
        listed = given if isinstance(given, list) else [given]
        each = [text_field({target: one}, target).strip() for one in listed]
        targets = [one for one in dict.fromkeys(each) if one]
        return [(text, targets)] if text and targets else []

    return list(read_jsonl(path, make))


def held_out_of(pairs: Sequence[tuple[str, list[str]]], share: float) -> list[tuple[str, list[str]]]:
    """Returns the pairs of JSON lines whose source is in the held-out `share` of `TextPairs.split`."""
    return [pair for pair in pairs if held_out(pair[0], share)]


def read_pair_files(source: Path, target: Path) -> TextPairs:
    """Reads the pairs of two files by their line numbers; pairs with an empty side are left out.

    Raises:
      ConfigError: a file cannot be read, or their numbers of lines differ.
    """
    pairs = paired_lines(source, target, read_lines)
    return TextPairs(pairs, [0] * len(pairs))


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file, stripped.

    Raises:
      ConfigError: it cannot be read as UTF-8.
    """
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path} as UTF-8 text: {error}") from error


def rows_of(
    pairs: TextPairs,
    leads: Sequence[str],
    encode: Callable[[list[str]], Sequence[Sequence[int]]],
    settings: TrainSettings,
    lengths: tuple[int, ...],
    rows_multiple: int,
    start_id: int,
) -> PairRows:
    """Pairs as tokens, each source after the lead of its source of data, in rows of some lengths."""
    read = [leads[of] + text for of, (text, _) in zip(pairs.of, pairs.texts, strict=True)]
    said = [text for _, text in pairs.texts]
    return PairRows(
        pairs=list(zip(encode(read), encode(said), strict=True)),
        of=np.asarray(pairs.of, np.int32),
        lengths=lengths,
        batch_tokens=settings.batch * settings.row_tokens,
        rows_multiple=rows_multiple,
        start_id=start_id,
        seed=settings.seed,
    )


# Lengths of rows in tokens, below the recipe's: few, because each is compiled.
_LENGTHS = (32, 64, 128, 256, 512, 1024)


@dataclasses.dataclass(frozen=True, eq=False)
class PairSplits:
    """Pairs of a run as tokens.

    Attributes:
      source_names: names of the pairs' sources, by number.
      digest: digest of the texts and of the prefix of each source.
      most_batches: maximum number of batches that losses are measured on; 0 for all.
    """

    train: PairRows
    held_out: PairRows
    source_names: list[str]
    digest: str
    most_batches: int = 0

    def first_epoch(self) -> Iterator[PairBatch]:
        """The training batches of the first epoch."""
        return (self.train.batch_at(step) for step in range(self.train.batches_per_epoch))

    def epochs_at(self, step: int) -> float:
        """Passes over the pairs after `step` steps."""
        return step / self.train.batches_per_epoch

    def size(self) -> str:
        """Describes the amount of training data, for messages."""
        tokens = sum(len(side) for pair in self.train.pairs for side in pair)
        return f"{len(self.train.pairs):,} pairs, {tokens:,} tokens of both sides"

    def held_out_batches(self) -> Iterator[PairBatch]:
        """Yields the held-out pairs to measure losses on."""
        return spread(self.held_out.held_out(), self.most_batches)


def read_splits(
    sources: Sequence[Source],
    data: Path | None,
    tokenizer: model_tokenizer.Tokenizer,
    settings: TrainSettings,
    *,
    held_out_share: float,
    rows_multiple: int,
) -> PairSplits:
    """Reads the pairs of all sources.

    Args:
      sources: sources of pairs only.
      data: folder of relative paths.
      settings: settings of the loop: a step has `batch` times `row_tokens` tokens on each side; longer
        texts are cut.
      held_out_share: share of the pairs that is not trained on.
      rows_multiple: divisor of the number of rows of every batch.

    Raises:
      ConfigError: a source has no pairs, a file cannot be read, there are too few pairs, or the model does
        not define the token that its decoder begins with.
    """
    if others := [source.name for source in sources if not source.pairs]:
        raise ConfigError(
            f"an encoder-decoder learns from pairs, but {', '.join(others)} has none: give --pairs SOURCE "
            "TARGET, or a recipe with pairs"
        )
    if not tokenizer.files.start_ids:
        raise ConfigError(
            "the model does not say which token its decoder begins with; set decoder_start_token_id in the "
            "folder's generation_config.json"
        )
    pairs = read_pairs(sources, data)
    taken, kept = pairs.split(held_out_share)
    # A prefix has a space behind it; the model's own is used without one.
    given = [None if source.prefix is None else source.prefix.strip() for source in sources]
    own = tokenizer.files.source_prefix
    leads = [own if each is None else f"{each} " if each else "" for each in given]

    def rows(own: TextPairs) -> PairRows:
        lengths = (*(each for each in _LENGTHS if each < settings.row_tokens), settings.row_tokens)
        start_id = tokenizer.files.start_ids[0]
        return rows_of(own, leads, tokenizer.encode_many, settings, lengths, rows_multiple, start_id)

    digest = hashlib.blake2b(repr((leads, pairs.digest())).encode(), digest_size=16).hexdigest()
    names = [source.name for source in sources]
    return PairSplits(rows(taken), rows(kept), names, digest, settings.evaluation_batches)
