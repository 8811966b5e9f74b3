"""A run's folder is one run's: claimed by what starts, kept by what goes on, refused to all others."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from jaxllm.cli.train import pretrain_command
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.training.elastic.tiny_lm.recipe import TinyLmRecipe
from jaxllm.training.loop.checkpoints import Checkpoints, read_best
from jaxllm.training.loop.run_files import checkpoints_of, claimed, keep_checkpoints_at, read_identity
from tests.training.tiny_runs import SMOKE

# Not looked at: the folder is refused first.
NOTHING: Any = None


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


def test_a_run_has_the_precision_of_the_devices_that_it_began_on(tmp_path, monkeypatch):
    own = TinyLmRecipe.load("quick")
    stage = dataclasses.replace(own, score=dataclasses.replace(own.score, precision="float32"))
    said = dataclasses.replace(SMOKE, precision="float32")
    run, stages = tmp_path / "run", tmp_path / "stages"
    for folder, recipe, same in ((run, SMOKE, said), (stages, own, stage)):
        with claimed(folder, recipe, documents="d1"):
            pass
        with claimed(folder, same, documents="d1") as resuming:
            assert resuming
    # Each stage of a recipe has its own.
    assert own.score.precision is None
    assert read_identity(stages)["recipe"]["score"]["precision"] == "float32"
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    with claimed(run, said, documents="d1") as resuming:
        assert resuming
    with pytest.raises(ConfigError, match="differs in precision"), claimed(run, SMOKE, documents="d1"):
        pass


def test_a_run_keeps_its_checkpoints_at_a_url_for_all_of_its_stages(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    run = tmp_path / "outer" / "run"
    assert checkpoints_of(run / "joint") == run / "joint" / "checkpoints"
    keep_checkpoints_at(run, None)
    assert not run.exists()
    for _ in range(2):
        keep_checkpoints_at(run, "gs://bucket/mine/")
    assert checkpoints_of(run) == "gs://bucket/mine/checkpoints"
    assert checkpoints_of(run / "levels" / "20") == "gs://bucket/mine/levels/20/checkpoints"
    with pytest.raises(ConfigError, match="in gs://bucket/mine, not at gs://bucket/other; leave"):
        keep_checkpoints_at(run, "gs://bucket/other")
    # A run inside of another's folder is its own.
    (run / "inner").mkdir()
    (run / "inner" / "recipe.json").touch()
    assert checkpoints_of(run / "inner") == run / "inner" / "checkpoints"
    (tmp_path / "local" / "joint" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"in .*local, not at gs"):
        keep_checkpoints_at(tmp_path / "local", "gs://bucket/mine")


def test_without_what_writes_a_bucket_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(ConfigError, match="pip install gcsfs"):
        keep_checkpoints_at(run, "gs://bucket/run")
    assert not list(run.iterdir())
    # A run that was begun where it was installed.
    (run / "checkpoints.url").write_text("gs://bucket/run\n")
    with pytest.raises(ConfigError, match="at gs://bucket/run: `pip install gcsfs` first"):
        keep_checkpoints_at(run, None)
    with pytest.raises(ConfigError, match="pip install gcsfs"):
        Checkpoints(checkpoints_of(run))
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_a_url_is_no_folder_of_a_run_and_few_take_checkpoints(tmp_path, monkeypatch):
    """A path would make a folder `gs:` of it here."""
    monkeypatch.chdir(tmp_path)
    mangled = Path("gs://bucket/run")
    assert str(mangled) == "gs:/bucket/run"
    for written in (
        lambda: keep_checkpoints_at(mangled, "gs://bucket/run"),
        lambda: claimed(mangled, SMOKE).__enter__(),
        lambda: read_best(mangled, NOTHING),
    ):
        with pytest.raises(ConfigError, match="mounted file system, not gs:/bucket/run"):
            written()
    with pytest.raises(ConfigError, match="not at az://bucket/run"):
        Checkpoints("az://bucket/run")
    for url in ("az://bucket/run", "gs:///", "s3://bucket"):
        with pytest.raises(ConfigError, match=f"not at {url}; mount other storage as a folder"):
            keep_checkpoints_at(tmp_path, url)
    result = CliRunner().invoke(pretrain_command, ["--run", "runs/mine", "--profile", "gs://bucket/run"])
    assert (result.exit_code, "gs://bucket/run is a URL" in result.output) == (2, True)
    assert not list(tmp_path.iterdir())
