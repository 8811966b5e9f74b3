"""The chat templates of llama.cpp's collection, and the table of what is read of them in
docs/guides/service-api.md: python -m tests.text.foreign_templates

They come from the source distribution of llama-cpp-python, of which nothing else is kept, in the folder that
`JAXLLM_TEMPLATES` names.
"""

import os
from pathlib import Path

from jaxllm.text.answer_syntax import AnswerFormat
from tests.docs.page_table import PageTable
from tests.foreign.sources import LLAMA, fetch
from tests.text.answer_templates import template_of

_MEMBERS = r"vendor/llama\.cpp/models/templates/([\w.-]+\.jinja)"
TABLE = PageTable(Path("docs/guides/service-api.md"), "answer formats")


def collection() -> list[Path]:
    """The templates, fetched from the package index unless they are there; empty without a folder."""
    folder = os.environ.get("JAXLLM_TEMPLATES")
    if not folder:
        return []
    if not (found := sorted(Path(folder).glob("*.jinja"))):
        fetch(LLAMA, Path(folder), _MEMBERS)
        found = sorted(Path(folder).glob("*.jinja"))
    return found


def table() -> str:
    """The table in Markdown."""
    lines = ["| template | calls | thoughts | not read |", "|---|---|---|---|"]
    for path in collection():
        found = template_of(path.read_text(encoding="utf-8")).answer_format
        lines.append(f"| {path.stem} | {_calls(found)} | {_thoughts(found)} | {found.note} |")
    return "\n".join(lines) + "\n"


def _calls(found: AnswerFormat) -> str:
    kind = found.syntax.kind + ("" if found.several else ", one")
    return f"{kind}; tools in the system message" if found.generic else kind


def _thoughts(found: AnswerFormat) -> str:
    if not found.thinks:
        return ""
    markers = (found.thought_opening.strip(), found.thought_closing.strip())
    shown = " ".join(f"`{each}`" for each in markers).replace("|", "\\|")
    return shown + (", opened by the prompt" if found.opened else "")


if __name__ == "__main__":
    TABLE.write(table())
