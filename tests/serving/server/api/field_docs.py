"""Writes the table of fields in docs/guides/service-api.md: python -m tests.serving.server.api.field_docs"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from jaxllm.serving.server.api.dialect import Dialect, fields_of
from jaxllm.serving.server.api.fields import DIALECTS

PAGE = Path("docs/guides/service-api.md")
BLOCK = re.compile(r"(?<=<!-- fields -->\n).*?(?=<!-- end of fields -->)", re.DOTALL)


def table() -> str:
    """The table in Markdown; what all formats of answers share stands in its first row."""
    answers = [each for each in DIALECTS if "embeddings" not in each.name]
    # What one format does may be a hint to another.
    kinds = ({(name, name in {*fields_of(each.body)}) for name in each.names} for each in answers)
    common = {name for name, _ in set.intersection(*kinds)}
    lines = ["| format | done | synonyms | hints | refused, but for |", "|---|---|---|---|---|"]

    def add(name: str, each: Dialect[Any], wanted: Callable[[str], bool]) -> None:
        done = filter(wanted, fields_of(each.body))
        synonyms = {name: own for name, own in each.synonyms.items() if wanted(name)}
        refused = {name: values for name, values in each.refused.items() if wanted(name)}
        lines.append(row(name, done, synonyms, filter(wanted, each.hints), refused))

    add("all answers", answers[0], common.__contains__)
    for each in DIALECTS:
        if each.name != "counts":
            add(each.name, each, lambda name, own=each in answers: not (own and name in common))
    return "\n".join(lines) + "\n"


def row(
    name: str, done: Iterable[str], synonyms: dict[str, str], hints: Iterable[str], refused: dict[str, tuple]
) -> str:
    """A row of the table."""
    cells = [
        " ".join(f"`{each}`" for each in done),
        " ".join(f"`{each}`=`{own}`" for each, own in synonyms.items()),
        " ".join(f"`{each}`" for each in sorted(hints)),
        ", ".join(
            f"`{each}` {' or '.join(f'`{msgspec.json.encode(value).decode()}`' for value in values)}".strip()
            for each, values in refused.items()
        ),
    ]
    return f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
