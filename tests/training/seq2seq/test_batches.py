"""Batches hold every pair once an epoch, in rows of their length."""

import dataclasses

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.training.seq2seq.pairs import PairRows

# Pairs named by their first token; the longer side decides the row's length.
PAIRS = [([10 + n] + [2] * (n % 7), [10 + n] + [3] * ((n * 5) % 9)) for n in range(40)]
ROWS = PairRows(
    PAIRS, np.arange(40, dtype=np.int32) % 2, (4, 8), batch_tokens=16, rows_multiple=1, start_id=1, seed=0
)


def test_an_epoch_has_every_pair_at_most_once_and_each_epoch_has_another_order():
    epochs = []
    for first in (0, ROWS.batches_per_epoch):
        batches = [ROWS.batch_at(first + step) for step in range(ROWS.batches_per_epoch)]
        epochs.append([int(row[0]) for batch in batches for row in batch.read])
        assert {batch.tokens.shape for batch in batches} == {(4, 4), (2, 8)}
    assert epochs[0] != epochs[1]
    assert len(set(epochs[0])) == len(epochs[0])
    assert len(epochs[0]) >= 36


def test_batches_follow_from_the_step_alone():
    again = dataclasses.replace(ROWS)
    for step in (7, 0):
        for ours, theirs in zip(
            dataclasses.astuple(ROWS.batch_at(step)), dataclasses.astuple(again.batch_at(step)), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)


def test_held_out_batches_have_all_tokens_once():
    batches = list(ROWS.held_out())
    assert sum(batch.weights.sum() for batch in batches) == sum(min(len(t), 8) for _, t in PAIRS)
    assert all((batch.read_tokens >= 1).all() for batch in batches)


def test_the_decoder_reads_what_it_should_have_said_one_token_later():
    batch = next(ROWS.held_out())
    assert (batch.tokens[:, 0] == 1).all()
    np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])


def test_too_few_pairs_for_a_batch_are_refused():
    few = dataclasses.replace(ROWS, pairs=PAIRS[:1], of=ROWS.of[:1])
    with pytest.raises(ConfigError, match="do not fill a batch"):
        few.batch_at(0)
