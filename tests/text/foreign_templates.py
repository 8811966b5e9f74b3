"""The chat templates of llama.cpp's collection, and the table of what is read of them in
docs/guides/service-api.md: python -m tests.text.foreign_templates

They come from the source distribution of llama-cpp-python, of which nothing else is kept, in the folder that
`JAXLLM_TEMPLATES` names.
"""

import hashlib
import html
import io
import os
import re
import tarfile
import urllib.request
from pathlib import Path
from urllib.parse import urljoin

from jaxllm.text.answer_syntax import AnswerFormat
from tests.docs.page_table import PageTable
from tests.text.answer_templates import template_of

_NAME = "llama_cpp_python-0.3.36.tar.gz"
_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")
_MEMBER = re.compile(r"[^/]+/vendor/llama\.cpp/models/templates/([\w.-]+\.jinja)")
TABLE = PageTable(Path("docs/guides/service-api.md"), "answer formats")


def collection() -> list[Path]:
    """The templates, fetched from the package index unless they are there; empty without a folder."""
    folder = os.environ.get("JAXLLM_TEMPLATES")
    if not folder:
        return []
    if not (found := sorted(Path(folder).glob("*.jinja"))):
        _fetch(Path(folder))
        found = sorted(Path(folder).glob("*.jinja"))
    return found


def _fetch(folder: Path) -> None:
    page = f"{_INDEX.rstrip('/')}/llama-cpp-python/"
    with urllib.request.urlopen(page, timeout=60) as reply:
        links = re.findall(r'href="([^"]+)"', reply.read().decode())
    link = next(each for each in links if f"/{_NAME}" in each)
    with urllib.request.urlopen(urljoin(page, html.unescape(link)), timeout=300) as reply:
        data = reply.read()
    assert hashlib.sha256(data).hexdigest() == _SHA256, "the index has another file"
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        for member in archive:
            match, file = _MEMBER.fullmatch(member.name), None
            if match and member.isfile() and (file := archive.extractfile(member)):
                (folder / match[1]).write_bytes(file.read())


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
