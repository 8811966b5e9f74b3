"""Another distribution's entry points are found by name, and only when a name is not ours."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxllm.contexts.codecs import CODECS, Codec, find_codec
from jaxllm.errors import ConfigError
from jaxllm.models.architectures import ARCHITECTURES, architecture
from jaxllm.registry import is_added
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.serving.speculation.drafters import DRAFTERS, make_drafter
from jaxllm.tasks import TASKS, Task, find_task

GROUPS = {"drafters": DRAFTERS, "codecs": CODECS, "architectures": ARCHITECTURES, "tasks": TASKS}
MODULE = """
from jaxllm.contexts.codecs import Codec
from jaxllm.models.architectures import ARCHITECTURES
from jaxllm.tasks import Task
CODEC = Codec("token", "channel")
ARCHITECTURE = ARCHITECTURES["llama"]
TASK = Task("fake", "a fake task", lambda folder, split: iter(()))
def drafter(*arguments):
    return arguments
"""
ENTRIES = """
[jaxllm.drafters]
fake = fake_package:drafter
ngram = fake_package:missing
[jaxllm.codecs]
fake = fake_package:CODEC
broken = absent_package:CODEC
[jaxllm.architectures]
fake = fake_package:ARCHITECTURE
[jaxllm.tasks]
fake = fake_package:TASK
"""


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed distribution that adds an entry to each group."""
    info = tmp_path / "fake_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    (tmp_path / "fake_package.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "fake_package", raising=False)
    is_added.cache_clear()
    yield tmp_path
    is_added.cache_clear()


def test_entries_are_found_by_name(distribution: Path) -> None:
    assert find_codec("fake") == Codec("token", "channel")
    assert architecture("fake") is ARCHITECTURES["llama"]
    found = find_task("fake")
    assert isinstance(found, Task)
    assert found.title == "a fake task"
    options = SpeculationOptions(drafter="fake")
    assert make_drafter("target", options) == ("target", options, None)  # pyright: ignore
    for registry in GROUPS.values():
        assert "fake" in registry
        assert "fake" not in list(registry)
    # Ours are not replaced.
    assert DRAFTERS["ngram"].__module__ == "jaxllm.serving.speculation.drafters"


def test_one_that_cannot_be_imported_names_its_distribution(distribution: Path) -> None:
    with pytest.raises(ConfigError, match=r"'broken', which fake-package adds to jaxllm\.codecs, cannot be"):
        find_codec("broken")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="no codec 'fake'"):
        find_codec("fake")
    with pytest.raises(ConfigError, match="no drafter 'fake'"):
        make_drafter("target", SpeculationOptions(drafter="fake"))  # pyright: ignore
    with pytest.raises(ConfigError, match="model_type 'fake' is not supported"):
        architecture("fake")
    for registry in GROUPS.values():
        with pytest.raises(KeyError):
            registry["fake"]


def test_metadata_is_not_read_for_our_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("importlib.metadata.entry_points")
    assert "kivi" in CODECS
    assert find_codec("kivi") is CODECS["kivi"]
    assert architecture("llama").model_type == "llama"
    with pytest.raises(AttributeError):
        find_codec("never asked for")


def test_the_command_line_takes_added_names(distribution: Path) -> None:
    from jaxllm.cli.evaluate import _TaskName
    from jaxllm.cli.model_choice import speculation

    options = speculation("fake")
    assert options is not None
    assert options.drafter == "fake"
    assert _TaskName(list(TASKS)).convert("fake", None, None) == "fake"
