"""Prompts made shorter: which tokens stay, by a score for each (ELMS, arXiv 2409.09071, section 3.4).

Words stay or go whole (LLMLingua-2, arXiv 2403.12968, section 3.3), and what must not go never does. A word
is what stands between white space; words are numbered by the text alone, so that scores of one tokenizer's
tokens can be carried over to another's. Everything works on whole arrays: a prompt may be long, and a request
waits for it. Who gives the scores, and what of a prompt may go, is said elsewhere (`models/tlm.py`,
`tasks/droppable.py`).
"""

import numpy as np

from jaxllm.errors import ConfigError

# No word: of tokens that stand for no text, and of texts without any.
NO_WORD = -1

# Whether a character is white space, by its code point; of all further ones the last entry says that they
# are not.
_WHITE = np.array([chr(code).isspace() for code in range(0x3002)])


def words_of(offsets: np.ndarray, text: str, boundaries: np.ndarray | None = None) -> np.ndarray:
    """The word that each token belongs to, counted from the text's beginning.

    White space belongs to the word behind it, which byte-level tokenizers join it to, and at the end to the
    last word. A token that reaches over several words belongs to the first.

    Args:
      offsets: `[T, 2]` int, the characters of `text` that each token stands for, `[first, last + 1)`; empty
        for tokens that a tokenizer adds.
      text: what was tokenized.
      boundaries: places between characters, `[n]` int, where a word ends even without white space, as at the
        markers of a chat's turns.

    Returns:
      `[T]` int64; `NO_WORD` where there is none.
    """
    starts, ends = _words(text, boundaries)
    offsets = np.asarray(offsets).reshape(-1, 2)
    if not len(starts):
        return np.full(len(offsets), NO_WORD, np.int64)
    # The first word that ends behind the token's first character.
    words = np.minimum(np.searchsorted(ends, offsets[:, 0], side="right"), len(starts) - 1)
    return np.where(offsets[:, 0] < offsets[:, 1], words, NO_WORD)


def word_count(text: str, boundaries: np.ndarray | None = None) -> int:
    """How many words `words_of` counts."""
    return len(_words(text, boundaries)[0])


def forced_tokens(offsets: np.ndarray, droppable: np.ndarray) -> np.ndarray:
    """Which tokens must stay: those that do not lie wholly in what may go.

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

    What must stay does, with the rest of its words. Further words are taken, best first and of equal ones the
    earlier first, as long as all that is kept is at most `ratio` of the prompt, so a smaller ratio always
    keeps a part of what a larger one does.

    Args:
      scores: `[T]` float, how much each token should be kept, such as the probability; a word has the mean of
        its tokens.
      words: `[T]` int, see `words_of`; tokens of no word stay.
      forced: `[T]` bool, what must stay.
      ratio: of the tokens to keep, in (0, 1]; 1 keeps all. More are kept where more are forced; where nothing
        must stay, the best word does, because a model must read something.

    Returns:
      `[T]` bool, True = stays.

    Raises:
      ConfigError: the shapes differ, the ratio is out of its domain, a score is not finite, or there is no
        token.
    """
    scores, words, forced = np.asarray(scores, np.float64), np.asarray(words), np.asarray(forced, bool)
    if not scores.shape == words.shape == forced.shape or scores.ndim != 1:
        raise ConfigError(
            f"scores, words and forced must be one per token, got {scores.shape}, {words.shape} and "
            f"{forced.shape}"
        )
    if not len(scores):
        raise ConfigError("a prompt without a token cannot be made shorter; give it at least one")
    number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
    if not number or not 0 < ratio <= 1:
        raise ConfigError(f"a prompt's ratio must be in (0, 1], got {ratio!r:.80}")
    if not np.isfinite(scores).all():
        raise ConfigError("a token's score is not finite; the tiny LM is broken")
    return np.ones(len(scores), bool) if ratio == 1 else _best_words(scores, words, forced, ratio)


def stays_anyway(words: np.ndarray, forced: np.ndarray) -> int:
    """How many tokens `keep_tokens` keeps whatever the ratio: the forced ones with the rest of their words,
    and those of no word; where there are none, as many as the longest word has, which may be the best."""
    words, forced = np.asarray(words), np.asarray(forced, bool)
    must = int(np.sum((words == NO_WORD) | np.isin(words, words[forced])))
    return must or int(np.bincount(words, minlength=1).max())


def word_scores(scores: np.ndarray, words: np.ndarray, count: int, *, missing: float = 1.0) -> np.ndarray:
    """The mean score of each word's tokens.

    Args:
      scores: `[T]` float.
      words: `[T]` int, see `words_of`.
      count: of words.
      missing: the score of words that no token belongs to.

    Returns:
      `[count]` float64.
    """
    scores, words = np.asarray(scores, np.float64), np.asarray(words)
    real = words != NO_WORD
    sizes = np.bincount(words[real], minlength=count)
    sums = np.bincount(words[real], weights=scores[real], minlength=count)
    return np.where(sizes > 0, sums / np.maximum(sizes, 1), missing)


def spread(scores_per_word: np.ndarray, words: np.ndarray, *, missing: float = 1.0) -> np.ndarray:
    """Each token's share in its word's score, which is all of it: `[T]` float64.

    With `word_scores` it carries scores from one tokenizer's tokens to another's, where both number the words
    of the same text.

    Args:
      scores_per_word: `[words]` float.
      words: `[T]` int, the words of the other tokens, see `words_of`.
      missing: the score of tokens of no word.
    """
    padded = np.append(np.asarray(scores_per_word, np.float64), missing)
    # The last one is what NO_WORD reads.
    return padded[np.asarray(words)]


def _best_words(scores: np.ndarray, words: np.ndarray, forced: np.ndarray, ratio: float) -> np.ndarray:
    """`[T]` bool: the forced words, and the best of the others that there is room for; never nothing."""
    count = int(words.max(initial=NO_WORD)) + 1
    stays = np.append(np.bincount(words[forced & (words != NO_WORD)], minlength=count) > 0, True)
    sizes = np.append(np.bincount(words[words != NO_WORD], minlength=count), np.sum(words == NO_WORD))
    open_words = np.flatnonzero(~stays & (sizes > 0))
    means = word_scores(scores, words, count)
    best = open_words[np.argsort(-means[open_words], kind="stable")]
    # A rounding must not cost a token: 0.3 of 10 tokens are 3.
    room = int(ratio * len(scores) + 1e-6) - int(sizes[stays].sum())
    stays[best[np.cumsum(sizes[best]) <= room]] = True
    if not stays[words].any():
        stays[best[0]] = True
    return stays[words]


def _words(text: str, boundaries: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Where the words of a text begin and end, `[words]` int64 each."""
    # One code point each; a lone surrogate, which no tokenizer takes, does no harm here.
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
