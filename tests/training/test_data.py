"""Documents, their split, packing and windows: the laws that a repeatable run stands on."""

import dataclasses

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from training import data
from training.tokenizer import END_OF_TEXT, MIN_VOCAB_SIZE, PAD, end_of_text_id, train_tokenizer

DOCUMENTS = [f"The {i}th cat saw {i * 37} birds, café №{i}." for i in range(60)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(DOCUMENTS, MIN_VOCAB_SIZE + 20)


@pytest.mark.parametrize(
    ("text", "documents"),
    [
        ("a\nb\n<|endoftext|>\n c \n\nd<|endoftext|>\n", ["a\nb", "c \n\nd"]),
        ("a\nb\n\n  \nc\r\n \r\nd", ["a\nb", "c", "d"]),
        ("one\nwhole", ["one\nwhole"]),
        (" \n\n", []),
    ],
)
def test_a_text_splits_at_its_marker_or_else_at_blank_lines(text, documents):
    assert data.split_text(text) == documents


def test_files_are_read_in_order_and_unreadable_ones_are_named(tmp_path):
    first, second = tmp_path / "1.txt", tmp_path / "2.txt"
    first.write_text("é\n\nb", encoding="utf-8")
    second.write_bytes(b"\xff\xfe")
    assert data.read_documents([first, first]) == ["é", "b", "é", "b"]
    with pytest.raises(ConfigError, match=r"2\.txt as UTF-8"):
        data.read_documents([first, second])
    with pytest.raises(ConfigError, match=r"none\.txt"):
        data.read_documents([tmp_path / "none.txt"])
    first.write_text("\n")
    with pytest.raises(ConfigError, match="no text"):
        data.read_documents([first])


def test_builtin_text_needs_no_file():
    documents = data.builtin_text()
    assert len(documents) > 50
    assert sum(map(len, documents)) > 200_000


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.999])
def test_split_is_by_content_alone(share):
    train, held_out = data.split_documents(DOCUMENTS, share)
    assert len(train) > 0
    assert len(held_out) > 0
    assert sorted(train + held_out) == sorted(DOCUMENTS)
    # Neither the order nor copies move a document to the other side.
    again = data.split_documents(DOCUMENTS[::-1] + DOCUMENTS, share)
    assert [set(side) for side in again] == [set(train), set(held_out)]
    assert not set(again[0]) & set(again[1])


def test_split_needs_two_distinct_documents():
    with pytest.raises(ConfigError, match="two distinct documents"):
        data.split_documents(["same", "same"], 0.5)


def test_tokenizer_is_deterministic_reversible_and_splits_digits(tokenizer):
    assert train_tokenizer(DOCUMENTS, MIN_VOCAB_SIZE + 20).to_str() == tokenizer.to_str()
    assert tokenizer.get_vocab_size() == MIN_VOCAB_SIZE + 20
    assert (tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(PAD)) == (0, 1)
    for text in ("cat", " 12 cats\n\n", "鷗\x00🙂 ", "1999"):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("1999").tokens == ["1", "9", "9", "9"]


def test_tokenizer_refuses_a_vocabulary_it_cannot_fill():
    with pytest.raises(ConfigError, match="at least 258"):
        train_tokenizer(DOCUMENTS, 257)
    with pytest.raises(ConfigError, match="more text"):
        train_tokenizer(["ab"], 300)


def test_packing_ends_each_document_and_only_there(tokenizer):
    end = end_of_text_id(tokenizer)
    documents = ["a cat", f"says {END_OF_TEXT} aloud", "b"]
    tokens = data.pack_documents(documents, tokenizer)
    assert tokens.dtype == np.uint16
    assert list(tokens).count(end) == 3
    ends = np.flatnonzero(tokens == end)
    parts = [part[part != end] for part in np.split(tokens, ends + 1)[:-1]]
    assert [tokenizer.decode(list(map(int, part))) for part in parts] == documents


def test_token_file_is_built_once_and_never_stale(tmp_path, tokenizer, monkeypatch):
    tokens = data.token_file(tmp_path, "train", DOCUMENTS, tokenizer)
    assert isinstance(tokens, np.memmap)
    np.testing.assert_array_equal(tokens, data.pack_documents(DOCUMENTS, tokenizer))
    other = data.token_file(tmp_path, "train", DOCUMENTS[1:], tokenizer)
    assert len(other) < len(tokens)
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(data, "pack_documents", None)
    np.testing.assert_array_equal(data.token_file(tmp_path, "train", DOCUMENTS, tokenizer), tokens)


def test_an_epoch_visits_each_window_once_in_a_new_order():
    tokens = np.arange(8 * 11 + 5, dtype=np.uint16)
    windows = data.TrainingWindows(tokens, window_tokens=8, batch=2, seed=3)
    assert windows.windows == 10
    epochs = []
    for epoch in range(2):
        rows = np.concatenate([windows.batch_at(step) for step in range(5 * epoch, 5 * epoch + 5)])
        assert rows.shape == (10, 9)
        assert rows.dtype == np.int32
        assert (np.diff(rows, axis=1) == 1).all()  # Each window is a slice of the row.
        assert (np.diff(np.sort(rows[:, 0])) == 8).all()  # Together they cover it.
        assert 0 <= rows[:, 0].min() < 8
        epochs.append(rows[:, 0].tolist())
    assert np.argsort(epochs[0]).tolist() != np.argsort(epochs[1]).tolist()


def test_a_batch_is_a_function_of_seed_and_step():
    tokens = np.random.default_rng(0).integers(0, 99, 1000).astype(np.uint16)
    windows = data.TrainingWindows(tokens, window_tokens=16, batch=7, seed=1)
    in_order = [windows.batch_at(step) for step in range(30)]
    fresh = dataclasses.replace(windows)
    for step in (29, 3, 17):
        np.testing.assert_array_equal(fresh.batch_at(step), in_order[step])
    other = dataclasses.replace(windows, seed=2)
    assert (other.batch_at(0) != in_order[0]).any()


def test_too_little_text_for_a_window_is_refused():
    exact = data.TrainingWindows(np.arange(16), window_tokens=8, batch=3, seed=0)
    assert exact.batch_at(4).shape == (3, 9)
    with pytest.raises(ConfigError, match="15 training tokens are too few"):
        data.TrainingWindows(np.arange(15), window_tokens=8, batch=3, seed=0)


@pytest.mark.parametrize("count", [0, 1, 2, 8, 9, 24, 25, 26, 60])
def test_evaluation_has_every_token_but_the_first_as_a_target_once(count):
    tokens = np.arange(100, 100 + count, dtype=np.uint16)
    targets = []
    for rows, weights in data.evaluation_batches(tokens, window_tokens=8, batch=3):
        assert rows.shape == (3, 9)
        assert weights.shape == (3, 8)
        targets += rows[:, 1:][weights == 1].tolist()
        assert (rows[:, :-1][weights == 1] + 1 == rows[:, 1:][weights == 1]).all()
    assert targets == tokens[1:].tolist()
