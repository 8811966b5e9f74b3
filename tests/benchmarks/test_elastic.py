"""The planner, the timing and the figures of the elastic bench."""

import dataclasses
import itertools
import types

import numpy as np
import pytest

from benchmarks.elastic import baselines as switching
from benchmarks.elastic import decisions
from benchmarks.elastic.baselines import Added, Size, added_by_level, of_shares
from benchmarks.elastic.run import cases, planning_rows, replay_beside_whole, replay_rows, trace_rows
from benchmarks.harness.report import OURS
from benchmarks.traces import Outcome
from jaxllm.elastic.slo import Slo
from jaxllm.errors import ContextOverflow
from jaxllm.serving.elastic.planner import Planner, Proposal
from jaxllm.serving.elastic.profile import DeviceProfile
from jaxllm.serving.ground.plan import Cost
from jaxllm.tasks.example import TaskExample
from jaxllm.tasks.questions import Question
from jaxllm.text.droppable import prompt_tokens
from jaxllm.text.tokenizer import Tokenizer
from tests.benchmarks.elastic_answers import VARIANTS, WHOLE, request_of
from tests.tiny import tiny_tokenizer
from tests.tiny_tlm import word_prompt


class Half:
    """Proposes half the model with half of the prompt, and knows of no whole prompts."""

    prompt_ratios = (0.25, 0.5)

    def propose(self, prompt, slo, allowed):
        assert allowed.shape == (2, 2)
        return Proposal(level=50, prompt_ratio=0.5, scores=self.scores(prompt))

    def scores(self, prompt):
        return np.arange(len(prompt.ids), dtype=float)

    def planning_ms(self, tokens):
        return 0.0


class Slow(Half):
    """Takes a tenth of the whole model's time to look at a prompt of 100 tokens."""

    prompt_ratios = (0.25, 0.5, 1.0)

    def propose(self, prompt, slo, allowed):
        level, ratio = np.argwhere(allowed)[0]
        return Proposal(
            level=(50, 100)[level], prompt_ratio=self.prompt_ratios[ratio], scores=self.scores(prompt)
        )

    def planning_ms(self, tokens):
        return float(tokens)


def trace_of(slos, tasks, right, proposer=None):
    """A trace of questions of 100 tokens of a model of two levels, and its variants, right as given."""
    proposer = proposer or Slow()
    levels, ratios = (50, 100), decisions.with_whole(proposer.prompt_ratios)
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


def test_a_proposer_that_knows_no_whole_prompts():
    slos = (Slo(ttft=1.0, tpot=1.0), Slo(ttft=0.45, tpot=0.6))
    # Half the model with half of the prompt, and everything.
    right = np.array([[False, True, False, False, False, True]])
    planner, ours, asked = trace_of(slos, ["mood"] * 2, right, Half())
    assert ours.keys[:3] == ((50, 0.25), (50, 0.5), (50, 1.0))
    done = decisions.planned(planner, ours, asked, np.zeros(1))
    assert (done.right.tolist(), done.met.tolist()) == ([True, True], [True, True])
    others = decisions.ablations(ours, asked, np.zeros(1), np.zeros(1), seed=0)
    assert others["jaxllm-oracle"].right.all()
    # Without shorter prompts half the model must do, which takes too long and is wrong.
    assert others["jaxllm-model-only"].right.tolist() == [True, False]
    assert others["jaxllm-model-only"].met.tolist() == [True, False]
    # The whole model is too slow per token with any prompt.
    assert others["jaxllm-prompt-only"].met.tolist() == [True, False]
    assert others["LG2+CS (no sparsity)"].met.all()


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


def test_the_best_fixed_choices_differ_by_task_alone():
    # Of the first task half of the model is right with any prompt, of the second the whole model.
    right = np.zeros((2, 6), bool)
    right[0, 2] = right[1, 5] = True
    slos = [Slo(ttft=1.0, tpot=1.0)] * 4
    _, ours, asked = trace_of(slos, ["mood", "news"] * 2, right)
    fixed = decisions.ablations(ours, asked, np.zeros(2), np.zeros(2), seed=0)["jaxllm-fixed"]
    assert fixed.right_and_met.all()
    # Of one task one of the two questions is answered wrong.
    _, ours, asked = trace_of(slos, ["mood"] * 4, right)
    fixed = decisions.ablations(ours, asked, np.zeros(2), np.zeros(2), seed=0)["jaxllm-fixed"]
    assert fixed.right_and_met.tolist() == [False, True] * 2


def test_planning_is_the_pass_and_what_else_there_is_to_do():
    passes = {3: 1.0, 5: 2.0, 9: 4.0}
    spent = {3: 1.2, 5: 2.5, 9: 4.9}

    class Plans:
        def planning_ms(self, tokens):
            return passes[tokens]

        def plan(self, prompt, slo, *, answer_tokens):
            return dataclasses.make_dataclass("Made", ["planning_ms"])(spent[len(prompt.ids)])

    def question(tokens):
        return Question(request_of(Slo(ttft=0.5, tpot=0.5)).example, word_prompt(tokens, 1))

    alone, whole = decisions.plan_times(Plans(), Plans(), [question(each) for each in passes])
    assert alone.tolist() == [1.0, 2.0, 4.0]
    assert whole.tolist() == [1.5, 2.5, 4.5]


def test_planning_is_measured_in_the_service():
    def outcome(planning_ms, source="proposed", failure=None):
        return Outcome(
            request=request_of(Slo(ttft=0.5, tpot=0.5)), right=True, met=True, level=50, kept_share=1.0,
            cost=Cost(ttft_ms=1.0, tpot_ms=1.0, tokens=2), source=source, planning_ms=planning_ms,
            failure=failure,
        )  # fmt: skip

    asked = decisions.Asked(trace=(), questions=(), indices=[0, 1, 0, 1, 0], whole_ms=WHOLE)
    many = [outcome(1.0), outcome(1.0), outcome(3.0), outcome(0.0, "whole"), outcome(0.0, "failed", "long")]
    (row,) = planning_rows(many, asked, np.array([0.5, 0.5]))
    # Of 10, 20 and 10 ms; what needed no plan is not among them.
    assert row.value == pytest.approx(0.1)
    assert "median over 3 requests" in row.note
    assert "alone 5.0%" in row.note
    assert planning_rows(many[3:], asked, np.array([0.5, 0.5])) == []


class Tokens:
    """An engine of which only the tokenizer matters."""

    def __init__(self, chat):
        self.tokenizer = Tokenizer(tiny_tokenizer(chat=chat))

    def at(self, level):
        return self


def test_a_model_of_another_tokenizer_reads_its_own_tokens(monkeypatch):
    ours, theirs = Tokens(chat=True), Tokens(chat=False)
    profile = DeviceProfile(
        levels=(100,), tokens=(1, 1000), chunk_tokens=(1,), ttft_ms=((1.0, 1000.0),), tpot_ms=((1.0, 1.0),)
    )
    questions = [Question.read(ours.tokenizer, TaskExample(user="how?", answer="a", options=("a", "b")))]
    own = len(prompt_tokens(theirs.tokenizer, questions[0].example).ids)
    assert own != len(questions[0].prompt.ids)
    monkeypatch.setattr(decisions, "right_answers", lambda *_: (np.array([True]), np.array([True])))
    profiles = {id(ours): profile, id(theirs): profile}
    found = decisions.size_variants([Size("a", ours, 100), Size("b", theirs, 100)], profiles, questions)
    assert found.ttft_ms[0].tolist() == pytest.approx(
        [profile.ttft(100, len(questions[0].prompt.ids)), profile.ttft(100, own)]
    )


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
    asked = decisions.Asked(trace=[request_of(tight)] * 40, questions=(), indices=[0] * 40, whole_ms=WHOLE)
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


def test_what_cannot_be_told_from_nothing_has_no_ratio(monkeypatch):
    monkeypatch.setattr(switching, "move", lambda engine, level: (6.0, 10))
    monkeypatch.setattr(switching, "own_bytes", lambda engine, level: 0)
    draw = np.random.default_rng(0)
    sure, unsure = Added.of(np.full(9, 3.0), np.zeros(9) + 1), Added.of(draw.normal(size=9), np.zeros(9) + 1)
    monkeypatch.setattr(switching, "added_by_level", lambda *_, **__: {50: sure, 100: unsure})
    rows = {(row.case, row.system): row for row in switching.switch_rows(None, rounds=9)}
    assert (rows["to level 50", "jaxllm"].value, rows["to level 50", "jaxllm"].ratio) == (2.0, 3.0)
    assert rows["to level 100", "jaxllm"].ratio is None
    assert rows["to level 50", "LLM-Pruner"].value == 6.0


def test_all_of_the_time_is_no_limit_and_told_apart():
    slos = (Slo(ttft=1, tpot=1), Slo(ttft=0.5, tpot=0.5), Slo(ttft=1, tpot=0.6))
    assert cases(slos) == ["<100,100>", "<50,50>", "<100,60>", "the five with a limit", "all six"]
    assert cases(slos[:1]) == ["<100,100>", "all six"]
    trace = [request_of(slo) for slo in slos]
    asked = decisions.Asked(trace=trace, questions=[], indices=[0, 1, 2], whole_ms=WHOLE)
    ours = decisions.Choices.of(np.array([True, False, True]), np.array([True, True, False]))
    rows = {(row.case, row.metric): row for row in trace_rows({OURS: ours}, asked, {})}
    assert rows["trace all six", "right_and_met"].value == pytest.approx(1 / 3)
    assert rows["trace the five with a limit", "right_and_met"].value == 0
    assert rows["trace the five with a limit", "accuracy"].value == 0.5
    assert "in time by the profiles 50.0%" in rows["trace the five with a limit", "accuracy"].note
