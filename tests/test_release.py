"""A release is one commit and one tag, or leaves everything as it was."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


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


@pytest.mark.parametrize(
    ("version", "make", "message"),
    [("two", "true", "name the version"), ("0.2.0", "false", "")],
    ids=["no version", "does not build"],
)
def test_what_fails_changes_nothing(repository: Path, version: str, make: str, message: str) -> None:
    before = git(repository, "rev-parse", "HEAD")
    done = release(repository, version, make)
    assert done.returncode != 0
    assert message in done.stderr
    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "rev-parse", "HEAD") == before
    assert git(repository, "tag") == ""


def test_releases_twice_or_of_nothing_are_refused(repository: Path) -> None:
    assert release(repository, "0.2.0").returncode == 0
    assert "there already" in release(repository, "0.2.0").stderr
    assert "nothing under [Unreleased]" in release(repository, "0.3.0").stderr
    (repository / "note").touch()
    assert "the tree has changes" in release(repository, "0.3.0").stderr
