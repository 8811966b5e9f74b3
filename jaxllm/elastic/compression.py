"""Shortens prompts by the scores of a tiny LM (ELMS, arXiv 2409.09071, section 3.3), and makes its input.

Words are kept or dropped whole (LLMLingua-2, arXiv 2403.12968, section 3.3), and forced tokens are never
dropped. Words are separated by white space and numbered by the text only, so that scores of one tokenizer's
tokens can be transferred to another's. All functions work on whole arrays, because prompts may be long and
requests wait. `text/droppable.py` defines the droppable parts of a prompt.

The input of the tiny LM (`models/tiny_lm.py`) is an SLO's two marks, followed by a prompt. A prompt that is
longer than a row is split into several rows of about the same length, each after the marks. Scores are taken
from all rows, and the decision from the first.
"""

import numpy as np

from jaxllm.elastic.slo import Slo, marks_of
from jaxllm.errors import ConfigError

# Word number of tokens without text.
NO_WORD = -1

# Whether a character is white space, by code point. The last entry is False and applies to all higher code
# points.
_WHITE = np.array([chr(code).isspace() for code in range(0x3002)])


def words_of(offsets: np.ndarray, text: str, boundaries: np.ndarray | None = None) -> np.ndarray:
    """The word number of each token, counted from the beginning of the text.

    White space belongs to the word after it, as in byte-level tokenizers, and at the end to the last word. A
    token that spans several words belongs to the first.

    Args:
      offsets: `[T, 2]` int, the characters `[first, last + 1)` of `text` of each token; empty for tokens
        that a tokenizer adds.
      text: the tokenized text.
      boundaries: `[n]` int, indices of characters before which a word ends even without white space, such
        as at turn markers of a chat.

    Returns:
      `[T]` int64; `NO_WORD` for tokens without text.
    """
    starts, ends = _words(text, boundaries)
    offsets = np.asarray(offsets).reshape(-1, 2)
    if not len(starts):
        return np.full(len(offsets), NO_WORD, np.int64)
    # The first word that ends after the token's first character.
    words = np.minimum(np.searchsorted(ends, offsets[:, 0], side="right"), len(starts) - 1)
    return np.where(offsets[:, 0] < offsets[:, 1], words, NO_WORD)


def word_count(text: str, boundaries: np.ndarray | None = None) -> int:
    """The number of words that `words_of` counts."""
    return len(_words(text, boundaries)[0])


def forced_tokens(offsets: np.ndarray, droppable: np.ndarray) -> np.ndarray:
    """Tokens that must be kept: all but those entirely within a droppable span.

    Args:
      offsets: see `words_of`.
      droppable: `[n, 2]` int, ascending spans of characters that do not overlap.

    Returns:
      `[T]` bool.
    """
    offsets = np.asarray(offsets).reshape(-1, 2)
    spans = np.asarray(droppable, np.int64).reshape(-1, 2)
    if not len(spans):
        return np.ones(len(offsets), bool)
    # The last span that begins at or before the token.
    place = np.searchsorted(spans[:, 0], offsets[:, 0], side="right") - 1
    inside = (place >= 0) & (offsets[:, 1] <= spans[place, 1]) & (offsets[:, 0] < offsets[:, 1])
    return ~inside


def keep_tokens(scores: np.ndarray, words: np.ndarray, forced: np.ndarray, ratio: float) -> np.ndarray:
    """Chooses the tokens of a shorter prompt.

    Forced tokens are kept, with the rest of their words. Further words are added by score, of equal scores
    the earlier first, while at most `ratio` of the prompt is kept. So a smaller ratio keeps a subset of a
    larger one's tokens.

    Args:
      scores: `[T]` float, such as the probability of keeping each token; the score of a word is the mean of
        its tokens.
      words: `[T]` int, see `words_of`; tokens without a word are kept.
      forced: `[T]` bool, tokens that must be kept.
      ratio: share of the tokens to keep, in (0, 1]; 1 keeps all. More are kept if more are forced. If none
        is forced, at least the best word is kept, because a model needs a prompt.

    Returns:
      `[T]` bool, True = kept.

    Raises:
      ConfigError: a score is not finite, or there is no token.
    """
    scores, words, forced = np.asarray(scores, np.float64), np.asarray(words), np.asarray(forced, bool)
    if not len(scores):
        raise ConfigError("a prompt without a token cannot be made shorter; give it at least one")
    if not np.isfinite(scores).all():
        raise ConfigError("a token's score is not finite; the tiny LM is broken")
    if ratio == 1:
        return np.ones(len(scores), bool)
    count = int(words.max(initial=NO_WORD)) + 1
    # Per word, and last for the tokens of no word.
    stays = np.append(np.bincount(words[forced & (words != NO_WORD)], minlength=count) > 0, True)
    sizes = np.append(np.bincount(words[words != NO_WORD], minlength=count), np.sum(words == NO_WORD))
    open_words = np.flatnonzero(~stays & (sizes > 0))
    means = word_scores(scores, words, count)
    best = open_words[np.argsort(-means[open_words], kind="stable")]
    # The epsilon guards against rounding: 0.3 of 10 tokens are 3.
    room = int(ratio * len(scores) + 1e-6) - int(sizes[stays].sum())
    stays[best[np.cumsum(sizes[best]) <= room]] = True
    if not stays[words].any():
        stays[best[0]] = True
    return stays[words]


def stays_anyway(words: np.ndarray, forced: np.ndarray) -> int:
    """The maximum number of tokens that `keep_tokens` keeps at the smallest ratio.

    These are the forced tokens with the rest of their words, and tokens of no word; if there are none, the
    tokens of the longest word, which may be the best.
    """
    words, forced = np.asarray(words), np.asarray(forced, bool)
    must = int(np.sum((words == NO_WORD) | np.isin(words, words[forced])))
    return must or int(np.bincount(words, minlength=1).max())


def word_scores(scores: np.ndarray, words: np.ndarray, count: int, *, missing: float = 1.0) -> np.ndarray:
    """The mean score of each word's tokens.

    Args:
      scores: `[T]` float.
      words: `[T]` int, see `words_of`.
      missing: score of words without tokens.

    Returns:
      `[count]` float64.
    """
    scores, words = np.asarray(scores, np.float64), np.asarray(words)
    real = words != NO_WORD
    sizes = np.bincount(words[real], minlength=count)
    sums = np.bincount(words[real], weights=scores[real], minlength=count)
    return np.where(sizes > 0, sums / np.maximum(sizes, 1), missing)


def _words(text: str, boundaries: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """First and last + 1 character of each word of a text, `[words]` int64 each."""
    # "surrogatepass": a lone surrogate is refused by tokenizers, not here.
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    dark = ~_WHITE[np.minimum(codes, len(_WHITE) - 1)]
    begins, ends = dark.copy(), dark.copy()
    begins[1:] &= ~dark[:-1]
    ends[:-1] &= ~dark[1:]
    if boundaries is not None and len(codes):
        cut = np.zeros(len(codes) + 1, bool)
        cut[np.asarray(boundaries, np.int64)] = True
        begins |= dark & cut[:-1]
        ends |= dark & cut[1:]
    return np.flatnonzero(begins), np.flatnonzero(ends) + 1


MARKS = 2
# Lengths of buckets and programs below a whole row's, for shorter prompts.
_TOKENS = (32, 64, 128, 256, 512)


def row_lengths(row_tokens: int) -> tuple[int, ...]:
    """Lengths of the buckets and programs of a tiny LM with rows of `row_tokens` tokens, ascending."""
    return (*(each for each in _TOKENS if each < row_tokens), row_tokens)


def input_rows(ids: np.ndarray, row_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits a prompt into rows with room for the marks.

    Args:
      ids: `[T]` int, the prompt's tokens.
      row_tokens: W, tokens of a row, more than only the marks.

    Returns:
      `[R, W]` int32 tokens, the first two of each row zeros; `[R, W]` bool, True for marks and valid tokens.

    Raises:
      ConfigError: a row has no room for a token.
    """
    room = row_tokens - MARKS
    if room < 1:
        raise ConfigError(f"a row of {row_tokens} tokens has no room for a token after {MARKS} marks")
    parts = np.array_split(np.asarray(ids, np.int32), max(1, -(-len(ids) // room)))
    tokens = np.zeros((len(parts), row_tokens), np.int32)
    mask = np.zeros((len(parts), row_tokens), bool)
    mask[:, :MARKS] = True
    for row, part in enumerate(parts):
        tokens[row, MARKS : MARKS + len(part)] = part
        mask[row, MARKS : MARKS + len(part)] = True
    return tokens, mask


def marked(tokens: np.ndarray, slo: Slo, mark_ids: tuple[int, ...]) -> np.ndarray:
    """A copy of rows `[..., W]` with an SLO's marks in front; `mark_ids` are the token ids of `marks()`."""
    rows = tokens.copy()
    rows[..., :MARKS] = [mark_ids[place] for place in marks_of(slo)]
    return rows


def read_scores(scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The scores of a prompt's tokens `[T]`, from the scores of its rows `[R, W]`."""
    return scores[:, MARKS:][mask[:, MARKS:]]
