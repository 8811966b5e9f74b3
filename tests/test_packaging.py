"""The wheel holds the packages and nothing else, a script beside a clone imports what is installed, and one
tool sets versions.
"""

import collections
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import jaxllm

ROOT = Path(__file__).parents[1]
FLOORS = ("export", "serving", "training")
BUILD = """
import sys
from setuptools import build_meta
getattr(build_meta, f"build_{sys.argv[1]}")(sys.argv[2])
"""
USE = """
import sys, site
site.addsitedir(sys.argv[1])
import jaxllm, jaxllm.serving
print(jaxllm.__file__)
print(jaxllm.serving.__file__)
"""
FOREIGN = """
import site, sys
site.addsitedir(sys.argv[1])
sys.path += [path for path in sys.argv[2:] if "site-packages" in path]
from jaxllm import Engine, LLMService, write_bundle
print(Engine.__name__, LLMService.__name__, write_bundle.__name__)
"""


def run_script(script: str, folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a script from a file in `folder`, which Python then searches first, without this environment's
    packages (`-S`): jaxllm may be one of them."""
    path = folder / "script.py"
    path.write_text(script)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-S", str(path), *map(str, arguments)],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip


def build(kind: str, project: Path, output: Path) -> Path:
    """Builds an `sdist`, a `wheel` or an `editable` wheel without native kernels; returns its file."""
    output.mkdir()
    built = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(output)],
        cwd=project, env={**os.environ, "JAXLLM_NATIVE": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr[-2000:]
    (file,) = output.iterdir()
    return file


def sources(project: Path) -> set[str]:
    """The files that a wheel holds, by their paths in it: all but the native sources and what was built."""
    folders = [project / "jaxllm", *(project / "jaxllm" / floor for floor in FLOORS)]
    built = {".pyc", ".pyd", ".so"}
    files = {path for folder in folders for path in folder.rglob("*") if path.is_file()}
    kept = [path for path in files if path.suffix not in built and path.parent.name != "native"]
    return {str(path.relative_to(project)) for path in kept}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of the project in a folder named `jaxllm`, without the native library."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("scripts") / "jaxllm"
    folder.mkdir()
    unwanted = shutil.ignore_patterns("__pycache__", "*.so")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
        elif path.name in (*FLOORS, "jaxllm", "benchmarks", "tests"):
            shutil.copytree(path, folder / path.name, symlinks=True, ignore=unwanted)
    return folder


@pytest.fixture(scope="module")
def sdist(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of `clone`, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", clone, folder / "dist")) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"jaxllm-{jaxllm.__version__}"


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from `sdist`."""
    return build("wheel", sdist, tmp_path_factory.mktemp("wheel") / "dist")


@pytest.fixture(scope="module")
def install(clone: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that installs the `wheel`, or `editable` the `clone`, into a folder of its own."""

    def install(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        file = wheel if kind == "wheel" else build(kind, clone, folder / "dist")
        zipfile.ZipFile(file).extractall(folder / "site")
        return folder / "site"

    return install


@pytest.mark.slow
def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if not name.endswith("/")}
        metadata = f"jaxllm-{jaxllm.__version__}.dist-info"
        facts = email.message_from_bytes(archive.read(f"{metadata}/METADATA"))
    described = {name for name in files if name.startswith(f"{metadata}/")}
    assert f"{metadata}/licenses/LICENSE" in described
    assert files - described == sources(ROOT)
    assert {name.partition("/")[0] for name in files - described} == {"jaxllm"}
    assert (facts["Name"], facts["Version"]) == ("jaxllm", jaxllm.__version__)
    assert facts["License-Expression"] == "Apache-2.0"
    assert wheel.name.startswith(f"jaxllm-{jaxllm.__version__}-cp311-abi3-")


def test_what_is_installed_by_hash_has_the_pinned_versions() -> None:
    """requirements.txt was written again after the last change of pins: its versions are those of
    constraints.txt (which has none for other systems than those of tests), and each has hashes."""
    pin = re.compile(r"^([\w.-]+)==([\w.+]+)(.*(?:\n    .*)*)", re.MULTILINE)
    pinned = collections.defaultdict(set)
    for name, version, _ in pin.findall((ROOT / "constraints.txt").read_text()):
        pinned[name.lower().replace("_", "-")].add(version)
    found = pin.findall((ROOT / "requirements.txt").read_text())
    assert len(found) > 40
    for name, version, hashes in found:
        assert version in pinned[name] or "emscripten" in hashes, f"{name} {version}: run .ci/pin"
        assert "--hash=sha256:" in hashes
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = declared["optional-dependencies"]
    wanted = [*declared["dependencies"], *extras["serve"], *extras["client"]]
    names = {re.match(r"[\w.-]+", each)[0].lower().replace("_", "-") for each in wanted}
    assert names <= {name for name, *_ in found}


@pytest.mark.slow
def test_the_source_distribution_is_a_whole_project(sdist: Path) -> None:
    assert sources(sdist) == sources(ROOT)
    for folder in ("jaxllm/kernels/native", "tests"):
        wanted = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()}
        found = {path.relative_to(sdist) for path in (sdist / folder).rglob("*")}
        assert {path for path in wanted if path.suffix != ".pyc"} <= found
    for name in ("CHANGELOG.md", "LICENSE", "Makefile", "constraints.txt", "requirements.txt", "setup.py"):
        assert (sdist / name).is_file()
    assert not [path for path in sdist.rglob("*") if path.suffix in (".pyc", ".so")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_a_script_imports_what_is_installed(
    kind: str, clone: Path, install: Callable[[str], Path], tmp_path: Path
) -> None:
    """Beside a clone, and beside packages and modules of its own that are named as our folders are."""
    site = install(kind)
    used = run_script(USE, clone.parent, site)
    assert used.returncode == 0, used.stderr[-2000:]
    root = site if kind == "wheel" else clone
    assert used.stdout.splitlines() == [
        str(root / name / "__init__.py") for name in ("jaxllm", "jaxllm/serving")
    ]
    for name in ("serving", "training"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError('the {name} of a user')\n")
    for name in ("export", "benchmarks", "tests"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('the {name} of a user')\n")
    used = run_script(FOREIGN, tmp_path, site, *sys.path)
    assert used.returncode == 0, used.stderr[-2000:]
    assert used.stdout.strip() == "Engine LLMService write_bundle"


def test_the_version_is_written_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "jaxllm.version.__version__"}
    literal = re.compile(rf"""["']{re.escape(jaxllm.__version__)}["']""")
    written = [
        name for name in sources(ROOT) if name.endswith(".py") and literal.search((ROOT / name).read_text())
    ]
    assert written == ["jaxllm/version.py"]


def test_the_changelog_describes_this_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", jaxllm.__version__]


def git(folder: Path, *arguments: str) -> str:
    """What git says in `folder`, as a user of its own."""
    identity = ["-c", "user.name=tests", "-c", "user.email=tests@example.org"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of the files that a release reads and writes."""
    for name in (".ci/release", "jaxllm/version.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [Unreleased]\n\n- News.\n\n## [0.0.9]\n\n- Old.\n"
    )
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "before")
    return tmp_path


def release(repository: Path, version: str, make: str = "true") -> subprocess.CompletedProcess[str]:
    """Runs the command with `make` in place of building."""
    name = {
        f"GIT_{who}_{what}": "t@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    return subprocess.run(
        ["bash", ".ci/release", version],
        cwd=repository, env={**os.environ, **name, "MAKE": make}, capture_output=True, text=True,
    )  # fmt: skip


def test_a_release_is_a_commit_with_a_tag(repository: Path) -> None:
    done = release(repository, "0.2.0")
    assert done.returncode == 0, done.stderr
    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "describe", "--exact-match") == "v0.2.0"
    assert git(repository, "log", "--format=%s", "-1") == "Release 0.2.0"
    assert '__version__ = "0.2.0"' in (repository / "jaxllm/version.py").read_text()
    changelog = (repository / "CHANGELOG.md").read_text()
    assert re.search(r"## \[Unreleased\]\n\n## \[0\.2\.0\] - \d{4}-\d\d-\d\d\n\n- News\.", changelog)


def test_what_is_no_release_changes_nothing(repository: Path) -> None:
    before = git(repository, "rev-parse", "HEAD")
    for version, make, message in (("two", "true", "name the version"), ("0.2.0", "false", "")):
        done = release(repository, version, make)
        assert done.returncode != 0
        assert message in done.stderr
        assert git(repository, "status", "--porcelain") == git(repository, "tag") == ""
        assert git(repository, "rev-parse", "HEAD") == before
    assert release(repository, "0.2.0").returncode == 0
    assert "there already" in release(repository, "0.2.0").stderr
    assert "nothing under [Unreleased]" in release(repository, "0.3.0").stderr
    (repository / "note").touch()
    assert "the tree has changes" in release(repository, "0.3.0").stderr
