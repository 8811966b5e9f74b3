"""Objectives, how they are written, marked and met; and shorter prompts that meet them."""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.elastic.compression import (
    NO_WORD,
    forced_tokens,
    input_rows,
    keep_tokens,
    marked,
    read_scores,
    stays_anyway,
    word_count,
    word_scores,
    words_of,
)
from jaxllm.elastic.slo import MARK_PERCENTS, SLOS, Slo, feasible, marks, marks_of, nominal_cost
from jaxllm.errors import ConfigError
from jaxllm.training.data.documents import SPECIAL_TOKENS

RATIOS = st.floats(1e-3, 1.0)


def told(slo):
    return [marks()[place] for place in marks_of(slo)]


def test_written_and_read():
    assert Slo.parse("<40,70>") == Slo.parse(" 40 , 70") == Slo(ttft=0.4, tpot=0.7)
    assert Slo.parse("<12.5,100>") == Slo(ttft=0.125, tpot=1)
    assert [str(each) for each in SLOS] == [
        "<100,100>", "<80,90>", "<60,80>", "<40,70>", "<20,60>", "<20,50>",
    ]  # fmt: skip
    for text in ("", "<40;70>", "<0,50>", "<50,101>", "40,70,10", "<-40,70>", "nan,1", None):
        with pytest.raises(ConfigError):
            Slo.parse(text)  # pyright: ignore[reportArgumentType]
    for ratio in (0, 1.01, -1, float("nan"), True, "1"):
        for name in ("ttft", "tpot"):
            with pytest.raises(ConfigError, match=f"{name} must be a ratio"):
                dataclasses.replace(SLOS[0], **{name: ratio})


def test_marks():
    assert marks()[:3] == ("<|ttft:20|>", "<|ttft:30|>", "<|ttft:40|>")
    assert marks()[9] == "<|tpot:20|>"
    assert len(set(marks())) == 18
    # The default family's vocabulary reserves them, at ids that may not move.
    assert SPECIAL_TOKENS[6:] == marks()
    assert told(Slo(ttft=1, tpot=1)) == ["<|ttft:100|>", "<|tpot:100|>"]
    assert told(Slo(ttft=0.4, tpot=0.7)) == ["<|ttft:40|>", "<|tpot:70|>"]
    assert told(Slo(ttft=0.499, tpot=0.99)) == ["<|ttft:40|>", "<|tpot:90|>"]
    assert told(Slo(ttft=0.05, tpot=0.2)) == ["<|ttft:20|>", "<|tpot:20|>"]
    # 0.57 · 100 is a little less than 57.
    assert told(Slo(ttft=0.1 + 0.2, tpot=0.6 - 1e-9)) == ["<|ttft:30|>", "<|tpot:60|>"]


@given(RATIOS, RATIOS)
def test_no_mark_promises_more_time_than_there_is(ttft, tpot):
    for name, ratio in zip(told(Slo(ttft=ttft, tpot=tpot)), (ttft, tpot), strict=True):
        percent = int(name.partition(":")[2].removesuffix("|>"))
        assert percent == MARK_PERCENTS[0] or percent <= 100 * ratio + 0.01
        assert 100 * ratio < percent + 10 + 0.01


def test_nominal_cost_and_feasibility_by_hand():
    ttft, tpot = nominal_cost((20, 50, 100), (0.2, 1.0))
    np.testing.assert_allclose(ttft, [[0.04, 0.2], [0.1, 0.5], [0.2, 1.0]])
    np.testing.assert_allclose(tpot, [[0.2, 0.2], [0.5, 0.5], [1.0, 1.0]])
    wanted = {"<100,100>": [[1, 1], [1, 1], [1, 1]], "<20,50>": [[1, 1], [1, 0], [0, 0]]}
    for text, expected in wanted.items():
        got = feasible(Slo.parse(text), (20, 50, 100), (0.2, 1.0))
        assert got.dtype == bool
        np.testing.assert_array_equal(got, np.array(expected, bool))
    # On the edge: 0.7 · 0.3 exceeds 0.21 by a rounding.
    assert feasible(Slo(ttft=0.21, tpot=0.7), (70,), (0.3,)).all()


TEXT = "Hi  there, you\n"


def offsets(*spans):
    return np.array(spans, np.int64).reshape(-1, 2)


def test_words_by_hand():
    # "Hi", "  ", "the", "re,", " you", "\n", and one that the tokenizer adds.
    tokens = offsets((0, 0), (0, 2), (2, 4), (4, 7), (7, 10), (10, 14), (14, 15))
    np.testing.assert_array_equal(words_of(tokens, TEXT), [NO_WORD, 0, 1, 1, 1, 2, 2])
    assert word_count(TEXT) == 3
    # A boundary ends a word, though no white space does.
    np.testing.assert_array_equal(words_of(tokens, TEXT, np.array([7])), [NO_WORD, 0, 1, 1, 2, 3, 3])
    # One at a text's ends, or in white space, changes nothing.
    np.testing.assert_array_equal(words_of(tokens, TEXT, np.array([0, 3, 15])), words_of(tokens, TEXT))
    # A token over several words is of the first; tokens of one character's bytes are of one word.
    np.testing.assert_array_equal(words_of(offsets((0, 10), (10, 14)), TEXT), [0, 2])
    np.testing.assert_array_equal(words_of(offsets((0, 1), (0, 1), (2, 3)), "ö 日"), [0, 0, 1])
    np.testing.assert_array_equal(words_of(offsets((0, 2)), " \n"), [NO_WORD])
    assert words_of(offsets(), TEXT).shape == (0,)
    assert word_count("") == 0


@given(st.text(alphabet="ab \n\u00a0日\u2003", max_size=30))
def test_words_are_what_split_gives(text):
    assert word_count(text) == len(text.split())
    letters = offsets(*((i, i + 1) for i in range(len(text))))
    words = words_of(letters, text)
    joined = [
        "".join(letter for letter, word in zip(text, words, strict=True) if word == number).strip()
        for number in range(word_count(text))
    ]
    assert joined == text.split()


def test_forced_tokens_by_hand():
    tokens = offsets((0, 0), (0, 2), (2, 5), (5, 6), (6, 9), (9, 12))
    forced = forced_tokens(tokens, np.array([[2, 6], [8, 12]]))
    np.testing.assert_array_equal(forced, [True, True, False, False, True, False])
    assert forced_tokens(tokens, np.zeros((0, 2), np.int64)).all()


def kept_of(*prompt_and_ratio):
    return np.flatnonzero(keep_tokens(*prompt_and_ratio)).tolist()


def test_kept_tokens_by_hand():
    words = np.array([NO_WORD, 0, 1, 1, 2, 3, 4])
    scores = np.array([0.0, 0.1, 0.2, 0.8, 0.9, 0.5, 0.5])
    forced = np.array([True, False, False, False, False, False, True])

    kept = functools.partial(kept_of, scores, words, forced)
    assert kept(0.01) == [0, 6]
    assert kept(3 / 7) == [0, 4, 6]
    # Words 1 and 3 have the same mean: the earlier one is next, and needs room for two tokens.
    assert kept(4 / 7) == [0, 4, 6]
    assert kept(5 / 7) == [0, 2, 3, 4, 6]
    assert kept(6 / 7) == [0, 2, 3, 4, 5, 6]
    assert kept(1) == list(range(7))
    # A word with a forced token stays whole.
    forced[2] = True
    assert kept(0.01) == [0, 2, 3, 6]


def test_where_nothing_must_stay_the_best_word_does():
    words = np.array([0, 0, 1, 1, 1, 2])
    scores = np.array([0.1, 0.1, 0.8, 0.9, 0.7, 0.2])
    forced = np.zeros(6, bool)

    kept = functools.partial(kept_of, scores, words, forced)
    # It has more tokens than there would be room for.
    assert (kept(0.01), kept(0.5), kept(4 / 6)) == ([2, 3, 4], [2, 3, 4], [2, 3, 4, 5])
    assert stays_anyway(words, forced) == 3
    # Whatever its scores: of words without a best, the first.
    np.testing.assert_array_equal(keep_tokens(np.zeros(6), words, forced, 0.1), words == 0)
    # Numbers of words may have gaps, where a token is of several words.
    np.testing.assert_array_equal(keep_tokens(np.ones(2), np.array([1, 3]), forced[:2], 0.1), [True, False])
    forced[5] = True
    assert (kept(0.01), stays_anyway(words, forced)) == ([5], 1)
    with pytest.raises(ConfigError, match="a prompt without a token cannot be made shorter"):
        keep_tokens(scores[:0], words[:0], forced[:0], 1)
    with pytest.raises(ConfigError, match="not finite"):
        keep_tokens(np.full(6, np.nan), words, forced, 0.5)


prompts = st.integers(1, 40).flatmap(
    lambda count: st.tuples(
        st.lists(st.floats(-5, 5), min_size=count, max_size=count),
        st.lists(st.integers(-1, 12), min_size=count, max_size=count),
        st.lists(st.booleans(), min_size=count, max_size=count),
    )
)


@given(prompts, st.floats(0.01, 1), st.floats(0.01, 1))
def test_laws(prompt, ratio, other):
    scores, words, forced = (np.array(each) for each in prompt)
    words = np.sort(words)
    keep = keep_tokens(scores, words, forced, ratio)
    assert keep.any()
    assert keep.sum() <= max(stays_anyway(words, forced), ratio * len(scores) + 1e-6)
    assert keep[forced].all()
    assert keep[words == NO_WORD].all()
    for word in set(words[words != NO_WORD]):
        assert len(set(keep[words == word])) == 1
    must = np.isin(words, words[forced & (words != NO_WORD)]) | (words == NO_WORD)
    if must.any():
        assert stays_anyway(words, forced) == must.sum()
    if not keep.all():
        gone = words[~keep]
        best = max(set(gone), key=lambda word: (scores[words == word].mean(), -word))
        # The next best word would have been too much.
        assert keep.sum() + np.sum(words == best) > int(ratio * len(scores) + 1e-6)
    smaller, larger = (keep_tokens(scores, words, forced, each) for each in sorted((ratio, other)))
    assert not np.any(smaller & ~larger)


def test_scores_of_words():
    text = "ab cd ef"
    mine = words_of(offsets((0, 1), (1, 2), (2, 5)), text)
    scores = word_scores(np.array([0.2, 0.4, 0.9]), mine, word_count(text))
    # The small model's window ended before the last word, which stays unless it must go.
    np.testing.assert_allclose(scores, [0.3, 0.9, 1.0])


# The tiny LM's rows: every token once, after the marks of an SLO.


def test_rows_by_hand():
    tokens, mask = input_rows(np.arange(1, 8), 6)
    np.testing.assert_array_equal(tokens, [[0, 0, 1, 2, 3, 4], [0, 0, 5, 6, 7, 0]])
    np.testing.assert_array_equal(mask, [[True] * 6, [True] * 5 + [False]])
    told = marked(tokens, Slo(ttft=0.2, tpot=1), tuple(range(100, 100 + len(marks()))))
    np.testing.assert_array_equal(told[:, :2], [[100, 117]] * 2)
    np.testing.assert_array_equal(told[:, 2:], tokens[:, 2:])
    assert not tokens[:, :2].any()
    with pytest.raises(ConfigError, match="no room"):
        input_rows(np.arange(3), 2)


@given(st.integers(0, 40), st.integers(3, 12))
def test_scores_come_back_in_order(count, width):
    tokens, mask = input_rows(np.arange(count), width)
    np.testing.assert_array_equal(read_scores(tokens, mask), np.arange(count))
    assert len(tokens) == max(1, -(-count // (width - 2)))
    sizes = mask.sum(1)
    assert sizes.max() - sizes.min() <= 1
