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

MODULES = dict.fromkeys(("pretrain", "lora", "elasticize"), "train") | {"export": "training_options"}
RUNS = {
    "calibrate experts": "experts.expert_widths:quantize_experts",
    "calibrate prefill": "int8_prefill.prefill:calibrate_prefill",
    "calibrate contexts": "contexts.contexts:calibrate_contexts",
    "calibrate nested": "speculation.nested:calibrate_nested",
    "pretrain": "decoders:pretrain",
    "pretrain --recipe translate-draft": "seq2seq.run:train_seq2seq",
    "lora": "decoders:train_lora",
    "elasticize": "elastic.run:elasticize",
    "documents": "decoders:export_best",
    "pairs": "seq2seq.run:export_best_seq2seq",
}
Called = Callable[..., dict[str, Any]]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    """Runs a command whose run is replaced; returns the arguments that the run was called with."""

    def called(begin: str, words: str, target: str = "") -> dict[str, Any]:
        module, name = RUNS[target or begin].split(":")
        seen: dict[str, Any] = {}

        def run(*arguments: Any, **more: Any) -> Any:
            seen.update(more, arguments=arguments)
            return {"loss": 0.5}

        monkeypatch.setattr(importlib.import_module(f"jaxllm.training.{module}"), name, run)
        all_words = f"{begin} {words}".split()
        command = importlib.import_module(f"jaxllm.cli.{MODULES.get(all_words[0], all_words[0])}")
        # Devices are made once in a process.
        monkeypatch.setattr(
            command, "set_devices", lambda devices: seen.update(devices=devices), raising=False
        )
        result = CliRunner().invoke(cli, all_words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return {**seen, "said": result.stdout}

    return called


def refused(words: str, message: str) -> None:
    result = CliRunner().invoke(cli, words.split())
    assert (result.exit_code, message in result.output) == (2, True)


def test_calibrate_experts(called: Called) -> None:
    words = "mixture -o out --run run"
    seen = called("calibrate experts", words)
    recipe, *paths, run = seen["arguments"]
    assert (recipe.tokens, paths) == (8192, [Path("mixture"), BundleOutput(Path("out"))])
    assert (run.folder, run.mesh_shape.data) == (Path("run"), 1)
    assert (seen["target"], seen.get("texts", ())) == (WidthTarget(), ())
    assert json.loads(seen["said"]) == {"bundle": "out", "loss": 0.5}
    more = "--max-loss 10% --expert-bits 4 --tokens 4096 --text a"
    seen = called("calibrate experts", f"{words} {more}")
    assert (seen["target"], seen["texts"]) == (WidthTarget(most_loss=0.1, uniform=4), (Path("a"),))
    # Without --cpu-devices the devices that there are are left as they are.
    assert (seen["arguments"][0].tokens, "devices" in seen) == (4096, False)
    seen = called("calibrate experts", f"{words} --mesh data=3,fsdp=2 --cpu-devices 6")
    assert (seen["arguments"][0].batch, seen["devices"]) == (6, 6)


@pytest.mark.parametrize("name", ["prefill", "contexts", "nested"])
def test_calibrations_of_one_device_refuse_a_mesh(called: Called, name: str) -> None:
    recipe, *paths = called(f"calibrate {name}", "model -o out --mesh data=1,fsdp=1")["arguments"]
    assert (recipe, paths) == (type(recipe)(), [Path("model"), BundleOutput(Path("out"))])
    with pytest.raises(ConfigError, match=f"calibrate {name} runs on one device, not on --mesh fsdp=8"):
        called(f"calibrate {name}", "model -o out --mesh fsdp=8")


def test_calibrate_prefill(called: Called) -> None:
    seen = called("calibrate prefill", "model -o out --max-loss 0.02 --weight-scales tensor")
    recipe, *paths = seen["arguments"]
    assert (recipe.tokens, recipe.weight_scales) == (8192, "tensor")
    assert (paths, seen["most_loss"]) == ([Path("model"), BundleOutput(Path("out"))], 0.02)


def test_pretrain(called: Called) -> None:
    words = "--run run --recipe smoke --steps 7 --text a --valid-text b"
    seen = called("pretrain", f"{words} --mesh data=1 --cpu-devices 3")
    recipe, run = seen["arguments"]
    assert (recipe.steps, recipe.remat, run.folder) == (7, "none", Path("run"))
    assert (seen["texts"], seen["valid"]) == ((Path("a"),), (Path("b"),))
    assert (run.mesh_shape.data, seen["devices"], run.tensorboard) == (1, 3, False)
    assert called("pretrain", f"{words} --remat dots")["arguments"][0].remat == "dots"


def test_pretrain_on_pairs(called: Called) -> None:
    begin, words = "pretrain --recipe translate-draft", "--run run --data data --teacher hf"
    seen = called(begin, f"{words} --steps 7 --mesh data=2 --profile p")
    recipe, run = seen["arguments"]
    assert (run.folder, run.data, run.tensorboard, run.profile) == (
        Path("run"),
        Path("data"),
        False,
        Path("p"),
    )
    assert (recipe.steps, recipe.cfg.hidden_size, run.mesh_shape.data) == (7, 128, 2)
    assert (seen["teacher"], seen["tokenizer"]) == (Path("hf"), None)
    refused(f"{begin} {words} --text a.txt", "does not go with --text")


def test_lora(called: Called) -> None:
    words = "model --run run --rank 3 --alpha 6 --weights int4"
    seen = called("lora", words)
    recipe, model, run = seen["arguments"]
    assert (recipe.lora.rank, recipe.lora.alpha, seen["weights"]) == (3, 6, "int4")
    assert (model, run.folder, run.profile) == (Path("model"), Path("run"), None)
    assert recipe.evaluation_batches == 256
    recipe, _, run = called("lora", f"{words} --profile traces --eval-batches 0")["arguments"]
    assert (run.profile, recipe.evaluation_batches) == (Path("traces"), 0)


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
    assert called("elasticize", words)["tiny_lm"].recipe.levels == tuple(range(20, 101, 10))
    refused(f"elasticize {words} --tiny-lm none --questions a.jsonl", "--questions are for a tiny LM")


@pytest.mark.parametrize("learns_from", ["documents", "pairs"])
def test_export_a_run(
    called: Called, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, learns_from: str
) -> None:
    (tmp_path / "recipe.json").write_text("{}")
    monkeypatch.setattr("jaxllm.training.loop.run_files.read_identity", lambda run_dir: {learns_from: ""})
    words = f"{tmp_path} -o hf --format"
    assert called("export", f"{words} hf", learns_from)["arguments"] == (tmp_path, Path("hf"))
    refused(f"export {words} gguf", "--format hf")


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
