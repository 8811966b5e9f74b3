"""Reads pairs of texts, splits them, trains their tokenizer, and encodes them."""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, processors

from jaxllm.errors import ConfigError
from jaxllm.tasks.example import Record, held_out, paired_lines, read_jsonl, text_field
from jaxllm.training.data.tokenizer import END_OF_TEXT, PAD, token_id, train_tokenizer
from jaxllm.training.seq2seq.batches import PairRows
from jaxllm.training.seq2seq.job import Seq2SeqRecipe


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
      recipe: recipe of the run.
      rows_multiple: divisor of the number of rows of every batch.
    """
    prefixes = [source.prefix for source in recipe.sources]
    read = (f"{prefixes[of]} {text[0]}" for of, text in zip(pairs.of, pairs.texts, strict=True))
    sides = [list(encoded(tokenizer, texts)) for texts in (read, (text for _, text in pairs.texts))]
    return PairRows(
        pairs=list(zip(*sides, strict=True)),
        of=np.asarray(pairs.of, np.int32),
        lengths=recipe.lengths,
        batch_tokens=recipe.batch * recipe.row_tokens,
        rows_multiple=rows_multiple,
        start_id=token_id(tokenizer, PAD),
        seed=recipe.seed,
    )


def encoded(tokenizer: Tokenizer, texts) -> Iterator[list[int]]:
    """The tokens of each text, with its end."""
    return (each.ids for each in tokenizer.encode_batch_fast(list(texts)))
