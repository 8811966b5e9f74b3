"""Commands that train: what their options become. The runs themselves are tested in their rooms."""

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
from jaxllm.training.pretrain.run import PretrainTexts

MODULES = dict.fromkeys(("pretrain", "lora", "elasticize"), "train") | {"export": "training_options"}
Called = Callable[..., dict[str, Any]]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    """Runs a command whose run is replaced; returns the arguments that the run was called with."""

    def called(target: str, *words: object) -> dict[str, Any]:
        module, name = target.split(":")
        seen: dict[str, Any] = {}

        def run(*arguments: Any, **more: Any) -> Any:
            seen.update(more, arguments=arguments)
            return {"loss": 0.5}

        monkeypatch.setattr(importlib.import_module(module), name, run)
        command = importlib.import_module(f"jaxllm.cli.{MODULES.get(str(words[0]), words[0])}")
        # Devices are made once in a process.
        monkeypatch.setattr(
            command, "set_devices", lambda devices: seen.update(devices=devices), raising=False
        )
        result = CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return {**seen, "said": result.stdout}

    return called


def test_calibrate_experts(called: Called) -> None:
    words = ("calibrate", "experts", "mixture", "-o", "out", "--run", "run")
    target = "jaxllm.training.experts.expert_widths:quantize_experts"
    seen = called(target, *words)
    recipe, *paths = seen["arguments"]
    assert (recipe.tokens, paths) == (8192, [Path("mixture"), BundleOutput(Path("out")), Path("run")])
    assert (seen["target"], seen["texts"]) == (WidthTarget(), ())
    assert json.loads(seen["said"]) == {"bundle": "out", "loss": 0.5}
    seen = called(target, *words, "--max-loss", "10%", "--expert-bits", 4, "--tokens", 4096, "--text", "a")
    assert (seen["target"], seen["texts"]) == (WidthTarget(most_loss=0.1, uniform=4), (Path("a"),))
    # Without --cpu-devices the devices that there are are left as they are.
    assert (seen["arguments"][0].tokens, "devices" in seen, seen["mesh_shape"].data) == (4096, False, 1)
    seen = called(target, *words, "--mesh", "data=3,fsdp=2", "--cpu-devices", 6)
    assert (seen["arguments"][0].batch, seen["devices"]) == (6, 6)


CALIBRATIONS = {
    "prefill": "jaxllm.training.int8_prefill.prefill:calibrate_prefill",
    "contexts": "jaxllm.training.contexts.contexts:calibrate_contexts",
    "nested": "jaxllm.training.speculation.nested:calibrate_nested",
}


@pytest.mark.parametrize("name", CALIBRATIONS)
def test_calibrations_of_one_device_refuse_a_mesh(called: Called, name: str) -> None:
    words = ("calibrate", name, "model", "-o", "out", "--mesh")
    recipe, *paths = called(CALIBRATIONS[name], *words, "data=1,fsdp=1")["arguments"]
    assert (recipe, paths) == (type(recipe)(), [Path("model"), Path("out")])
    with pytest.raises(ConfigError, match=f"calibrate {name} runs on one device, not on --mesh fsdp=8"):
        called(CALIBRATIONS[name], *words, "fsdp=8")


def test_calibrate_prefill(called: Called) -> None:
    words = ("calibrate", "prefill", "model", "-o", "out", "--max-loss", "0.02", "--weight-scales", "tensor")
    seen = called("jaxllm.training.int8_prefill.prefill:calibrate_prefill", *words)
    recipe, *paths = seen["arguments"]
    assert (recipe.tokens, recipe.weight_scales) == (8192, "tensor")
    assert (paths, seen["most_loss"]) == ([Path("model"), Path("out")], 0.02)


def test_pretrain(called: Called) -> None:
    words = (
        "pretrain",
        "--run",
        "run",
        "--recipe",
        "smoke",
        "--steps",
        7,
        "--text",
        "a",
        "--valid-text",
        "b",
    )
    seen = called("jaxllm.training.pretrain.run:pretrain", *words, "--mesh", "data=1", "--cpu-devices", 3)
    recipe, run_dir = seen["arguments"]
    assert (recipe.steps, recipe.remat, run_dir) == (7, "none", Path("run"))
    assert seen["texts"] == PretrainTexts(None, (Path("a"),), (Path("b"),))
    assert (seen["mesh_shape"].data, seen["devices"], seen["monitoring"].tensorboard) == (1, 3, False)
    assert (
        called("jaxllm.training.pretrain.run:pretrain", *words, "--remat", "dots")["arguments"][0].remat
        == "dots"
    )


def test_lora(called: Called) -> None:
    words = ("lora", "model", "--run", "run", "--rank", 3, "--alpha", 6, "--weights", "int4")
    seen = called("jaxllm.training.lora.run:train_lora", *words)
    assert (seen["monitoring"].profile, seen["arguments"][0].evaluation_batches) == (None, 256)
    recipe, *paths = seen["arguments"]
    assert (recipe.lora.rank, recipe.lora.alpha, seen["weights"]) == (3, 6, "int4")
    assert paths == [Path("model"), Path("run")]
    seen = called("jaxllm.training.lora.run:train_lora", *words, "--profile", "traces", "--eval-batches", 0)
    assert (seen["monitoring"].profile, seen["arguments"][0].evaluation_batches) == (Path("traces"), 0)


def test_elasticize(called: Called) -> None:
    words = (
        "elasticize",
        "model",
        "-o",
        "out",
        "--run",
        "run",
        "--levels",
        "40,100%",
        "--anchor-share",
        "10%",
    )
    seen = called("jaxllm.training.elastic.run:elasticize", *words, "--text", "a", "--tiny-lm", "none")
    recipe, *paths = seen["arguments"]
    assert (recipe.levels, recipe.anchor_share) == ((40, 100), 0.1)
    assert [source.text for source in recipe.sources] == [str(Path("a").absolute())]
    assert (paths, seen["tiny_lm"]) == ([Path("model"), BundleOutput(Path("out")), Path("run")], None)
    asked = called(
        "jaxllm.training.elastic.run:elasticize", *words, "--questions", "a.jsonl", "--questions", "b.jsonl"
    )
    assert asked["tiny_lm"].recipe.tasks == tuple(
        str(Path(each).absolute()) for each in ("a.jsonl", "b.jsonl")
    )
    result = CliRunner().invoke(cli, [*words, "--tiny-lm", "none", "--questions", "a.jsonl"])
    assert result.exit_code == 2
    assert "--questions are for a tiny LM" in result.output
    assert called("jaxllm.training.elastic.run:elasticize", *words)["tiny_lm"].recipe.levels == (
        20,
        30,
        40,
        50,
        60,
        70,
        80,
        90,
        100,
    )


@pytest.mark.parametrize(
    ("learns_from", "target"),
    [
        ("documents", "jaxllm.training.pretrain.run:export_best"),
        ("pairs", "jaxllm.training.seq2seq.run:export_best_seq2seq"),
    ],
)
def test_export_a_run(
    called: Called, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, learns_from: str, target: str
) -> None:
    (tmp_path / "recipe.json").write_text("{}")
    monkeypatch.setattr("jaxllm.training.loop.run_files.read_identity", lambda run_dir: {learns_from: ""})
    words = ("export", tmp_path, "-o", "hf", "--format")
    assert called(target, *words, "hf")["arguments"] == (tmp_path, Path("hf"))
    result = CliRunner().invoke(cli, [*map(str, words), "gguf"])
    assert (result.exit_code, "--format hf" in result.output) == (2, True)


def test_pretrain_on_pairs(called: Called) -> None:
    words = ("pretrain", "--recipe", "translate-draft", "--run", "run", "--data", "data", "--teacher", "hf")
    seen = called(
        "jaxllm.training.seq2seq.run:train_seq2seq",
        *words,
        "--steps",
        7,
        "--mesh",
        "data=2",
        "--profile",
        "p",
    )
    recipe, run = seen["arguments"]
    assert (seen["monitoring"].tensorboard, seen["monitoring"].profile) == (False, Path("p"))
    assert (recipe.steps, recipe.cfg.hidden_size, run) == (7, 128, Path("run"))
    assert (seen["data"], seen["teacher"], seen["tokenizer"]) == (Path("data"), Path("hf"), None)
    assert seen["mesh_shape"].data == 2
    result = CliRunner().invoke(cli, [*words, "--text", "a.txt"])
    assert (result.exit_code, "does not go with --text" in result.output) == (2, True)


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
