"""Windows by grain: every window once an epoch, weights and borders, and any step as in a fresh process."""

import dataclasses
import sys

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.training.data.corpus import TokenizedDocuments
from jaxllm.training.data.rows import WindowBatches
from jaxllm.training.data.sources import Source
from jaxllm.training.loop import trainer as loop
from tests.training.jobs import DOCUMENTS, SMOKE, assert_same_bits, held_out_of, trainer_of

T = 8


def documents_of(lengths, prompts, sources):
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return TokenizedDocuments(tokens, starts, np.array(prompts), np.array(sources), 0)


TWO = documents_of([30, 11, 9, 40], [0, 3, 0, 20], [0, 0, 0, 1])
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
    documents = documents_of([30, 11, 9, 40], [25, 3, 0, 20], [0, 0, 0, 1])
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
