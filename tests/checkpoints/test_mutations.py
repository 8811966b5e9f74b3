"""Damaged and hostile folders: each is read, or refused in one line, and none is waited for."""

import itertools
import json
import shutil
from pathlib import Path

import pytest

from jaxllm.errors import JaxllmError
from jaxllm.prepare import prepare
from tests.checkpoints import mutations
from tests.tiny import write_tiny_folder

SPECIAL = dict(mutations.special_files())


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("sound") / "model")


@pytest.mark.parametrize("name", SPECIAL)
def test_pipes_devices_and_endless_files_are_not_read(name: str, sound: Path, tmp_path: Path):
    folder = shutil.copytree(sound, tmp_path / "model")
    SPECIAL[name](folder)
    # A file that is not needed may be missing.
    missing = "dead link" in name and not name.startswith(
        ("config.json", "tokenizer.json", "model.safetensors ")
    )
    if missing or name.startswith("model.safetensors.index.json"):
        return prepare(folder, tmp_path / "out.jaxllm")
    with pytest.raises(JaxllmError) as caught:
        prepare(folder, tmp_path / "out.jaxllm")
    assert "\n" not in str(caught.value)
    return None


def test_no_mutation_of_a_folder_is_uncaught(sound: Path, tmp_path: Path):
    refused = 0
    for _, change in itertools.islice(mutations.folders(seed=3), len(SPECIAL), len(SPECIAL) + 100):
        folder = tmp_path / "model"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(sound, folder)
        change(folder)
        try:
            prepare(folder, tmp_path / "out.jaxllm")
        except JaxllmError as error:
            refused += "\n" not in str(error)
    assert 20 < refused < 100


@pytest.mark.parametrize("share", [float("nan"), 1e308, -1.0, "x"])
def test_a_share_of_rotated_dimensions_that_is_no_share(share: object, sound: Path, tmp_path: Path):
    folder = shutil.copytree(sound, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["partial_rotary_factor"] = share
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(JaxllmError):
        prepare(folder, tmp_path / "out.jaxllm")
