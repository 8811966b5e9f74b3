"""Installs the distributions of `make dist` in fresh environments away from the sources, and runs them."""

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

import jaxllm
from tests.test_packaging import ROOT

DIST = os.environ.get("JAXLLM_DIST")
pytestmark = [
    pytest.mark.slow,
    # Environments are filled by pip, over the network.
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        DIST is None, reason="JAXLLM_DIST names no folder of distributions: see make test-dist"
    ),
]
NO_COMPILER = {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}


def run(
    command: list[object], folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command in `folder`; of this process's environment without the way to the sources."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(each) for each in command], cwd=folder, env={**own, **(environment or {})},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done


def new_environment(folder: Path) -> Path:
    """The folder of the commands of a virtual environment without packages."""
    run([sys.executable, "-m", "venv", folder], folder.parent)
    return folder / "bin"


@pytest.fixture(scope="module")
def wheel() -> Path:
    (file,) = Path(DIST or "").resolve().glob("*.whl")
    return file


@pytest.fixture(scope="module")
def sdist() -> Path:
    (file,) = Path(DIST or "").resolve().glob("*.tar.gz")
    return file


@pytest.fixture(scope="module")
def away(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked sources in `jaxllm`, as a clone would lie there."""
    folder = tmp_path_factory.mktemp("away")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (folder / f"jaxllm-{jaxllm.__version__}").rename(folder / "jaxllm")
    (folder / "script.py").write_text("import jaxllm\nprint(jaxllm.__version__, jaxllm.__file__)\n")
    return folder


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands of an environment with the wheel and what it depends on."""
    folder = tmp_path_factory.mktemp("wheel")
    commands = new_environment(folder / "environment")
    constraints = ROOT / "constraints.txt"
    run([commands / "python", "-m", "pip", "install", "--quiet", "--constraint", constraints, wheel], folder)
    return commands


def test_the_wheel_runs_away_from_the_sources(installed: Path, away: Path) -> None:
    assert run([installed / "jaxllm", "--version"], away).stdout == f"jaxllm, version {jaxllm.__version__}\n"
    facts = json.loads(run([installed / "jaxllm", "info", "--json"], away).stdout)
    assert facts["kernels"] != "xla"
    assert facts["kernels_available"][-1] == "portable"
    demo = run([installed / "jaxllm", "demo"], away)
    assert "native CPU kernels are not in use" not in demo.stderr
    assert " right; first token after " in demo.stdout


def test_without_a_compiler_the_sources_give_a_wheel_that_runs_on_xla(
    installed: Path, away: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    pip = [installed / "python", "-m", "pip", "install", "--quiet", "--no-deps"]
    # From the unpacked sources: of an archive pip would keep the wheel, and take it the next time.
    run([*pip, "--target", site, away / "jaxllm"], tmp_path, NO_COMPILER)
    assert not list(site.rglob("_native*.so"))
    # Before the environment's own packages, the wheel's among them.
    path = {"PYTHONPATH": str(site)}
    (file,) = run([installed / "python", "script.py"], away, path).stdout.split()[1:]
    assert Path(file).is_relative_to(site)
    demo = run([installed / "jaxllm", "demo"], away, path)
    assert "native CPU kernels are not in use (they could not be built: /nonexistent/c++: " in demo.stderr
    assert " right; first token after " in demo.stdout
