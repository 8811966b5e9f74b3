"""Reads the documentation: its pages, their code blocks, and the commands named anywhere in them.

A comment before a block says how it is run:
  <!-- excerpt: why -->    not at all; options of its commands are still checked
  <!-- slow -->            by the full suite alone
  <!-- service -->         by the full suite, with a running service at 127.0.0.1:8080 (see `running_service`)
  <!-- needs: data -->     where that is: `data` (the folder JAXLLM_DATA), or a Python package
  <!-- input: text -->     with this text on standard input
  <!-- prints: text -->    what it prints, or each of its commands, has this text
"""

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "MODEL_CARD.md", "SECURITY.md", "CHANGELOG.md")
RUN = ("python", "sh")
# Blocks that show something and are not run. Others would be run by nobody, unseen.
SHOWN = ("text", "json", "toml", "yaml", "markdown", "kotlin")

_FENCE = re.compile(r"^(?P<ticks>```+)(?P<language>[^\n`]*)\n(?P<body>.*?)^(?P=ticks)[ ]*$", re.M | re.S)
_MARKS = re.compile(r"((?:<!--[^>]*-->\s*)+)\Z")
_MARK = re.compile(r"<!--\s*(?P<name>excerpt|slow|service|needs|input|prints)\b:?\s*(?P<value>.*?)\s*-->")
_INLINE = re.compile(r"(?<!`)`(jaxllm [^`]+)`(?!`)")


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block of a page.

    Attributes:
      page: its path from the root.
      line: of its fence.
      language: of its fence; empty for none.
      body: its text.
      marks: of the comments before it, by name.
    """

    page: str
    line: int
    language: str
    body: str
    marks: dict[str, str]

    @property
    def runs(self) -> bool:
        """Whether a test runs it by itself."""
        return self.language in RUN and not self.marks.keys() & {"excerpt", "service"}

    @property
    def calls(self) -> bool:
        """Whether a test runs it beside a service."""
        return "service" in self.marks

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """All pages, as paths from the root."""
    written = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
    return [*(name for name in DOCUMENTS if (ROOT / name).exists()), *written]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str) -> list[Block]:
    """Its fenced blocks in order."""
    text, blocks, end = text_of(page), [], 0
    for fence in _FENCE.finditer(text):
        before = _MARKS.search(text[end : fence.start()].rstrip(" "))
        marks = {mark["name"]: mark["value"] for mark in _MARK.finditer(before[0])} if before else {}
        line = text.count("\n", 0, fence.start()) + 1
        blocks.append(Block(page, line, fence["language"].strip(), fence["body"], marks))
        end = fence.end()
    return blocks


def prose_of(page: str) -> str:
    """A page without its fenced blocks and comments."""
    return re.sub(r"<!--.*?-->", "", _FENCE.sub("", text_of(page)), flags=re.S)


def commands_of(block: Block) -> list[str]:
    """The commands of a shell block, lines that go on joined, comments left out."""
    commands: list[str] = []
    begun = ""
    for line in re.sub(r"\\\n\s*", "", block.body).split("\n"):
        begun = f"{begun}\n{line}" if begun else line.strip()
        if not begun or begun.startswith("#"):
            begun = ""
        elif _closed(begun):
            commands.append(begun)
            begun = ""
    assert not begun, f"{block.place}: a quotation is not closed: {begun}"
    return commands


def _closed(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True


def words_of(command: str) -> list[str]:
    """A command as its words, without comments and what it is joined to."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|;&")
    lexer.whitespace_split = True
    return list(lexer)


def named_commands(page: str) -> Iterator[tuple[str, list[str]]]:
    """(place, arguments) of every `jaxllm` command of a page: in shell blocks and in inline code."""
    for block in blocks_of(page):
        if block.language == "sh":
            for command in commands_of(block):
                for words in split_words(words_of(command)):
                    yield block.place, words
    for inline in _INLINE.finditer(prose_of(page)):
        yield page, words_of(" ".join(inline[1].split()))[1:]


def split_words(words: list[str]) -> Iterator[list[str]]:
    """The arguments of each `jaxllm` of a line with `&&`, `|`, loops and variables before it."""
    parts: list[list[str]] = [[]]
    for word in words:
        if set(word) <= set("|;&"):
            parts.append([])
        else:
            parts[-1].append(word)
    for part in parts:
        names = [index for index, word in enumerate(part) if re.fullmatch(r"(.*/)?jaxllm", word)]
        if names and all(re.fullmatch(r"\w+=.*|do|then", word) for word in part[: names[0]]):
            yield [word for word in part[names[0] + 1 :] if word not in ("<", ">")]
