"""Links between pages, and to files of the repository, lead somewhere; the site is built strictly."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, pages, prose_of, text_of

_LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)\s>]+)>?\)")
_HEADING = re.compile(r"^#+\s+(.*?)\s*(?:\{#([\w-]+)\})?$", re.MULTILINE)
# Pages that the site's build makes.
_MADE = re.compile(r"(\.\./)*(docs/)?(api|project|source)/")


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts and the site make them."""
    anchors = set()
    for heading in _HEADING.finditer(page.read_text(encoding="utf-8")):
        text = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
        anchors.add(heading[2] or re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", text)).strip("-"))
    return anchors


def faults_of(page: str) -> list[str]:
    faults = []
    for target in _LINK.findall(prose_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        where = (ROOT / page).parent / path if path else ROOT / page
        if _MADE.match(path) and page.startswith("docs/"):
            continue
        if not where.exists():
            faults.append(f"{page}: {target} leads nowhere")
        elif anchor and where.suffix == ".md" and anchor not in anchors_of(where):
            faults.append(f"{page}: {target} has no such heading")
    return faults


# Paths in backticks: `serving/engine/engine.py`, `jaxllm/kv/`.
_PATH = re.compile(r"`((?:jaxllm|serving|training|export|benchmarks|tests|examples|docs)/[\w./-]*)`")


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere(page: str) -> None:
    """Paths that are named do, too, and a page of the site has one title."""
    assert not faults_of(page)
    if page.startswith("docs/"):
        prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
        assert len(re.findall(r"^# ", prose, re.MULTILINE)) == 1
    # The changelog also names what is gone.
    if page != "CHANGELOG.md":
        named = [path for path in _PATH.findall(prose_of(page)) if "NAME" not in path]
        assert not [path for path in named if not (ROOT / path).exists()]


@pytest.mark.slow
def test_the_site_is_built(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "mkdocstrings", "mkdocs_click"):
        pytest.importorskip(package)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    settings = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    built = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-4000:]
    for page in ("index.html", "cli.html", "api/public.html", "source/serving/engine/decoding.py.html"):
        assert (tmp_path / "site" / page).exists(), page
    # Nothing is fetched from elsewhere where a page is read.
    page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "https://fonts." not in page
    assert "cdn." not in page
