"""The elastic bench on tiny models, its command, and its policies by hand."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.elastic import decisions, run
from benchmarks.elastic.baselines import elastic_shape, layer_counts, move, plain_models
from benchmarks.elastic.run import trace_rows
from benchmarks.harness.report import OURS, interval, lead
from benchmarks.models import SHAPES, shape
from jaxllm import Engine
from jaxllm.bundle import Bundle
from jaxllm.bundle.levels import elastic_parts, read_ladder, read_recovery
from jaxllm.bundle.tiny_lm import tiny_lm_parts
from jaxllm.cli.main import cli
from jaxllm.elastic.ladder import Ladder, is_unit_parameter
from jaxllm.elastic.slo import Slo
from jaxllm.models.parameters import param_specs, parameter_count
from jaxllm.serving.evaluation.tasks import score_options
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.tasks.example import TaskExample
from jaxllm.tasks.questions import Question, branching
from tests.benchmarks.elastic_answers import VARIANTS, WHOLE, request_of
from tests.tiny import TINY, VOCAB_SIZE, write_tiny_bundle
from tests.tiny_tlm import tiny_lm


@pytest.fixture(scope="module")
def elastic(tmp_path_factory):
    tiny = tiny_lm((50, 100), (0.5, 0.8))
    facts = {"layer_importance": [0.5, 0.1]}
    parts = {**elastic_parts(Ladder(levels=(50, 100)), facts=facts), **tiny_lm_parts(tiny)}
    return write_tiny_bundle(tmp_path_factory.mktemp("elastic") / "e.jaxllm", cfg=TINY, parts=parts)


@pytest.mark.slow
def test_a_shape_has_every_level_and_its_adapter_or_is_like_another_bundle(tmp_path, monkeypatch, elastic):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path))
    small = shape(D=32, L=6, N=8, K=8, H=4, F=640, V=2 * VOCAB_SIZE, window_tokens=64)
    monkeypatch.setitem(SHAPES, "small", small)
    path = elastic_shape("small", "int8", lambda *_: None)
    written = path.stat().st_mtime_ns
    assert elastic_shape("small", "int8", lambda *_: None).stat().st_mtime_ns == written
    with Bundle.open(path) as bundle:
        ladder = read_ladder(bundle)
        assert ladder == Ladder(anchors=(5,))
        for level in ladder.levels:
            assert (read_recovery(bundle, level) is None) == (level == 100)
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
    right, fits = decisions.right_answers(engine, questions, prompts)
    assert (right[1], fits.tolist()) == (False, [True, False])
    (likely,) = score_options(engine, prompts[:1])
    assert right[0] == questions[0].is_right(likely)
    assert decisions.right_answers(engine, questions[1:], prompts[1:])[0].tolist() == [False]


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
        "jaxllm", "jaxllm-lightest", "jaxllm-random", "jaxllm-fixed", "jaxllm-oracle", "jaxllm-model-only",
        "jaxllm-prompt-only", "LG2+CS (no sparsity)", "PFS", "PFS-swap", "LLM-Pruner", "LE (no recovery)",
    }  # fmt: skip
    for metric in ("accuracy", "right_and_met"):
        shares = {
            row["system"]: row["value"]
            for row in rows
            if row["case"] == "trace all six" and row["metric"] == metric
        }
        ours = {system: share for system, share in shares.items() if system.startswith("jaxllm")}
        assert max(ours.values()) == ours["jaxllm-oracle"]
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


RANKS = np.array([[1.0, 3.0, 2.0], [2.0, 1.0, 2.0]])


def asked_for(*slos, questions=(0, 1)):
    return decisions.Asked(
        trace=[request_of(each) for each in slos], questions=(), indices=questions, whole_ms=WHOLE
    )


def chosen(slo, policy=decisions.largest, variants=VARIANTS, questions=(0, 1), margin=1.0, **more):
    asked = asked_for(*[slo] * len(questions), questions=questions)
    return asked.run(variants, policy, margin=margin, **more)


@pytest.mark.parametrize(
    ("ttft", "tpot", "how", "right", "met"),
    [
        # The largest in time.
        (1.0, 1.0, {}, [True, True], [True, True]),
        (0.5, 0.5, {}, [False, True], [True, True]),
        (0.5, 0.4, {}, [True, False], [True, True]),
        # Nothing is in time: the quickest is used, and misses.
        (0.1, 1.0, {}, [True, False], [False, False]),
        # A margin is planned for, and the objective is what counts.
        (0.52, 1.0, {"margin": 0.9}, [True, False], [True, True]),
        (0.21, 1.0, {"margin": 0.9}, [True, False], [True, True]),
        # Times per token may be taken as met.
        (1.0, 0.1, {"ignore_tpot": True}, [True, True], [True, True]),
        # Of ranked variants the first in time is taken.
        (1.0, 1.0, {"policy": decisions.ranked(RANKS)}, [False, True], [True, True]),
        (0.3, 1.0, {"policy": decisions.ranked(RANKS)}, [True, False], [True, True]),
    ],
)
def test_what_is_chosen(ttft, tpot, how, right, met):
    done = chosen(Slo(ttft=ttft, tpot=tpot), **how)
    assert (done.right.tolist(), done.met.tolist()) == (right, met)
    # Only right answers in time count.
    assert done.right_and_met.tolist() == [a and b for a, b in zip(right, met, strict=True)]


def test_changing_costs_time():
    swapped = dataclasses.replace(VARIANTS, change_ms=np.array([1.0, 6.0, 0.0]))
    tight = Slo(ttft=0.5, tpot=0.5)
    # To the middle size takes too long for both questions, to the small one not.
    done = chosen(tight, variants=swapped)
    assert (done.right.tolist(), done.met.tolist()) == ([True, False], [True, True])
    # Once it is there it stays in use.
    free = dataclasses.replace(VARIANTS, change_ms=np.array([0.0, 6.0, 0.0]))
    asked = asked_for(Slo(ttft=0.8, tpot=0.5), tight, tight, questions=(1, 1, 0))
    done = asked.run(free, margin=1.0)
    assert done.right.tolist() == [True, True, False]


def test_the_bound_counts_any_variant_at_the_whole_objective():
    def bounded(slo):
        found = asked_for(slo, slo).bound(VARIANTS)
        return found.right.tolist(), found.met.tolist(), found.right_and_met.tolist()

    assert bounded(Slo(ttft=0.5, tpot=0.5)) == ([True, True], [True, True], [True, True])
    # Of the second question only the smallest is in time, and is wrong; late ones would be right.
    assert bounded(Slo(ttft=0.3, tpot=0.5)) == ([True, True], [True, True], [True, False])
    assert bounded(Slo(ttft=0.1, tpot=1.0)) == ([True, True], [False, False], [False, False])


def test_random_choices_are_in_time():
    done = chosen(Slo(ttft=0.5, tpot=0.5), decisions.at_random(0), questions=[0] * 300)
    assert done.met.all()
    assert 0.4 < done.right.mean() < 0.6


def test_what_the_context_does_not_hold_is_never_in_time():
    ttft = VARIANTS.ttft_ms.copy()
    ttft[0] = np.inf
    ttft[1, 2] = np.inf
    some = dataclasses.replace(VARIANTS, ttft_ms=ttft, right=VARIANTS.right & np.isfinite(ttft))
    for policy in (decisions.largest, decisions.at_random(0)):
        done = chosen(Slo(ttft=1.0, tpot=1.0), policy, some)
        assert (done.right[0], done.met.tolist()) == (False, [False, True])
        assert policy is not decisions.largest or done.right.tolist() == [False, True]


def test_confidence_intervals_are_of_questions_and_paired():
    draw = np.random.default_rng(0)
    few, many = draw.random(50) < 0.8, draw.random(5000) < 0.8
    low, high = interval(many, np.arange(5000))
    assert low < many.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(0.16 / 5000), rel=0.15)
    assert np.diff(interval(few, np.arange(50))) > 5 * (high - low)
    # A question that is asked again says nothing new; as if all were new, half of the width would be left.
    right, questions = draw.random(100) < 0.7, np.arange(100)
    once = interval(right, questions)
    assert interval(np.tile(right, 6), np.tile(questions, 6)) == pytest.approx(once)
    assert np.diff(interval(np.tile(right, 6), np.arange(600))) < 0.5 * np.diff(once)
    # One that is asked often counts as often.
    assert interval(np.array([1, 1, 1, 0]), np.array([7, 7, 7, 3])) == (0.0, 1.0)
    assert "by +0.0 points, paired 95 % in [+0.0, +0.0]" in lead(right, right, questions)
    # Ahead on every tenth question, whatever else is hard about them.
    right, questions = draw.random(200) < 0.5, np.arange(200)
    behind = right & (questions % 10 > 0)
    low, high = interval(right.astype(float) - behind, questions)
    assert 0 < low < (right.mean() - behind.mean()) < high < 0.12


def test_rows_say_both_shares_and_how_far_ours_is_ahead():
    slos = [Slo(ttft=1.0, tpot=1.0), Slo(ttft=0.5, tpot=0.5)] * 10
    questions = np.arange(20) // 2
    trace = [request_of(slo) for slo in slos]
    asked = decisions.Asked(trace=trace, questions=(), indices=questions.tolist(), whole_ms=WHOLE)
    ours = decisions.Choices.of(np.ones(20, bool), np.arange(20) % 2 == 0)
    other = decisions.Choices.of(np.arange(20) % 2 == 0, np.ones(20, bool))
    rows = trace_rows({OURS: ours, "other": other}, asked, {"other": "as it is"})
    by = {(row.case, row.metric, row.system): row for row in rows}
    assert by["trace all six", "accuracy", OURS].value == 1.0
    assert by["trace all six", "right_and_met", OURS].value == 0.5
    assert by["trace <50,50>", "right_and_met", OURS].value == 0.0
    theirs = by["trace all six", "accuracy", "other"]
    assert theirs.value == 0.5
    # Every question has one right and one wrong answer of theirs, so that drawing questions changes nothing.
    assert theirs.note.startswith("95 % in [50.0%, 50.0%]; ours ahead by +50.0 points, paired 95 % in [+50.0")
    assert theirs.note.endswith("; as it is")
