"""Writes the table of fields in docs/guides/service-api.md: python -m tests.serving.server.api.field_table"""

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from jaxllm.serving.server.api.dialect import fields_of
from jaxllm.serving.server.api.fields import DIALECTS, Extensions

PAGE = Path("docs/guides/service-api.md")
BLOCK = re.compile(r"(?<=<!-- fields -->\n).*?(?=<!-- end of fields -->)", re.DOTALL)


def table() -> str:
    """The table in Markdown; what all formats share stands in its first row."""
    common = set.intersection(*(set(each.names) for each in DIALECTS[:-1]))
    lines = ["| format | done | synonyms | hints | refused, but for |", "|---|---|---|---|---|"]
    first, own = DIALECTS[0], {*Extensions.__struct_fields__}
    lines.append(
        row(
            "all but embeddings", sorted(own), {k: v for k, v in first.synonyms.items() if k in common},
            first.hints & common, {k: v for k, v in first.refused.items() if k in common},
        )
    )  # fmt: skip
    for each in DIALECTS:
        done = [name for name in fields_of(each.body) if name not in own or each is DIALECTS[-1]]
        synonyms = {k: v for k, v in each.synonyms.items() if k not in common}
        refused = {k: v for k, v in each.refused.items() if k not in common or each is DIALECTS[-1]}
        hints = each.hints if each is DIALECTS[-1] else each.hints - common
        lines.append(row(each.name, done, synonyms, hints, refused))
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
