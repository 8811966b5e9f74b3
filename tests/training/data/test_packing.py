"""Packing: what is in a row or a window, how often, in which order."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.training.data import corpus
from jaxllm.training.data.corpus import Corpus, TokenizedDocuments
from jaxllm.training.data.encoders import PieceEncoder
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
from jaxllm.training.decoders import pretrain
from jaxllm.training.loop.fitting import TOKENIZER_FILE, read_tokenizer_file
from jaxllm.training.loop.parallel import MeshShape
from tests.training.tiny_runs import DOCUMENTS, SMOKE, join, quiet, started_group, told_by


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
    assert max(sizes[row].sum() for row in rows) <= 64 < 1.1 * sizes.sum() / len(rows)


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
    chosen = draw(documents, mixture, np.random.default_rng(0))
    counts = np.bincount(chosen, minlength=100)
    assert set(counts[:40]) == {2, 3}
    assert counts[:40].sum() == 100
    assert set(counts[40:80]) == {0, 1}
    assert counts[40:80].sum() == 10
    assert not counts[80:].any()
    assert (draw(documents, mixture, np.random.default_rng(1)) != chosen).any()
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
    # Some batches are spread over all.
    assert list(spread(range(10), 2)) == list(spread(iter(range(10)), 2)) == [2, 7]


T = 8


def flat_documents(lengths, prompts, sources):
    documents = documents_of(lengths, sources, prompts)
    return dataclasses.replace(documents, tokens=np.arange(sum(lengths), dtype=np.uint16))


TWO = flat_documents([30, 11, 9, 40], [0, 3, 0, 20], [0, 0, 0, 1])
MIXTURE = (Source(text="a", repeats=2), Source(text="b", prompt_weight=0.5, answer_weight=3))


def test_an_epoch_of_one_source_has_every_window_once(monkeypatch):
    pytest.importorskip("grain")
    rows = WindowBatches(DOCUMENTS, (), 16, 1, 1)
    windows = (len(DOCUMENTS.tokens) - 1) // 16
    assert rows.count == windows
    epochs = [
        [int(rows._order[number][1]) for number in range(first, first + windows)] for first in (0, windows)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(windows))
    assert epochs[0] != epochs[1] != sorted(epochs[1])
    other = WindowBatches(DOCUMENTS, (), 16, 1, 2)
    assert [int(other._order[each][1]) for each in range(windows)] != epochs[0]
    # A batch follows from its step alone.
    for one, again in zip(
        *(dataclasses.astuple(each.batch_at(7)) for each in (rows, dataclasses.replace(rows))), strict=True
    ):
        np.testing.assert_array_equal(one, again)
    with pytest.raises(ConfigError, match="no source has 65 tokens"):
        WindowBatches(TWO, MIXTURE, 64, 1, 0)
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxllm\[data\]'"):
        WindowBatches(TWO, MIXTURE, T, 1, 0).row(0)


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


# Two processes divide files, encoding and rows, and train what one does; runs go on in any number.
SOURCES = (Source(text="texts", repeats=1.5), Source(chat="chats.jsonl", answer_weight=2.0, skip_bad=True))
RECIPE = dataclasses.replace(
    SMOKE, model=dataclasses.replace(SMOKE.model, vocab_size=288), sources=SOURCES, held_out_share=0.1,
    batch=8, accumulate=2, steps=4, checkpoint_steps=2, log_steps=1,
)  # fmt: skip
HALF = dataclasses.replace(RECIPE, steps=2)


def write_data(folder):
    (folder / "texts").mkdir(parents=True)
    for file in range(3):
        texts = (f"Story {file} of {n}: a cat sat on {n * 7} mats." for n in range(40))
        (folder / "texts" / f"{file}.txt").write_text("\n\n".join(texts))
    rows = [json.dumps({"prompt": f"How many is {n}?", "completion": f"{n} is {n}."}) for n in range(40)]
    (folder / "chats.jsonl").write_text("\n".join([*rows, "no JSON"]))
    (folder / "bad.jsonl").write_text("no JSON")
    return folder


def pretrained(recipe, data, folder, mesh):
    return pretrain(recipe, dataclasses.replace(quiet(folder, data), mesh_shape=MeshShape.parse(mesh)))


def one_file(data, folder):
    """Encodes a single file, by blocks."""
    opened = Corpus.open((Source(text="texts/0.txt"),), data, 0.1)
    encoder = PieceEncoder(read_tokenizer_file(folder / "half" / TOKENIZER_FILE))
    opened.tokenized(encoder, "train", folder / "one")


def main(data, folder, port, process):
    """One process of two, with two devices: begins a run, and goes on with another."""
    join(port, process, 2)
    data, folder = Path(data), Path(folder)
    read, real = [], corpus._documents_of

    def noted(source, file, on_bad):
        read.append(Path(str(file)).name)
        return real(source, file, on_bad)

    corpus._documents_of = noted
    Corpus.open(SOURCES, data, 0.1)
    opened = sorted(read)
    pretrained(HALF, data, folder / "half", "data=2,tensor=2")
    pretrained(RECIPE, data, folder / "begun", "data=1,fsdp=4")
    corpus._ENCODE_DOCUMENTS = 4
    one_file(data, folder)
    try:
        Corpus.open((*SOURCES, Source(chat="bad.jsonl")), data, 0.1)
    except ConfigError as error:
        print(json.dumps({"read": opened, "error": str(error)}))


def files_of(folder):
    return {path.parent.name: path.read_bytes() for path in sorted(folder.glob("*/tokens.bin"))}


def losses_of(folder):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [[row["step"], row["loss"], row.get("held_out_loss") or 0.0] for row in rows]


@pytest.mark.slow
def test_two_processes_train_what_one_does_and_go_on_with_its_run(tmp_path):
    data = write_data(tmp_path / "data")
    group, alone = tmp_path / "group", tmp_path / "alone"
    pretrained(HALF, data, group / "begun", "data=1")
    shutil.copytree(group / "begun", alone / "half")
    group_of_two = started_group("tests.training.data.test_packing", data, group)
    pretrained(RECIPE, data, alone / "whole", "data=1")
    told = [told_by(process) for process in group_of_two]
    # Each file is read by one of them.
    assert [each["read"] for each in told] == [["0.txt", "2.txt"], ["1.txt", "chats.jsonl"]]
    assert all("process 0: " in each["error"] and "bad.jsonl" in each["error"] for each in told)
    whole = losses_of(alone / "whole")
    np.testing.assert_allclose(losses_of(group / "half"), whole[:2], rtol=1e-4)
    np.testing.assert_allclose(losses_of(group / "begun"), whole, rtol=1e-4)
    pretrained(RECIPE, data, group / "half", "data=1")
    np.testing.assert_allclose(losses_of(group / "half"), whole, rtol=1e-4)
    assert len(files_of(group / "half" / "tokens")) == 2
    assert files_of(group / "half" / "tokens") == files_of(alone / "half" / "tokens")
    one_file(data, alone)
    assert files_of(group / "one") == files_of(alone / "one")
    assert not list(group.glob("**/*.shard-*"))


@pytest.mark.parametrize("own", [(0, 2), (1,)])
def test_rows_of_other_processes_are_not_read(own):
    whole, part = (PackedBatches(RAGGED, (), 16, 3, 1, rows) for rows in (None, own))
    others = [row for row in range(3) if row not in own]
    pairs = [(part.batch_at(step), whole.batch_at(step)) for step in range(5)]
    held_out = (evaluation_batches(RAGGED, 16, 3, own=rows) for rows in (own, None))
    for found, wanted in [*pairs, *zip(*held_out, strict=True)]:
        for one, other in zip(dataclasses.astuple(found), dataclasses.astuple(wanted), strict=True):
            np.testing.assert_array_equal(one[list(own)], other[list(own)])
            assert not one[others].any()
    np.testing.assert_array_equal(part.batch_at(4, whole=True).tokens, whole.batch_at(4).tokens)
