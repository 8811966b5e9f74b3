"""The elastic bench on tiny models, and its command."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.elastic import run
from benchmarks.elastic.baselines import layer_counts, plain_models
from benchmarks.elastic.levels import move
from benchmarks.elastic.random_model import elastic_shape
from benchmarks.elastic.variants import right_answers
from benchmarks.models.shapes import SHAPES, Shape
from jaxllm.bundle import Bundle
from jaxllm.bundle.elastic import elastic_parts, read_ladder, read_recovery
from jaxllm.bundle.tiny_lm import tiny_lm_parts
from jaxllm.elastic.ladder import Ladder, is_unit_parameter
from jaxllm.models.parameters import param_specs, parameter_count
from jaxllm.tasks.branching import branching
from jaxllm.tasks.example import TaskExample
from jaxllm.tasks.shortened import Question
from serving.cli import cli
from serving.engine import Engine
from serving.evaluation.scoring import score_options
from serving.options import EngineOptions
from tests.tiny import TINY, VOCAB_SIZE, write_tiny_bundle
from tests.tiny_tlm import tiny_lm


@pytest.fixture(scope="module")
def elastic(tmp_path_factory):
    tiny = tiny_lm((50, 100), (0.5, 0.8))
    facts = {"layer_importance": [0.5, 0.1]}
    parts = {**elastic_parts(Ladder(levels=(50, 100)), facts=facts), **tiny_lm_parts(tiny)}
    return write_tiny_bundle(tmp_path_factory.mktemp("elastic") / "e.jaxllm", cfg=TINY, parts=parts)


@pytest.mark.slow
def test_a_shape_has_every_level_and_its_adapter(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path))
    small = Shape(D=32, L=6, N=8, K=8, H=4, F=640, V=40, window_tokens=64)
    monkeypatch.setitem(SHAPES, "small", small)
    path = elastic_shape("small", "int8", lambda *_: None)
    written = path.stat().st_mtime_ns
    assert elastic_shape("small", "int8", lambda *_: None).stat().st_mtime_ns == written
    with Bundle.open(path) as bundle:
        ladder = read_ladder(bundle)
        assert ladder == Ladder(anchors=(5,))
        for level in ladder.levels:
            assert (read_recovery(bundle, level) is None) == (level == 100)


def test_a_shape_is_like_another_bundle(tmp_path, monkeypatch, elastic):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path))
    small = Shape(D=32, L=6, N=8, K=8, H=4, F=640, V=2 * VOCAB_SIZE, window_tokens=64)
    monkeypatch.setitem(SHAPES, "small", small)
    with Bundle.open(elastic) as other:
        path = elastic_shape("small", "int8", lambda *_: None, like=other)
    with Bundle.open(path) as bundle:
        assert read_ladder(bundle).levels == (50, 100)
        assert bundle.cfg.vocab_size == VOCAB_SIZE
        # Recovered together, or not at all: no level has an adapter.
        assert read_recovery(bundle, 50) is None


OPTIONS = EngineOptions(context_tokens=64, chunk_tokens=(16,), buckets_bytes=0)


def test_questions_that_do_not_fit_are_wrong(elastic):
    engine = Engine.open(elastic, options=OPTIONS, warm_up=False)
    examples = [TaskExample(user=user, answer="a", options=("a", "b")) for user in ("how?", "how? " * 99)]
    questions = [Question.read(engine.tokenizer, each) for each in examples]
    prompts = [branching(engine.tokenizer, each) for each in examples]
    right, fits = right_answers(engine, questions, prompts)
    assert (right[1], fits.tolist()) == (False, [True, False])
    (likely,) = score_options(engine, prompts[:1])
    assert right[0] == questions[0].is_right(likely)
    assert right_answers(engine, questions[1:], prompts[1:])[0].tolist() == [False]


@pytest.mark.parametrize("weights", ["f32", "int8"])
def test_a_level_is_moved_with_all_its_units(tmp_path, weights):
    parts = elastic_parts(Ladder(levels=(50, 100)))
    path = write_tiny_bundle(tmp_path / "e.jaxllm", weights, cfg=TINY, parts=parts)
    engine = Engine.open(path, options=dataclasses.replace(OPTIONS, levels=(50,)), warm_up=False)
    moved = {level: move(engine, level)[1] for level in (50, 100)}
    for level, size in moved.items():
        specs = param_specs(engine.runner_at(level).cfg)
        units = sum(math.prod(spec.shape) for name, spec in specs.items() if is_unit_parameter(name))
        if weights == "f32":
            assert size == 4 * units
        else:
            # A byte each, and scales of a row or of a group.
            assert units < size < 1.5 * units
    assert moved[50] < 0.6 * moved[100]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="says what is mapped")
def test_files_are_read_for_a_swap_before_they_are_mapped(tmp_path, monkeypatch):
    mapped = []

    def swap_ms(file):
        mapped.append(str(file) in Path("/proc/self/maps").read_text())
        return 3.0

    monkeypatch.setattr("benchmarks.elastic.baselines.swap_ms", swap_ms)
    small = dataclasses.replace(TINY, layers=1, attention_windows=())
    paths = [
        write_tiny_bundle(tmp_path / "large.jaxllm", cfg=TINY),
        write_tiny_bundle(tmp_path / "small.jaxllm", cfg=small),
    ]
    sizes = plain_models(paths, weights="f32", options=OPTIONS)
    assert mapped == [False, False]
    assert [(each.name, each.level, each.change_ms) for each in sizes] == [
        ("small.jaxllm", 100, 3.0), ("large.jaxllm", 100, 3.0),
    ]  # fmt: skip
    assert str(paths[0]) in Path("/proc/self/maps").read_text()


def test_few_sub_models_are_spread_over_those_that_may_answer():
    assert layer_counts(8) == [1, 2, 3, 4, 5, 6, 7]
    assert layer_counts(8, run.Plan.quick().layer_subsets) == [2, 4, 5, 7]
    assert layer_counts(2, 4) == [1]
    assert layer_counts(1, 4) == []


def write_questions(folder, monkeypatch):
    """Eight questions, of which no context holds the last one, for a trace of one task."""
    (folder / "tasks" / "sst2").mkdir(parents=True)
    records = [{"text": f"film {n}", "label": ("positive", "negative")[n % 2]} for n in range(7)]
    records.append({"text": "film " * 2000, "label": "positive"})
    (folder / "tasks" / "sst2" / "valid.jsonl").write_text("\n".join(map(json.dumps, records)))
    monkeypatch.setattr("benchmarks.elastic.run.TRACE_TASKS", ("sentiment",))


@pytest.mark.slow
def test_the_whole_bench(elastic, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    write_questions(tmp_path, monkeypatch)
    # All of them, the one that no context holds, too.
    every = dataclasses.replace(run.Plan.quick(), questions=8)
    monkeypatch.setattr(run.Plan, "quick", classmethod(lambda _: every))
    plain = write_tiny_bundle(
        tmp_path / "plain.jaxllm", cfg=dataclasses.replace(TINY, layers=1, attention_windows=())
    )
    options = {"-m": elastic, "--data": tmp_path, "--plain-model": plain, "--compare-levels-with": elastic}
    arguments = [str(each) for pair in options.items() for each in pair]
    result = CliRunner().invoke(
        cli, ["bench", "elastic", *arguments, "--quick", "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    systems = {row["system"] for row in rows if row["metric"] == "accuracy"}
    assert systems == {
        "jaxllm", "jaxllm-lightest", "jaxllm-random", "jaxllm-oracle", "jaxllm-model-only",
        "jaxllm-prompt-only", "LG2+CS (no sparsity)", "PFS", "PFS-swap", "LLM-Pruner", "LE (no recovery)",
    }  # fmt: skip
    accuracy = {
        row["system"]: row["value"]
        for row in rows
        if row["case"] == "trace all six" and row["metric"] == "accuracy"
    }
    assert accuracy["jaxllm-oracle"] >= accuracy["jaxllm"]
    both = {row["system"] for row in rows if row["metric"] == "right_and_met"}
    assert both == systems
    notes = {row["system"]: row["note"] for row in rows if row["case"] == "trace all six"}
    assert "2 models: 1 layers, 2 layers; " in notes["LE (no recovery)"]
    assert "no recovery training" in notes["LE (no recovery)"]
    # One model of less than ours, by its own parameters.
    share = parameter_count(Bundle.open(plain).cfg) / parameter_count(TINY)
    assert f"1 models of {share:.2f} times our parameters" in notes["PFS"]
    assert all("paired 95 %" in note for system, note in notes.items() if system != "jaxllm")
    replayed = [row["note"] for row in rows if row["metric"] == "slo_met"]
    assert not all("0 of them failed" in note for note in replayed)
    switching = [row for row in rows if row["metric"] == "switch_ms" and row["system"] == "jaxllm"]
    assert all(row["note"].startswith("0 bytes") for row in switching)
    assert {"ttft_ms", "tpot_ms", "peak_memory_bytes", "slo_met", "ttft_share"} <= {
        row["metric"] for row in rows
    }
    levels = [row["value"] for row in rows if row["metric"] == "level_accuracy"]
    assert len(levels) == 4
    assert levels[:2] == levels[2:]


def test_levels_alone_are_compared_without_a_tiny_lm(elastic, tmp_path, monkeypatch):
    write_questions(tmp_path, monkeypatch)
    monkeypatch.setattr(run.Plan, "quick", classmethod(lambda _: run.Plan(questions=4)))
    models = ["-m", str(elastic), "--compare-levels-with", str(elastic)]
    told = CliRunner().invoke(
        cli,
        ["bench", "elastic", *models, "--only", "accuracy", "--json", "--data", str(tmp_path)],
        catch_exceptions=False,
    )
    rows = json.loads(told.stdout.splitlines()[-1])["rows"]
    assert {row["metric"] for row in rows} == {"level_accuracy"}
    assert [row["value"] * 4 % 1 for row in rows] == [0] * 4
    assert [row["value"] for row in rows[:2]] == [row["value"] for row in rows[2:]]
