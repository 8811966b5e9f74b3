"""Words that the glossary does not use become fewer in the code, and the glossary says each thing once."""

import dataclasses
import re
from collections import Counter

import pytest

from tests.docs.house import sources_of, stated_packages
from tests.docs.pages import ROOT, text_of

PAGE = "docs/glossary.md"
# Word -> how often it stands in code and prose of the packages. These numbers become smaller, never larger.
COUNTS: dict[str, int] = {}

_ROWS = re.compile(r"^\| (?P<word>[^|]+?) \| (?P<say>[^|]*?) \|(?: (?P<but>[^|]*?) ?\|)?$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Unused:
    """A word that is not used.

    Attributes:
      word: in lower case.
      folders: folders and files where it has another meaning.
      phrases: in which it has another meaning.
    """

    word: str
    folders: tuple[str, ...]
    phrases: tuple[str, ...]


def unused_words() -> list[Unused]:
    """The glossary's table of them."""
    _, _, table = text_of(PAGE).partition("<!-- words -->")
    found = []
    for row in list(_ROWS.finditer(table))[1:]:
        exceptions = [each.strip() for each in (row["but"] or "").split(",")]
        folders = tuple(each.strip("`") for each in exceptions if each.endswith(("/`", ".py`")))
        phrases = tuple(each for each in exceptions if each and "`" not in each)
        found.append(Unused(row["word"], folders, phrases))
    return found


def words_in(source: str) -> list[str]:
    """The words of a source, names taken apart, in lower case."""
    return re.findall(r"[a-z]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", source).lower())


def count(source: str, unused: Unused) -> int:
    """How often a word stands in a source, but for its phrases."""
    text = " ".join(words_in(source))
    for phrase in unused.phrases:
        text = re.sub(rf"\b{re.escape(' '.join(words_in(phrase)))}\b", "", text)
    return len(re.findall(rf"\b{unused.word}\b", text))


def sources() -> dict[str, str]:
    """Path from the root -> source."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for package in stated_packages()
        for path in sources_of(package)
    }


def all_counts() -> Counter[str]:
    """Every unused word with how often it stands in the packages."""
    found: Counter[str] = Counter()
    unused_ones = unused_words()
    for file, source in sources().items():
        words = set(words_in(source))
        for unused in unused_ones:
            if words.issuperset(unused.word.split()) and not file.startswith(unused.folders):
                found[unused.word] += count(source, unused)
    return found


@pytest.mark.slow
def test_unused_words_become_fewer() -> None:
    assert {word: number for word, number in all_counts().items() if number > COUNTS.get(word, 0)} == {}
