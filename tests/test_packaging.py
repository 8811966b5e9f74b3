"""The package is imported, and not what lies beside a script under its name."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = """
import sys
from setuptools import build_meta
print(build_meta.build_editable(sys.argv[1]))
"""
USE = """
import sys, site
site.addsitedir(sys.argv[1])
import jaxllm
from serving.models import default_bundle, packaged_models
print(jaxllm.__file__, default_bundle().exists(), packaged_models())
"""
# As setuptools' finders of editable packages are, which come behind all folders of the path.
BEHIND = """
import importlib.util, sys
from pathlib import Path
class Finder:
    def find_spec(self, name, path=None, target=None):
        file = Path(sys.argv[1]) / name / "__init__.py"
        return importlib.util.spec_from_file_location(name, file) if file.exists() else None
sys.meta_path.append(Finder())
import serving
"""


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """A folder for a script, with a clone of the project beside it."""
    clone = tmp_path / "scripts" / "jaxllm"
    (clone / "jaxllm" / "assets").mkdir(parents=True)
    (clone / "jaxllm" / "__init__.py").touch()
    return clone.parent


def run(
    script: str, folder: Path, *arguments: object, flags: tuple[str, ...] = ()
) -> subprocess.CompletedProcess:
    # By a file, whose folder then leads the path.
    path = folder / "script.py"
    path.write_text(script)
    apart = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *flags, str(path), *map(str, arguments)],
        cwd=folder, env=apart, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_an_editable_install_comes_before_a_clone_beside_the_script(scripts: Path, tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    built = subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path)],
        cwd=ROOT, env={**os.environ, "JAXLLM_NATIVE": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr[-2000:]
    site = tmp_path / "site"
    zipfile.ZipFile(next(tmp_path.glob("*.whl"))).extractall(site)
    used = run(USE, scripts, site)
    assert used.returncode == 0, used.stderr[-2000:]
    assert used.stdout.startswith(f"{ROOT / 'jaxllm' / '__init__.py'} True ['")


def test_a_clone_that_is_found_first_is_named(scripts: Path) -> None:
    # Without the packages that are installed, ours among them.
    used = run(BEHIND, scripts, ROOT, flags=("-S",))
    assert used.returncode == 1
    assert f"ImportError: {scripts / 'jaxllm'} is found under the name jaxllm" in used.stderr
    assert "pip install -e" in used.stderr.splitlines()[-1]
