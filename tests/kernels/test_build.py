"""The package's own build: with no compiler it gives up the kernels and nothing else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("setuptools")
ROOT = Path(__file__).parents[2]


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What an editable install does to the sources: a build in place, here without any compiler."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "jaxllm/__init__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "jaxllm/kernels/native", folder / "jaxllm/kernels/native")
    none = {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}
    return subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=folder,
        env=os.environ | none | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("wanted", "said"),
    [("", "built without native kernels ("), ("0", "JAXLLM_NATIVE=0: jaxllm is built without")],
)
def test_without_a_compiler_there_is_a_package_without_kernels(tmp_path, wanted, said):
    done = build(tmp_path, JAXLLM_NATIVE=wanted)
    assert done.returncode == 0, done.stderr
    assert said in done.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_who_insists_on_kernels_gets_the_error(tmp_path):
    done = build(tmp_path, JAXLLM_NATIVE="1")
    assert done.returncode != 0
    assert "/nonexistent/c++" in done.stderr
