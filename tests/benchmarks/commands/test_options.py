"""The options of benchmarks: values that other modules define, and runs without options."""

import importlib
import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from benchmarks import speculative
from benchmarks.cli import SECTIONS, bench_command
from benchmarks.commands import contexts, engine, options, service
from benchmarks.measuring import storage
from benchmarks.models import shapes
from benchmarks.peers import PEERS
from benchmarks.service import systems
from jaxllm.errors import ConfigError
from serving.bundles import packaged_models
from serving.cli import cli
from serving.traces.switching import PATTERNS

NAMES = (
    "engine", "elastic", "speculative", "contexts", "experts", "prefill", "prepare", "service", "export"
)  # fmt: skip


def test_values_are_those_of_the_modules_that_define_them():
    assert (*options.DENSE_SHAPES, *options.MIXTURE_SHAPES) == tuple(shapes.SHAPES)
    assert options.MIXTURE_SHAPES == shapes.MIXTURES
    assert tuple(shapes.ENCODER_DECODERS) == options.SEQ2SEQ_SHAPES
    assert tuple(shapes.SWITCHES) == options.SWITCH_SHAPES
    assert {*options.PHONES, *options.BOARDS} == {*storage.DEVICES}
    assert tuple(PATTERNS) == contexts.PATTERNS
    assert tuple(PEERS) == engine.PEERS
    assert (*systems.ABLATIONS, systems.LLAMA) == service.SYSTEMS


def test_every_benchmark_is_a_command():
    assert tuple(SECTIONS["Benchmarks"]) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs_without_options_on_packaged_models(name, monkeypatch):
    """What is measured is left out; what would be measured is there."""
    seen = []

    def run(*arguments, **_):
        seen.extend(arguments)
        return []

    module = importlib.import_module(f"benchmarks.{name}.run")
    monkeypatch.setattr(module, "run", run)
    if name == "contexts":
        monkeypatch.setattr("benchmarks.contexts.quality.quality_rows", run)
    if name == "experts":
        monkeypatch.setattr("benchmarks.models.checkpoint.Checkpoint.folder", lambda *_: Path("floats"))
    got = CliRunner().invoke(cli, ["bench", name, "--json"], catch_exceptions=False)
    assert got.exit_code == 0
    assert json.loads(got.stdout)["bench"] == name
    assert any(each == module.Plan.quick() or hasattr(each, "quick") for each in seen) or name == "engine"
    models = [each for each in _paths(seen) if each.suffix == ".jaxllm"]
    assert {each.stem for each in models} & {*packaged_models()}
    assert all(each.exists() for each in models)


def _paths(values):
    for each in values:
        if isinstance(each, Path):
            yield each
        elif isinstance(each, tuple):
            yield from _paths(each)
        elif hasattr(each, "__dataclass_fields__"):
            yield from _paths(tuple(vars(each).values()))


@pytest.mark.parametrize("name", NAMES)
def test_the_long_run_is_asked_for_in_one_way(name):
    with click.Context(bench_command) as context:
        command = bench_command.get_command(context, name)
    (option,) = (each for each in command.params if each.name == "quick")
    assert (option.opts, option.secondary_opts, option.default) == (["--quick"], ["--full"], True)


def test_parts_that_random_weights_lack_are_left_out_aloud(capsys):
    assert options.parts_without(("a", "b", "c"), ("b", "d"), "no reason") == ("a", "c")
    assert capsys.readouterr().err == "without b: no reason\n"
    assert options.parts_without(("a",), ("b",), "no reason") == ("a",)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("elastic", "trace"),
        ("contexts", "quality"),
        ("prefill", "accuracy"),
        ("experts", "losses"),
        ("speculative", "systems"),
    ],
)
def test_a_part_that_random_weights_lack_cannot_be_chosen(name, part):
    shape = "moe-1b" if name == "experts" else "110m"
    got = CliRunner().invoke(cli, ["bench", name, "--shape", shape, "--only", part])
    assert got.exit_code == 2
    assert "--only" in got.stderr


def test_random_weights_are_measured_without_choosing_a_part(monkeypatch):
    monkeypatch.setattr("benchmarks.commands.speculative._shape_rows", lambda *_: [])
    got = CliRunner().invoke(cli, ["bench", "speculative", "--shape", "110m"], catch_exceptions=False)
    assert got.exit_code == 0


def bench_speculative(monkeypatch, *options):
    """What `bench speculative` would measure, how, and how the command ended."""
    seen = []
    monkeypatch.setattr("benchmarks.speculative.run.run", lambda *asked: seen.extend(asked[:2]) or [])
    got = CliRunner().invoke(cli, ["bench", "speculative", *options], catch_exceptions=False)
    return seen, got


def test_budgets_prompts_and_presets_are_what_was_asked_for(monkeypatch, tmp_path):
    file = tmp_path / "prompts" / "spec_bench.jsonl"
    file.parent.mkdir()
    file.write_text("{}")
    monkeypatch.setenv("JAXLLM_DATA", str(tmp_path))
    asked = ("--full", "--budget", "25%", "--budget", "0.75", "--preset", "published", "--count", "30")
    (subject, plan), got = bench_speculative(monkeypatch, *asked, "--prompts", "spec-bench")
    assert got.exit_code == 0
    assert (plan.shares, plan.presets, plan.prompts) == ((0.25, 0.75), ("published",), 30)
    assert subject.prompts == file
    assert bench_speculative(monkeypatch, "--prompts", str(file))[0][0].prompts == file
    (subject, plan), _ = bench_speculative(monkeypatch, "--full")
    assert plan.shares == (0.5,)
    assert plan.presets == tuple(speculative.PRESETS)
    assert plan.tried
    assert subject.prompts is None


def test_random_weights_are_not_asked(monkeypatch):
    for option, value in (("--count", "3"), ("--preset", "ours"), ("--prompts", "spec-bench")):
        seen, got = bench_speculative(monkeypatch, "--shape", "110m", option, value)
        assert (seen, got.exit_code) == ([], 2)
        assert f"{option}: for a --model" in got.stderr


def test_prompts_that_are_not_there_are_refused(monkeypatch, tmp_path):
    monkeypatch.delenv("JAXLLM_DATA", raising=False)
    seen, got = bench_speculative(monkeypatch, "--prompts", "spec-bench")
    assert (seen, got.exit_code) == ([], 2)
    assert "$JAXLLM_DATA" in got.stderr
    seen, got = bench_speculative(monkeypatch, "--prompts", str(tmp_path / "none.jsonl"))
    assert (seen, got.exit_code) == ([], 2)
    assert "no such file" in got.stderr


def test_answers_are_judged_where_rouge_is_there(monkeypatch):
    def missing():
        raise ConfigError("no rouge-score")

    assert bench_speculative(monkeypatch)[0][1].judged
    monkeypatch.setattr("jaxllm.tasks.rouge.require_rouge", missing)
    (_, plan), got = bench_speculative(monkeypatch)
    assert not plan.judged
    assert "without BLD and STI" in got.stderr
