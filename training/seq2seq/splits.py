"""Reads and splits pairs for an existing encoder-decoder, and encodes them by its own tokenizer."""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.training.data.packing import spread
from jaxllm.training.data.sources import Source
from jaxllm.training.seq2seq.batches import PairBatch, PairRows
from jaxllm.training.seq2seq.pairs import TextPairs, read_pairs
from jaxllm.training.settings import TrainSettings

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
    tokenizer: Tokenizer,
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
        read = [leads[number] + text for number, (text, _) in zip(own.of, own.texts, strict=True)]
        said = [text for _, text in own.texts]
        return PairRows(
            list(zip(tokenizer.encode_many(read), tokenizer.encode_many(said), strict=True)),
            np.asarray(own.of, np.int32),
            (*(each for each in _LENGTHS if each < settings.row_tokens), settings.row_tokens),
            batch_tokens=settings.batch * settings.row_tokens,
            rows_multiple=rows_multiple,
            start_id=tokenizer.files.start_ids[0],
            seed=settings.seed,
        )

    digest = hashlib.blake2b(repr((leads, pairs.digest())).encode(), digest_size=16).hexdigest()
    names = [source.name for source in sources]
    return PairSplits(rows(taken), rows(kept), names, digest, settings.evaluation_batches)


def _lead(prefix: str | None, own: str) -> str:
    """Returns the prefix of a source, with the space between them; `own` is the model's."""
    if prefix is None:
        return own
    return f"{prefix.strip()} " if prefix.strip() else ""
