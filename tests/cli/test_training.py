"""Commands that train: what their options become. The runs themselves are tested in their rooms."""

import dataclasses
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from jaxllm.cli.main import cli
from jaxllm.cli.training_options import keep_compilations
from jaxllm.errors import ConfigError
from jaxllm.training.calibration import BundleOutput, WidthTarget

RUNS = {
    "calibrate experts": "experts.expert_widths:quantize_experts",
    "calibrate prefill": "int8_prefill.prefill:calibrate_prefill",
    "calibrate contexts": "contexts.contexts:calibrate_contexts",
    "calibrate nested": "speculation.nested:calibrate_nested",
    "elasticize": "elastic.run:elasticize",
}
Called = Callable[..., dict[str, Any]]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    """Runs a command whose run is replaced; returns the arguments that the run was called with."""

    def called(begin: str, words: str) -> dict[str, Any]:
        module, name = RUNS[begin].split(":")
        seen: dict[str, Any] = {}

        def run(*arguments: Any, **more: Any) -> Any:
            seen.update(more, arguments=arguments)
            return {"loss": 0.5}

        monkeypatch.setattr(importlib.import_module(f"jaxllm.training.{module}"), name, run)
        all_words = f"{begin} {words}".split()
        command = importlib.import_module(f"jaxllm.cli.{'calibrate' if 'calibrate' in begin else 'train'}")
        # Devices are made once in a process.
        monkeypatch.setattr(
            command, "set_devices", lambda devices: seen.update(devices=devices), raising=False
        )
        result = CliRunner().invoke(cli, all_words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return {**seen, "said": result.stdout}

    return called


def test_calibrate_experts(called: Called) -> None:
    words = "mixture -o out --run run"
    seen = called("calibrate experts", words)
    recipe, *paths, run = seen["arguments"]
    assert (recipe.tokens, paths) == (8192, [Path("mixture"), BundleOutput(Path("out"))])
    assert (run.folder, run.mesh_shape.data) == (Path("run"), 1)
    assert (seen["target"], seen.get("texts", ())) == (WidthTarget(), ())
    assert json.loads(seen["said"]) == {"bundle": "out", "loss": 0.5}
    # Without --cpu-devices the devices that there are are left as they are.
    assert "devices" not in seen
    seen = called("calibrate experts", f"{words} --mesh data=3,fsdp=2 --cpu-devices 6")
    assert (seen["arguments"][0].batch, seen["devices"]) == (6, 6)


@pytest.mark.parametrize("name", ["prefill", "contexts", "nested"])
def test_calibrations_of_one_device_refuse_a_mesh(called: Called, name: str) -> None:
    more = " --max-loss 0.02 --weight-scales tensor" if name == "prefill" else ""
    seen = called(f"calibrate {name}", f"model -o out --mesh data=1,fsdp=1{more}")
    recipe, *paths = seen["arguments"]
    if more:
        assert (recipe.weight_scales, seen["most_loss"]) == ("tensor", 0.02)
        recipe = dataclasses.replace(recipe, weight_scales=type(recipe).weight_scales)
    assert (recipe, paths) == (type(recipe)(), [Path("model"), BundleOutput(Path("out"))])
    with pytest.raises(ConfigError, match=f"calibrate {name} runs on one device, not on --mesh fsdp=8"):
        called(f"calibrate {name}", "model -o out --mesh fsdp=8")


def test_elasticize(called: Called) -> None:
    words = "model -o out --run run --levels 40,100% --anchor-share 10%"
    more = "--recovery none --order magnitude --weights int8 --name mini"
    seen = called("elasticize", f"{words} {more} --text a --tiny-lm none")
    recipe, *paths, run = seen["arguments"]
    assert (recipe.recovery, recipe.order, recipe.units) == ("none", "magnitude", "equal")
    assert json.loads(seen["said"]) == {"bundle": "out", "loss": 0.5}
    assert (recipe.levels, recipe.anchor_share) == ((40, 100), 0.1)
    assert [source.text for source in recipe.sources] == [str(Path("a").absolute())]
    assert (paths, run.folder) == ([Path("model"), BundleOutput(Path("out"), "int8", "mini")], Path("run"))
    assert seen["tiny_lm"] is None
    asked = called("elasticize", f"{words} --questions a.jsonl --questions b.jsonl")["tiny_lm"].recipe
    assert asked.tasks == tuple(str(Path(each).absolute()) for each in ("a.jsonl", "b.jsonl"))
    refused = CliRunner().invoke(cli, f"elasticize {words} --tiny-lm none --questions a.jsonl".split())
    assert (refused.exit_code, "--questions are for a tiny LM" in refused.output) == (2, True)


@pytest.mark.parametrize(
    ("backend", "given", "kept"), [("gpu", None, "cache/steps"), ("cpu", None, None), ("tpu", "mine", "mine")]
)
def test_compiled_steps_are_kept_off_cpus(
    backend: str, given: str | None, kept: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"jax_compilation_cache_dir": given}
    config = SimpleNamespace(values=settings, update=settings.__setitem__, jax_disable_jit=False)
    monkeypatch.setattr("jax.default_backend", lambda: backend)
    monkeypatch.setattr("jax.config", config)
    monkeypatch.setenv("JAXLLM_CACHE", "cache")
    keep_compilations()
    assert settings == {"jax_compilation_cache_dir": kept}
