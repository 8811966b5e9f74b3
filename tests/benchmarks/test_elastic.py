"""The elastic bench: variants and policies by hand, the planner, timing and figures, and all of it on tiny
models."""

import dataclasses
import itertools
import json
import math
import types

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.elastic import decisions, run
from benchmarks.elastic.baselines import added_by_level, elastic_shape, move, of_shares
from benchmarks.elastic.run import cases, replay_beside_whole, replay_rows, trace_rows
from benchmarks.harness.report import OURS, interval, lead
from benchmarks.models import SHAPES, shape
from benchmarks.traces import TraceRequest
from jaxllm import Engine
from jaxllm.bundle import Bundle
from jaxllm.bundle.levels import elastic_parts, read_ladder, read_recovery
from jaxllm.bundle.tiny_lm import tiny_lm_parts
from jaxllm.cli.main import cli
from jaxllm.elastic.ladder import Ladder, is_unit_parameter
from jaxllm.elastic.slo import Slo
from jaxllm.errors import ContextOverflow
from jaxllm.models.parameters import param_specs, parameter_count
from jaxllm.serving.elastic.planner import Planner, Proposal
from jaxllm.serving.elastic.profile import DeviceProfile
from jaxllm.serving.evaluation.tasks import score_options
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.plan import Cost
from jaxllm.tasks.example import TaskExample
from jaxllm.tasks.questions import Question, branching
from tests.tiny import TINY, VOCAB_SIZE, write_tiny_bundle
from tests.tiny_tlm import tiny_lm, word_prompt

# Two questions, three sizes; the whole model takes 10 and 20 ms to the first token, 2 ms per further one.
VARIANTS = decisions.Variants(
    ttft_ms=np.array([[2.0, 5.0, 10.0], [4.0, 10.0, 20.0]]),
    tpot_ms=np.array([[0.5, 1.0, 2.0]] * 2),
    right=np.array([[True, False, True], [False, True, True]]),
    change_ms=np.array([0.0, 0.0, 0.0]),
)
FULL_LEVEL = (np.array([10.0, 20.0]), np.array([2.0, 2.0]))


def request_of(slo):
    example = TaskExample(user="how?", answer="a", options=("a", "b"))
    return TraceRequest(time_s=0.0, app="app", slo=slo, task="mood", example=example)


RANKS = np.array([[1.0, 3.0, 2.0], [2.0, 1.0, 2.0]])


def asked_for(*slos, questions=(0, 1)):
    return decisions.Asked(
        trace=[request_of(each) for each in slos], questions=(), indices=questions, whole_ms=FULL_LEVEL
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


def test_the_bound_counts_any_variant_at_the_whole_objective():
    def bounded(slo):
        found = asked_for(slo, slo).bound(VARIANTS)
        return found.right.tolist(), found.met.tolist(), found.right_and_met.tolist()

    assert bounded(Slo(ttft=0.5, tpot=0.5)) == ([True, True], [True, True], [True, True])
    # Of the second question only the smallest is in time, and is wrong; late ones would be right.
    assert bounded(Slo(ttft=0.3, tpot=0.5)) == ([True, True], [True, True], [True, False])
    assert bounded(Slo(ttft=0.1, tpot=1.0)) == ([True, True], [False, False], [False, False])


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
    # What everything meets is kept apart.
    assert cases(slos) == ["<100,100>", "<50,50>", "the five with a limit", "all six"]
    questions = np.arange(20) // 2
    trace = [request_of(slo) for slo in slos]
    asked = decisions.Asked(trace=trace, questions=(), indices=questions.tolist(), whole_ms=FULL_LEVEL)
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


class Slow:
    """Takes a tenth of the whole model's time to look at a prompt of 100 tokens."""

    prompt_ratios = (0.25, 0.5, 1.0)

    def propose(self, prompt, slo, allowed):
        level, ratio = np.argwhere(allowed)[0]
        return Proposal(
            level=(50, 100)[level], prompt_ratio=self.prompt_ratios[ratio], scores=self.scores(prompt)
        )

    def scores(self, prompt):
        return np.arange(len(prompt.ids), dtype=float)

    def planning_ms(self, tokens):
        return float(tokens)


def trace_of(slos, tasks, right):
    """A trace of questions of 100 tokens of a model of two levels, and its variants, right as given."""
    proposer = Slow()
    levels, ratios = (50, 100), proposer.prompt_ratios
    # To the whole model 100 tokens take 1 s, and times shrink with both.
    profile = DeviceProfile(
        levels=levels, tokens=(1, 100), chunk_tokens=(1,), ttft_ms=((5.0, 500.0), (10.0, 1000.0)),
        tpot_ms=((50.0, 50.0), (100.0, 100.0)),
    )  # fmt: skip
    trace = [dataclasses.replace(request_of(slo), task=task) for slo, task in zip(slos, tasks, strict=True)]
    count, every = len(right), tuple(itertools.product(levels, ratios))
    asked = decisions.Asked(
        trace=trace,
        questions=[Question(trace[0].example, word_prompt(100, 1))] * count,
        indices=[number % count for number in range(len(trace))],
        whole_ms=(np.full(count, 1000.0), np.full(count, 100.0)),
    )
    ours = decisions.Variants(
        ttft_ms=np.array([[profile.ttft(level, int(100 * ratio)) for level, ratio in every]] * count),
        tpot_ms=np.array([[profile.tpot(level, 1) for level, _ in every]] * count),
        right=right,
        change_ms=np.zeros(len(every)),
        keys=every,
    )
    return Planner(profile, levels, proposer), ours, asked


def test_nothing_is_ahead_of_the_oracle():
    """Neither by what planning costs where no plan is needed, nor by a margin, nor by late answers."""
    draw = np.random.default_rng(3)
    shares = draw.uniform(0.15, 1.0, (400, 2)).round(2)
    slos = [Slo(ttft=float(ttft), tpot=float(tpot)) for ttft, tpot in shares]
    tasks = ["mood", "news"] * 200
    planner, ours, asked = trace_of(slos, tasks, draw.random((50, 6)) < 0.4)
    passes = np.full(50, 100.0)
    found = decisions.ablations(ours, asked, passes, passes + 20.0, seed=0)
    oracle = found.pop("jaxllm-oracle")
    found[OURS] = decisions.planned(planner, ours, asked, passes)
    for system in (OURS, "jaxllm-random", "jaxllm-fixed", "jaxllm-model-only", "jaxllm-prompt-only"):
        for share in ("right", "met", "right_and_met"):
            ahead = getattr(found[system], share) & ~getattr(oracle, share)
            assert not ahead.any(), (system, share, int(ahead.sum()))
    assert oracle.right_and_met.sum() > max(each.right_and_met.sum() for each in found.values())


def test_variants_take_what_they_must():
    """Half of the model takes half of the time with the whole prompt, and a tenth more to shorten it."""
    right = np.array([[False, False, True, False, False, False]])
    _, ours, asked = trace_of([Slo(ttft=0.5, tpot=0.5)], ["mood"], right)
    passes = np.full(1, 100.0)
    found = decisions.ablations(ours, asked, passes, passes + 20.0, seed=0)
    # The whole prompt is in time without a margin and without the tiny LM, and nothing else is right.
    assert found["jaxllm-oracle"].right_and_met.all()
    assert found["jaxllm-fixed"].right_and_met.all()
    # Planned for nine tenths it is not.
    assert not found["jaxllm-model-only"].met.any()
    # Half of the prompt is right: 250 ms and a pass of 100 are 0.35.
    right = np.roll(right, -1)
    for share, in_time in ((0.35, True), (0.34, False)):
        _, ours, asked = trace_of([Slo(ttft=share, tpot=0.5)], ["mood"], right)
        found = decisions.ablations(ours, asked, passes, passes + 20.0, seed=0)
        assert found["jaxllm-oracle"].right_and_met.all() == in_time


def test_other_shares_of_a_model_take_times_between_its_levels():
    profile = DeviceProfile(
        levels=(50, 100), tokens=(16, 64), chunk_tokens=(16,), ttft_ms=((6.0, 12.0), (10.0, 22.0)),
        tpot_ms=((3.0, 3.0), (4.0, 4.0)),
    )  # fmt: skip
    found = of_shares(profile, {50: 0.5, 100: 1.0}, {1: 0.25, 2: 0.5, 7: 0.75, 100: 1.0})
    assert found.levels == (1, 2, 7, 100)
    # 2 + 8 share and 2 + 20 share.
    np.testing.assert_allclose(found.ttft_ms, [[4, 7], [6, 12], [8, 17], [10, 22]])
    np.testing.assert_allclose(found.tpot_ms, [[2.5] * 2, [3] * 2, [3.5] * 2, [4] * 2])
    # Some of the variants, each later than before.
    some = VARIANTS.later(np.array([[1.0, 0.0, 0.0], [2.0, 0.0, 0.0]])).only([0, 2])
    assert some.ttft_ms.tolist() == [[3.0, 10.0], [6.0, 20.0]]


class Answering:
    """A service whose device slows down in the middle of a trace, and which forgets one request."""

    def __init__(self):
        self.calls = []

    def call(self, example, *, slo, max_tokens):
        self.calls.append(slo)
        asked = (len(self.calls) + 1) // 2
        if asked == 3:
            raise ContextOverflow("too long")
        slow = 1.0 if asked <= 10 else 3.0
        share = 1.0 if slo == Slo(ttft=1.0, tpot=1.0) else 0.45
        cost = Cost(ttft_ms=1000.0 * slow * share, tpot_ms=100.0 * slow * share, tokens=4)
        plan = types.SimpleNamespace(
            level=50,
            kept=[0],
            prompt_tokens=1,
            source="proposed",
            planning_ms=0.1,
            confident=True,
            whole=cost,
        )
        answer = types.SimpleNamespace(plan=plan, cost=cost, met=slow == 1, text="a")
        return types.SimpleNamespace(result=lambda: answer)


def test_objectives_are_those_of_the_device_as_it_is():
    tight = Slo(ttft=0.5, tpot=0.5)
    asked = decisions.Asked(
        trace=[request_of(tight)] * 40, questions=(), indices=[0] * 40, whole_ms=FULL_LEVEL
    )
    outcomes, met = replay_beside_whole(Answering(), asked, 30)
    assert len(outcomes) == 30
    assert [outcome.failure is None for outcome in outcomes] == [n != 2 for n in range(30)]
    # Where it has just become slower, its neighbours are of two minds.
    assert [kept for n, kept in enumerate(met) if not 6 <= n <= 14] == [n != 2 for n in range(21)]
    rows = {(row.case, row.metric): row for row in replay_rows(outcomes, met)}
    assert rows["replay <50,50>", "slo_met"].value == pytest.approx(np.mean(met))
    assert "against the profile alone 30.0% were in time" in rows["replay all six", "slo_met"].note
    assert "96.7% had one that is so in 99% of cases" in rows["replay all six", "slo_met"].note
    assert {metric for _, metric in rows} == {"slo_met", "right_and_met"}
    assert {row.metric for row in replay_rows(outcomes, met, answers=False)} == {"slo_met"}


def test_what_changing_a_level_adds_is_timed_in_pairs():
    """Of an engine that takes 3 ms longer for a level that it did not use last."""

    class Changing:
        levels, cfg = (20, 100), types.SimpleNamespace(vocab_size=9)

        def __init__(self):
            self.last, self.asked = 0, 0

        def stream(self, prompt, config, *, level):
            ttft_ms = level + 3.0 * (level != self.last) + 0.01 * (self.asked % 3)
            self.last, self.asked = level, self.asked + 1
            timings = types.SimpleNamespace(ttft_ms=ttft_ms)
            return types.SimpleNamespace(result=lambda: types.SimpleNamespace(timings=timings))

    engine = Changing()
    added = added_by_level(engine, rounds=9)
    assert engine.asked == 9 * 2 * 4
    for level, each in added.items():
        assert each.median_ms == pytest.approx(3, abs=0.03)
        assert each.low_ms <= each.median_ms <= each.high_ms
        assert each.ttft_ms == pytest.approx(level, abs=0.03)


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


def test_a_level_is_moved_with_all_its_units(tmp_path):
    parts = elastic_parts(Ladder(levels=(50, 100)))
    path = write_tiny_bundle(tmp_path / "e.jaxllm", "int8", cfg=TINY, parts=parts)
    engine = Engine.open(path, options=dataclasses.replace(OPTIONS, levels=(50,)), warm_up=False)
    for level in (50, 100):
        specs = param_specs(engine.runner_at(level).cfg)
        units = sum(math.prod(spec.shape) for name, spec in specs.items() if is_unit_parameter(name))
        # A byte each, and scales of a row or of a group.
        assert units < move(engine, level)[1] < 1.5 * units


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
