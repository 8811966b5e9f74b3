"""The site is built strictly: a page that is in no menu, or a link that leads nowhere, fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT


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
