"""Keep labels: alignments by hand, laws, what is left out, and the two kinds of files."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.errors import ConfigError
from jaxllm.training.elastic.tiny_lm.keep_labels import (
    Compression,
    KeptWords,
    align,
    read_compressions,
    split_rows,
    stem,
    well_aligned,
)

NEWS = "Five people have been taken to hospital with minor injuries following a crash this morning."
ALIGNED = [
    (NEWS, "Five people taken to hospital following crash.", [0, 1, 4, 5, 6, 10, 12], 0, 0),
    # Case, endings and marks play no role; a word that was made up is a variation.
    ("He makes big plans, they stopped", "big plan stop everything", [2, 3, 5], 0.25, 0),
    # The nearest place that is free: each of two words is found once, a third time is a gap.
    ("the cat saw the dog", "the dog", [0, 4], 0, 0),
    ("the cat saw it , the dog", "saw the dog", [0, 2, 6], 0, 0),
    ("the cat saw the dog", "saw the dog", [2, 3, 4], 0, 0),
    ("the cat saw the dog", "the the the", [0, 3], 0, 1 / 5),
    # A step back is found, too.
    ("a b c d", "c a", [0, 2], 0, 0),
    # Marks that stand alone are labelled and not counted.
    ("well , he left .", "he left , ' .", [1, 2, 3, 4], 0, 0),
]


@pytest.mark.parametrize(("text", "shorter", "kept", "variation", "gap"), ALIGNED)
def test_alignments_by_hand(text, shorter, kept, variation, gap):
    row = align(Compression(text, shorter))
    assert np.flatnonzero(row.kept).tolist() == kept
    assert (row.variation, row.gap) == (variation, pytest.approx(gap))


def kept(text, shorter, **how):
    row = align(Compression(text, shorter), **how)
    return [word for word, each in zip(text.split(), row.kept, strict=True) if each]


def test_a_window_bounds_how_far_is_looked():
    text = " ".join(f"w{i}x" for i in range(40))
    assert kept(text, "w0x w30x", window_words=10) == ["w0x"]
    assert kept(text, "w0x w9x w13x", window_words=10) == ["w0x", "w9x", "w13x"]
    # From 9 one goes on as if one were at 5.
    assert kept(text, "w0x w9x w15x", window_words=10) == ["w0x", "w9x"]


def test_stems():
    alike = (
        ("Plans,", "plan"), ("stopped", "stop"), ("making", "make"), ("studies", "study"),
        ("“dog’s”", "dog"), ("quickly", "quick"), ("agreed", "agree"),
    )  # fmt: skip
    for one, other in alike:
        assert stem(one) == stem(other)
    apart = ["as", "a", "is", "i", "be", "bed", "red", "r", "--", "-", "3s"]
    assert len({stem(word) for word in apart}) == len(apart)


WORDS = st.lists(st.sampled_from(["dog", "cat", "The", "runs", ",", "x1"]), min_size=1, max_size=20)


@given(WORDS, st.lists(st.booleans(), min_size=20, max_size=20))
def test_a_shorter_version_made_by_dropping_words_is_found_whole(words, chosen):
    shorter = [word for word, each in zip(words, chosen, strict=False) if each]
    row = align(Compression(" ".join(words), " ".join(shorter)))
    assert row.kept.sum() == len(shorter)
    assert row.gap == pytest.approx(0)
    assert row.variation == (0 if any(word != "," for word in shorter) else 1)
    assert sorted(np.array(words)[row.kept]) == sorted(shorter)


def row_of(text, variation=0.0, gap=0.0, kept=True):
    return KeptWords(text, np.array([kept]), variation, gap)


def test_bad_rows_are_left_out():
    rows = [row_of(str(i), variation=i / 100) for i in range(20)]
    assert well_aligned(rows, variation_share=0.1) == rows[:18]
    rows = [row_of(str(i), gap=i / 100) for i in range(10)]
    assert well_aligned(rows, gap_share=0.2) == rows[:8]
    # Where all are alike, all stay, but for those of which nothing is kept.
    rows = [row_of(str(i), variation=0.5, gap=0.5) for i in range(10)]
    assert well_aligned([*rows, row_of("none", kept=False)]) == rows
    assert well_aligned([]) == []


def test_copies_of_a_text_are_on_one_side():
    rows = [row_of(f"text {i % 10}") for i in range(30)]
    train, held_out = split_rows(rows, 0.2)
    assert (len(train), len(held_out)) == (24, 6)
    assert not {row.text for row in train} & {row.text for row in held_out}
    again, _ = split_rows(rows[::-1], 0.2)
    assert {row.text for row in again} == {row.text for row in train}


def test_files(tmp_path):
    lines = tmp_path / "google.jsonl"
    record = {"id": "http://a.b/c-test-12", "text": "a b c", "summaries": ["a b", "", "c"]}
    lines.write_text(json.dumps(record))
    assert list(read_compressions(lines)) == [Compression("a b c", "a b"), Compression("a b c", "c")]
    meetings = tmp_path / "meetings.json"
    records = [
        {"prompt": "x y", "compressed_prompt": "x"},
        {"prompt_list": ["p q", "r"], "compressed_prompt_list": ["p", "r"], "prompt": "p q r"},
        {"prompt_list": ["p q"], "compressed_prompt_list": ["p", "r"]},
    ]
    meetings.write_text(json.dumps(records))
    assert [(pair.text, pair.shorter) for pair in read_compressions(meetings)] == [
        ("x y", "x"), ("p q", "p"), ("r", "r"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", {"id": "gigaword-test-0", "text": "a", "summaries": ["a"]}, "one to test with"),
        ("x.jsonl", {"split": "test", "text": "a", "summaries": ["a"]}, "one to test with"),
        ("x.jsonl", {"text": "a", "summaries": "a"}, "list of texts"),
        ("x.jsonl", {"text": "a"}, "not a record"),
        ("meeting_test.json", [], "tests by its name"),
        ("test.jsonl", {}, "tests by its name"),
        ("x.json", {}, "list of records"),
        ("x.json", [3], "record 0 is no prompt"),
        ("x.json", [{"prompt": "a"}], "record 0 is no prompt"),
        ("x.json", [{"prompt_list": "a", "compressed_prompt_list": []}], "must be a list of texts"),
        ("x.json", [{"prompt_list": ["a"]}], "record 0 is no prompt"),
    ],
)
def test_what_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        list(read_compressions(tmp_path / name))
    with pytest.raises(ConfigError, match="cannot read"):
        list(read_compressions(tmp_path / "contest.jsonl"))


def test_real_sentences(data_dir):
    """The shorter versions of two sets are made of their texts' words; those of a third are rewritten."""
    folder = data_dir / "tasks" / "compression"
    for name in ("google", "broadcast"):
        rows = [align(pair) for pair in read_compressions(folder / f"{name}.jsonl")]
        assert np.mean([row.variation for row in rows]) < 0.05
        assert np.mean([row.gap for row in rows]) < 0.02
        left = well_aligned(rows)
        assert 0.8 < len(left) / len(rows) <= 1
        assert max(row.variation for row in left) < 0.2
    with pytest.raises(ConfigError, match="one to test with"):
        list(read_compressions(folder / "gigaword.jsonl"))
