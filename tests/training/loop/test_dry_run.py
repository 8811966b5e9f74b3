"""Dry runs: figures from the compiled step, and what to change where memory is too small."""

import dataclasses
import json

import pytest
from click.testing import CliRunner

from jaxllm.errors import ConfigError
from tests.tiny import write_tiny_folder
from tests.training.jobs import SMOKE
from tests.training.tiny_runs import ONE
from training.commands import pretrain as command
from training.data.sources import Source
from training.loop.dry_run import Estimate
from training.lora.recipe import LoraRecipe
from training.lora.run import dry_run_lora
from training.pretrain.run import dry_run_pretrain

LORA = LoraRecipe(steps=10, batch=2, row_tokens=64, peak_learning_rate=1e-3, sources=(Source(text="a.txt"),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


def test_a_new_model_needs_its_state_and_activations():
    found = dry_run_pretrain(SMOKE, mesh_shape=ONE, device="H100")
    parameters = 4 * 288 * 32
    # Parameters and two moments, in float32.
    assert 3 * parameters < found["state_bytes"] < found["memory_bytes"]
    assert (found["device"], found["devices"], found["advice"]) == ("NVIDIA H100", 1, "")
    assert found["device_hours"] == pytest.approx(found["step_s"] * SMOKE.steps / 3600)
    longer = dry_run_pretrain(dataclasses.replace(SMOKE, batch=64), mesh_shape=ONE, device="H100")
    assert longer["temporary_bytes"] > found["temporary_bytes"]
    assert longer["step_s"] == pytest.approx(16 * found["step_s"])


def test_frozen_weights_are_known_by_their_config_alone(folder):
    whole, half = (
        dry_run_lora(LORA, folder, weights=weights, mesh_shape=ONE, device="v5 lite")
        for weights in ("f32", "bf16")
    )
    assert whole["device"] == "TPU v5 lite"
    assert whole["state_bytes"] > half["state_bytes"]
    assert (
        dry_run_pretrain(SMOKE, folder, mesh_shape=ONE, device="A100")["state_bytes"] > whole["state_bytes"]
    )


def test_what_is_not_known_is_said(folder):
    with pytest.raises(ConfigError, match="say with --dry-run which device"):
        dry_run_pretrain(SMOKE, mesh_shape=ONE)
    with pytest.raises(ConfigError, match="knows frozen weights of f32 and bf16, not int4"):
        dry_run_lora(LORA, folder, weights="int4", mesh_shape=ONE, device="H100")


def test_advice_follows_what_is_large():
    parts = {
        "device": "NVIDIA H100", "devices": 8, "device_memory_bytes": 80 * 2**30, "step_s": 1.0,
        "device_hours": 1.0,
    }  # fmt: skip

    def advice(state, temporary):
        sizes = {"state_bytes": state << 30, "temporary_bytes": temporary << 30}
        return Estimate(**parts, **sizes, memory_bytes=state + temporary << 30).advice()

    assert not advice(20, 50)
    assert "needs 100.0 GiB per device and NVIDIA H100 has 80.0: take more --accumulate" in advice(20, 80)
    assert "more devices along fsdp or tensor" in advice(80, 20)


def test_the_command_prints_json(folder, monkeypatch):
    monkeypatch.setattr(command, "set_devices", lambda devices: None)
    words = ["--run", "none", "--recipe", "smoke", "--dry-run", "H100", "--mesh", "data=1"]
    result = CliRunner().invoke(command.pretrain_command, words, catch_exceptions=False)
    assert json.loads(result.output)["devices"] == 1
