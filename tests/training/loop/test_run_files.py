"""A run's folder is one run's: claimed by what starts, kept by what goes on, refused to all others."""

import dataclasses
import json

import pytest

from jaxllm.errors import CheckpointError, ConfigError
from tests.training.jobs import SMOKE
from training.loop.run_files import claimed, read_identity


def test_a_folder_is_claimed_when_the_run_is_ready(tmp_path):
    folder = tmp_path / "deep" / "run"
    with pytest.raises(ZeroDivisionError), claimed(folder, SMOKE, documents="d1"):
        1 / 0  # noqa: B018
    with claimed(folder, SMOKE, documents="d1") as resuming:
        assert not resuming
        with pytest.raises(CheckpointError, match="not the folder of a training run"):
            read_identity(folder)
    assert read_identity(folder)["documents"] == "d1"
    with claimed(folder, SMOKE, documents="d1") as resuming:
        assert resuming


def test_who_goes_on_may_change_how_long_and_nothing_else(tmp_path):
    with claimed(tmp_path, SMOKE, documents="d1"):
        pass
    before = (tmp_path / "recipe.json").read_bytes()
    longer = dataclasses.replace(SMOKE, steps=SMOKE.steps + 1, log_steps=7)
    with claimed(tmp_path, longer, documents="d1") as resuming:
        assert resuming
    # It stays what it was claimed for.
    assert (tmp_path / "recipe.json").read_bytes() == before
    ready = []
    with (
        pytest.raises(ConfigError, match="differs in seed, the documents; give another"),
        claimed(tmp_path, dataclasses.replace(longer, seed=9), documents="d2"),
    ):
        ready.append("another run")
    assert not ready


def test_settings_younger_than_the_run_have_their_defaults(tmp_path):
    with claimed(tmp_path, SMOKE, documents="d1"):
        pass
    path = tmp_path / "recipe.json"
    identity = json.loads(path.read_text())
    del identity["recipe"]["router_z_weight"]
    path.write_text(json.dumps(identity))
    with claimed(tmp_path, SMOKE, documents="d1") as resuming:
        assert resuming
    path.write_text("{")
    with pytest.raises(CheckpointError, match="not the folder"), claimed(tmp_path, SMOKE, documents="d1"):
        pass
