"""Reads pairs of texts, splits them, trains their tokenizer, and encodes them by it or by a model's own."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, processors

from jaxllm.errors import ConfigError
from jaxllm.tasks.example import Record, held_out, paired_lines, read_jsonl, text_field
from jaxllm.text import tokenizer as model_tokenizer
from jaxllm.training.data.packing import spread
from jaxllm.training.data.sources import Source
from jaxllm.training.data.tokenizer import END_OF_TEXT, PAD, token_id, train_tokenizer
from jaxllm.training.seq2seq.batches import PairBatch, PairRows
from jaxllm.training.seq2seq.job import Seq2SeqRecipe
from jaxllm.training.settings import TrainSettings


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


def read_pairs(sources: Sequence[tuple[Sequence[str], Sequence[str]]], data: Path | None = None) -> TextPairs:
    """Reads the pairs of all sources, in order; pairs with an empty side are left out.

    Args:
      sources: files and fields of each: two text files and no fields, or one file of JSON lines and two
        fields.
      data: folder of relative paths; the working directory by default.

    Raises:
      ConfigError: a file cannot be read, two files have different numbers of lines, or a record lacks a
        field.
    """
    texts: list[tuple[str, str]] = []
    of: list[int] = []
    for number, (names, fields) in enumerate(sources):
        files = [Path(data or ".") / name for name in names]
        if fields:
            records = read_json_pairs(files[0], fields[0], fields[1])
            found = [(text, target) for text, targets in records for target in targets]
        else:
            found = list(read_pair_files(files[0], files[1]).texts)
        texts += found
        of += [number] * len(found)
    return TextPairs(texts, of, frozenset(n for n, (_, fields) in enumerate(sources) if fields))


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
        each = [text_field({target: one}, target).strip() for one in _listed(given)]
        targets = [one for one in dict.fromkeys(each) if one]
        return [(text, targets)] if text and targets else []

    return list(read_jsonl(path, make))


def held_out_of(pairs: Sequence[tuple[str, list[str]]], share: float) -> list[tuple[str, list[str]]]:
    """Returns the pairs of JSON lines whose source is in the held-out `share` of `TextPairs.split`."""
    return [pair for pair in pairs if held_out(pair[0], share)]


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


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


def pair_tokenizer(pairs: TextPairs, recipe: Seq2SeqRecipe) -> Tokenizer:
    """Trains the tokenizer of both sides.

    The prefix of each task is a token, so that a source grows by one token; and every text ends in
    `<|endoftext|>`, as T5's do.

    Raises:
      ConfigError: the texts are too few for the vocabulary.
    """
    prefixes = sorted({source.prefix for source in recipe.sources})
    texts = (text for pair in pairs.texts for text in pair)
    tokenizer = train_tokenizer(texts, recipe.cfg.vocab_size - len(prefixes))
    # The text after a prefix is encoded like the beginning of a text.
    tokenizer.add_tokens([AddedToken(each, rstrip=True, normalized=False) for each in prefixes])
    end = token_id(tokenizer, END_OF_TEXT)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END_OF_TEXT}", special_tokens=[(END_OF_TEXT, end)]
    )
    return tokenizer


def encoded_rows(
    pairs: TextPairs, tokenizer: Tokenizer, recipe: Seq2SeqRecipe, rows_multiple: int
) -> PairRows:
    """Encodes pairs, each source after its prefix, and puts them into rows.

    Args:
      pairs: the texts.
      tokenizer: tokenizer of `pair_tokenizer`.
      rows_multiple: divisor of the number of rows of every batch.
    """
    leads = [f"{source.prefix} " for source in recipe.sources]

    def encode(texts: list[str]) -> list[list[int]]:
        return [each.ids for each in tokenizer.encode_batch_fast(texts)]

    start_id = token_id(tokenizer, PAD)
    return _rows(pairs, leads, encode, recipe, recipe.lengths, rows_multiple, start_id)


def _rows(
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
      train: training pairs.
      held_out: held-out pairs.
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
    pairs = read_pairs([(source.pairs, source.fields) for source in sources], data)
    taken, kept = pairs.split(held_out_share)
    leads = [_lead(source.prefix, tokenizer.files.source_prefix) for source in sources]

    def rows(own: TextPairs) -> PairRows:
        lengths = (*(each for each in _LENGTHS if each < settings.row_tokens), settings.row_tokens)
        start_id = tokenizer.files.start_ids[0]
        return _rows(own, leads, tokenizer.encode_many, settings, lengths, rows_multiple, start_id)

    digest = hashlib.blake2b(repr((leads, pairs.digest())).encode(), digest_size=16).hexdigest()
    names = [source.name for source in sources]
    return PairSplits(rows(taken), rows(kept), names, digest, settings.evaluation_batches)


def _lead(prefix: str | None, own: str) -> str:
    """Returns the prefix of a source, with the space between them; `own` is the model's."""
    if prefix is None:
        return own
    return f"{prefix.strip()} " if prefix.strip() else ""
