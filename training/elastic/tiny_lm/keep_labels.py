"""Labels the words of a text that its shorter version keeps, for the tiny LM's score head.

LLMLingua-2 (arXiv 2403.12968, section 3.2): words of the shorter version are looked up in the text one
after another, near the position of the last match, and matches are labelled as kept. Words are compared
without case, inflection and punctuation around them, since manual summaries are also polished. Badly
aligned rows are left out: those with many words that the text does not have (variation rate), and those
with many words that it has, but without an unlabelled position left (alignment gap).

Words are those of `jaxllm.elastic.compression`, between white space;
`jaxllm.training.elastic.tiny_lm.batches` maps them to tokens.
"""

import dataclasses
import re
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.tasks.example import Record, read_json, read_jsonl, text_field
from jaxllm.training.data.documents import held_out_digests, text_document

# Search distance for the next word, to either side of the last one.
WINDOW_WORDS = 150
VARIATION_SHARE = 0.05
GAP_SHARE = 0.1

_TEST_ID = re.compile(r"\w+[-_]test[-_]\d+", re.IGNORECASE)
_TEST_FILE = re.compile(r"(?:.*[-_.])?test(?:[-_.].*)?", re.IGNORECASE)
_SUFFIXES = ("ingly", "edly", "ing", "ed", "ies", "es", "ly", "s")
# Least letters of a word without its suffix.
_STEM_LETTERS = 3


@dataclasses.dataclass(frozen=True)
class Compression:
    """A text and a shorter version of it."""

    text: str
    shorter: str


@dataclasses.dataclass(frozen=True, eq=False)
class KeptWords:
    """Text with labelled words.

    Attributes:
      text: the text.
      kept: `[words]` bool, True = the shorter version has this word.
      variation: share of the shorter version's words that the text does not have.
      gap: number of its words that the text has without an unlabelled position left, as a share of the
        text's words.
    """

    text: str
    kept: np.ndarray
    variation: float
    gap: float


def align(pair: Compression, *, window_words: int = WINDOW_WORDS) -> KeptWords:
    """Labels the words of a text.

    A word with several positions is matched to the nearest free one; of two equally near the later one.
    Words without letters and digits are labelled, too, but count in neither rate.

    Args:
      pair: the text and its shorter version.
      window_words: maximum distance between successive matches.
    """
    words, shorter = pair.text.split(), pair.shorter.split()
    free: dict[str, list[int]] = {}
    for place, word in enumerate(words):
        free.setdefault(stem(word), []).append(place)
    known = frozenset(free)
    kept = np.zeros(len(words), bool)
    at = 0
    for word in shorter:
        places = free.get(stem(word), [])
        near = [each for each in places if abs(each - at) < window_words]
        if near:
            found = min(near, key=lambda each: (abs(each - at), -each))
            places.remove(found)
            kept[found] = True
            # A far match may be wrong: it moves the search by at most half a window.
            at = min(found, at + window_words // 2)
    real = [stem(word) for word in shorter if _says_something(word)]
    counted = sum(map(_says_something, words))
    has = sum(each in known for each in real)
    labelled = sum(_says_something(word) for word, each in zip(words, kept, strict=True) if each)
    return KeptWords(
        text=pair.text,
        kept=kept,
        variation=1 - has / len(real) if real else 1.0,
        gap=(has - labelled) / max(counted, 1),
    )


def well_aligned(
    rows: Sequence[KeptWords], *, variation_share: float = VARIATION_SHARE, gap_share: float = GAP_SHARE
) -> list[KeptWords]:
    """Leaves out badly aligned rows.

    Args:
      rows: of one source, since sources differ in how much they polish.
      variation_share: share of the rows to leave out, those of the highest variation rate.
      gap_share: share of the remaining rows to leave out, those of the highest alignment gap. Where more rows
        have the highest gap, all of them stay.
    """
    left = _without_worst([row for row in rows if row.kept.any()], "variation", variation_share)
    return _without_worst(left, "gap", gap_share)


def split_rows(rows: Sequence[KeptWords], held_out_share: float) -> tuple[list[KeptWords], list[KeptWords]]:
    """Splits rows into training and held-out sets by their texts' contents: versions of one text stay
    together.

    Raises:
      ConfigError: there are fewer than two different texts.
    """
    digests = [text_document(row.text).digest() for row in rows]
    held_out = held_out_digests(digests, held_out_share)
    sides: tuple[list[KeptWords], list[KeptWords]] = ([], [])
    for row, digest in zip(rows, digests, strict=True):
        sides[digest in held_out].append(row)
    return sides


def read_compressions(path: Path) -> Iterator[Compression]:
    """Yields the pairs in a file, in order.

    A `.jsonl` file has a `text` and its `summaries` in each line. A `.json` file is a list like
    LLMLingua-2's data of MeetingBank: records with a `prompt` and its `compressed_prompt`, or with lists of
    parts, `prompt_list` and `compressed_prompt_list`; unpaired parts are left out.

    Raises:
      ConfigError: the file is missing or of another form, or a test set by its name or its records' ids.
    """
    path = Path(path)
    if _TEST_FILE.fullmatch(path.stem):
        raise ConfigError(f"{path} is a file of tests by its name: nothing is to be trained on it")
    pairs = read_jsonl(path, _summaries) if path.suffix == ".jsonl" else _prompts(path)
    for pair in pairs:
        if pair.text.split() and pair.shorter.split():
            yield pair


def stem(word: str) -> str:
    """Returns the form in which words are compared: without case, punctuation and the commonest English
    endings."""
    bare = word.strip(string.punctuation + "“”‘’…–—").lower()
    if not bare:
        return word
    bare = bare.removesuffix("'s").removesuffix("’s")
    for suffix in _SUFFIXES:
        if bare.endswith(suffix) and len(bare) - len(suffix) >= _STEM_LETTERS:
            bare = bare.removesuffix(suffix) + ("y" if suffix == "ies" else "")
            break
    # stopped, stop; making, make; agreed, agree.
    while len(bare) > _STEM_LETTERS and (bare[-1] == bare[-2] or bare[-1] == "e"):
        bare = bare[:-1]
    return bare


def _says_something(word: str) -> bool:
    return any(map(str.isalnum, word))


def _without_worst(rows: list[KeptWords], measure: str, share: float) -> list[KeptWords]:
    if not rows:
        return rows
    values = np.array([getattr(row, measure) for row in rows])
    # Upper bound of retained values; rounding errors do not count.
    most = np.sort(values)[len(rows) - 1 - int(share * len(rows) + 1e-6)] + 1e-9
    return [row for row, value in zip(rows, values, strict=True) if value <= most]


def _summaries(record: Record) -> list[Compression]:
    text, summaries = text_field(record, "text"), record["summaries"]
    _refuse_tests(record)
    if not isinstance(summaries, list) or not all(isinstance(each, str) for each in summaries):
        raise ConfigError(f"'summaries' must be a list of texts, got {summaries!r:.80}")
    return [Compression(text, each) for each in summaries]


def _prompts(path: Path) -> Iterator[Compression]:
    records = read_json(path)
    if not isinstance(records, list):
        raise ConfigError(f"{path} must hold a list of records, got {type(records).__name__}")
    for number, record in enumerate(records):
        try:
            yield from _parts(record)
        except (ConfigError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}, record {number} is no prompt with its shorter version: {error}"
            ) from error


def _parts(record: Any) -> list[Compression]:
    if not isinstance(record, dict):
        raise ConfigError(f"expected an object, got {record!r:.80}")
    _refuse_tests(record)
    if "prompt_list" not in record:
        return [Compression(text_field(record, "prompt"), text_field(record, "compressed_prompt"))]
    texts, shorter = record["prompt_list"], record["compressed_prompt_list"]
    for each in (texts, shorter):
        if not isinstance(each, list) or not all(isinstance(part, str) for part in each):
            raise ConfigError(f"the parts of a prompt must be a list of texts, got {each!r:.80}")
    if len(texts) != len(shorter):
        return []
    return [Compression(*pair) for pair in zip(texts, shorter, strict=True)]


def _refuse_tests(record: Record) -> None:
    name = str(record.get("id", ""))
    if _TEST_ID.fullmatch(name) or record.get("split") == "test":
        raise ConfigError(f"the record {name!r} is one to test with: nothing is to be trained on it")
