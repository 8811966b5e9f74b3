"""Packing: what is in a row or a window, how often, in which order."""

import dataclasses
import sys

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.training.data.corpus import TokenizedDocuments
from jaxllm.training.data.rows import (
    PackedBatches,
    WindowBatches,
    best_fit,
    cut,
    draw,
    evaluation_batches,
    spread,
)
from jaxllm.training.data.sources import Source
from jaxllm.training.loop import trainer as loop
from tests.training.jobs import DOCUMENTS, SMOKE, assert_same_bits, held_out_of, trainer_of


def documents_of(lengths, sources=None, prompts=None):
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    # Token = 100 · document + place, so that a row shows what it is made of.
    tokens = np.concatenate([100 * i + np.arange(n) for i, n in enumerate(lengths)]).astype(np.uint16)
    nothing = np.zeros(len(lengths), np.int64)
    own = [nothing if each is None else np.asarray(each) for each in (prompts, sources)]
    return TokenizedDocuments(tokens, starts, *own, 0)


RAGGED = documents_of([5, 1, 30, 2, 8, 9, 17, 3, 3, 21, 16])


def test_best_fit_places_all_and_overfills_none():
    # 6 opens a row; 5 another; 4 fits the first exactly; 3 the second; 2 exactly there; 1 opens a third.
    assert best_fit(np.array([1, 2, 3, 4, 5, 6]), 10) == [[5, 3], [4, 2, 1], [0]]
    sizes = np.random.default_rng(0).integers(1, 65, 500)
    rows = best_fit(sizes, 64)
    assert sorted(place for row in rows for place in row) == list(range(500))
    assert max(sizes[row].sum() for row in rows) <= 64
    assert len(rows) <= 1.1 * sizes.sum() / 64


def test_a_long_document_is_cut_with_every_target_once():
    parts = cut(np.array([9, 1, 8, 17]), np.array([0, 1, 2, 3]), 8)
    assert parts.tolist() == [[0, 0, 9], [2, 0, 8], [3, 0, 9], [3, 8, 17]]


@pytest.mark.parametrize("row_tokens", [4, 8, 16, 64])
def test_an_epoch_has_every_target_once_after_its_own_past(row_tokens):
    batches = PackedBatches(RAGGED, (), row_tokens, 1, seed=3)
    seen = []
    for step in range(len(batches.epoch(0))):
        batch = batches.batch_at(step)
        assert all(each.shape == (1, row_tokens) for each in dataclasses.asdict(batch).values())
        real = batch.weights[0] > 0
        tokens, targets, starts = batch.tokens[0], batch.targets[0], batch.starts[0]
        assert (targets[real] == tokens[real] + 1).all()
        seen += targets[real].tolist()
        # A document begins where `starts` says, and goes on to its end or the row's.
        assert (starts <= np.arange(row_tokens)).all()
        assert (starts[starts] == starts).all()
        assert (tokens[real] - tokens[starts[real]] == (np.arange(row_tokens) - starts)[real]).all()
    assert sorted(seen) == [token for token in RAGGED.tokens.tolist() if token % 100]


def test_a_batch_is_a_function_of_seed_and_step():
    batches = PackedBatches(RAGGED, (), 16, 3, seed=1)
    in_order = [batches.batch_at(step) for step in range(20)]
    fresh = dataclasses.replace(batches)
    for step in (19, 3, 11):
        for one, other in zip(
            dataclasses.astuple(fresh.batch_at(step)), dataclasses.astuple(in_order[step]), strict=True
        ):
            np.testing.assert_array_equal(one, other)
    orders = [[row.tolist() for row in batches.epoch(epoch)] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2]
    assert [row.tolist() for row in dataclasses.replace(batches, seed=2).epoch(0)] != orders[0]
    assert batches.epochs_at(0) == 0
    assert 3 < batches.epochs_at(20) == 60 // len(orders[0]) + 60 % len(orders[0]) / len(orders[0])


def test_an_epoch_draws_each_source_as_its_repeats_say():
    documents = documents_of([4] * 100, sources=[0] * 40 + [1] * 40 + [2] * 20)
    mixture = tuple(
        Source(text=name, repeats=repeats) for name, repeats in [("a", 2.5), ("b", 0.25), ("c", 0)]
    )
    drawn = draw(documents, mixture, np.random.default_rng(0))
    counts = np.bincount(drawn, minlength=100)
    assert set(counts[:40]) == {2, 3}
    assert counts[:40].sum() == 100
    assert set(counts[40:80]) == {0, 1}
    assert counts[40:80].sum() == 10
    assert not counts[80:].any()
    assert (draw(documents, mixture, np.random.default_rng(1)) != drawn).any()
    with pytest.raises(ConfigError, match="too few"):
        PackedBatches(documents, (Source(text="a", repeats=0),) * 3, 8, 1, 0)


def test_rows_of_prompts_alone_are_left_out_and_the_answer_follows_its_prompt():
    """Chats that are longer than a row: what comes before the answer is cut at its beginning."""
    documents = documents_of([40, 9, 25, 12], sources=[0, 0, 0, 1], prompts=[37, 4, 5, 8])
    chats, texts = Source(chat="a"), Source(text="b")
    batches = PackedBatches(documents, (chats, texts), 8, 1, seed=0)
    seen = []
    for step in range(len(batches.epoch(0))):
        batch = batches.batch_at(step)
        assert batch.weights.any()
        seen += batch.targets[batch.weights > 0].tolist()
        if 139 - 100 in batch.targets:
            assert batch.tokens[0].tolist() == list(range(31, 39))
    learnt = [*range(37, 40), *range(104, 109), *range(205, 225), *range(301, 312)]
    assert sorted(seen) == learnt
    assert batches.left_out() == "4 rows of prompts alone are left out, of 1 documents"
    held_out = evaluation_batches(documents, 8, 2, (chats, texts))
    assert sorted(np.concatenate([each.targets[each.weights > 0] for each in held_out])) == learnt
    with pytest.raises(ConfigError, match="one of them learnt"):
        PackedBatches(documents_of([4], prompts=[4]), (chats,), 8, 1, 0)


def test_prompts_and_answers_have_their_weights():
    documents = documents_of([6, 7], sources=[0, 1], prompts=[2, 0])
    mixture = (Source(text="a", prompt_weight=0.5, answer_weight=3), Source(text="b", answer_weight=2))
    (batch,) = evaluation_batches(documents, 16, 1, mixture)
    weights = dict(zip(batch.targets[0].tolist(), batch.weights[0].tolist(), strict=True))
    # Targets 1 .. 5 of the first document: place 1 is still the prompt.
    assert [weights[target] for target in range(1, 6)] == [0.5, 3, 3, 3, 3]
    assert [weights[target] for target in range(101, 107)] == [2] * 6
    # A prompt that ends in another part than it began in.
    (first, second) = (
        batch.weights[0] for batch in evaluation_batches(documents_of([9], prompts=[6]), 4, 1, mixture[:1])
    )
    assert first.tolist() + second.tolist() == [0.5] * 5 + [3] * 3


@pytest.mark.parametrize("lengths", [[2], [1, 2], [30, 8, 2, 2, 2, 17]])
def test_evaluation_has_every_target_once_in_full_batches(lengths):
    documents = documents_of(lengths)
    seen = []
    for batch in evaluation_batches(documents, 8, 3):
        assert batch.tokens.shape == (3, 8)
        seen += batch.targets[batch.weights > 0].tolist()
    assert sorted(seen) == [token for token in documents.tokens.tolist() if token % 100]


def test_some_batches_are_spread_over_all():
    batches = evaluation_batches(documents_of([9] * 5 + [3] * 5), 8, 1)
    every = [batch.tokens.tolist() for batch in batches]
    assert len(every) == len(batches) > 4
    assert [batch.tokens.tolist() for batch in batches[1:3]] == every[1:3]
    for most in (0, len(every), 99):
        assert [batch.tokens.tolist() for batch in spread(batches, most)] == every
    assert list(spread(range(10), 2)) == list(spread(iter(range(10)), 2)) == [2, 7]
    assert list(spread(range(3), 1)) == [1]
    assert list(spread([], 4)) == []


T = 8


def flat_documents(lengths, prompts, sources):
    documents = documents_of(lengths, sources, prompts)
    return dataclasses.replace(documents, tokens=np.arange(sum(lengths), dtype=np.uint16))


TWO = flat_documents([30, 11, 9, 40], [0, 3, 0, 20], [0, 0, 0, 1])
MIXTURE = (Source(text="a", repeats=2), Source(text="b", prompt_weight=0.5, answer_weight=3))


def test_an_epoch_of_one_source_has_every_window_once():
    pytest.importorskip("grain")
    rows = WindowBatches(DOCUMENTS, (), 16, 1, 1)
    windows = (len(DOCUMENTS.tokens) - 1) // 16
    assert rows.count == windows
    epochs = [
        [int(rows._order[number][1]) for number in range(first, first + windows)] for first in (0, windows)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(windows))
    assert epochs[0] != epochs[1] != sorted(epochs[1])
    assert [int(WindowBatches(DOCUMENTS, (), 16, 1, 2)._order[each][1]) for each in range(windows)] != epochs[
        0
    ]


def test_rows_stop_at_borders_and_weigh_prompts():
    pytest.importorskip("grain")
    rows, seen = WindowBatches(TWO, MIXTURE, T, 1, 0), {0: 0, 1: 0}
    # 6 windows of 50 tokens twice, and 4 of 40.
    assert rows.count == 16
    for number in range(160):
        tokens, targets, starts, weights, sources = rows.row(number)
        source = sources[0]
        seen[source] += 1
        np.testing.assert_array_equal(targets, tokens + 1)
        of = np.searchsorted(TWO.starts, targets, side="right") - 1
        crosses = np.isin(targets, TWO.starts)
        place = targets - TWO.starts[of]
        learnt = np.array([1.0, 3.0])[source]
        given = np.array([0.0, 0.5])[source] if place[0] < 0 else MIXTURE[source].weights[0]
        expected = np.where(crosses, 0, np.where(place < TWO.prompt_tokens[of], given, learnt))
        np.testing.assert_array_equal(weights, expected)
        own = np.searchsorted(TWO.starts, tokens, side="right") - 1
        np.testing.assert_array_equal(starts, np.maximum(TWO.starts[own] - tokens[0], 0))
    assert seen == {0: 120, 1: 40}
    # Windows of prompts alone are left out.
    documents = flat_documents([30, 11, 9, 40], [25, 3, 0, 20], [0, 0, 0, 1])
    rows = WindowBatches(documents, (Source(chat="a"), Source(chat="b", answer_weight=0)), T, 1, 0)
    assert rows.left_out() == f"{3 + 4} rows of prompts alone are left out"
    seen = set()
    for number in range(rows.count):
        tokens, _, _, weights, _ = rows.row(number)
        assert weights.any()
        seen.add(int(tokens[0]))
    assert seen == {24, 32, 40}


@pytest.mark.slow
def test_a_run_resumes_with_the_batches_of_its_steps(tmp_path):
    pytest.importorskip("grain")

    def run(folder, steps):
        batches = WindowBatches(DOCUMENTS, (), SMOKE.row_tokens, SMOKE.batch, SMOKE.seed)
        trainer = trainer_of(SMOKE)
        trainer.settings = dataclasses.replace(SMOKE, steps=steps)
        return loop.train(
            trainer, batches.batch_at, held_out_of(SMOKE), tmp_path / folder, lambda progress: None
        )

    run("stopped", 4)
    assert_same_bits(run("whole", 6), run("stopped", 6))


def test_what_is_missing_is_said(monkeypatch):
    with pytest.raises(ConfigError, match="no source has 65 tokens"):
        WindowBatches(TWO, MIXTURE, 64, 1, 0)
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxllm\[data\]'"):
        WindowBatches(TWO, MIXTURE, T, 1, 0).row(0)
