"""The service: objectives of apps, plans that are carried out, answers that say what they took."""

import dataclasses

import numpy as np
import pytest

from jaxllm.bundle.levels import elastic_parts
from jaxllm.elastic.ladder import Ladder
from jaxllm.elastic.slo import SLOS, Slo
from jaxllm.errors import ConfigError, ContextGone, ContextOverflow, ObjectiveMissed
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.elastic import objectives
from jaxllm.serving.elastic.objectives import MOST, START, Latency, SafetyMargin
from jaxllm.serving.elastic.planner import Proposal
from jaxllm.serving.elastic.profiling import profile_path
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.server.service import LLMService
from jaxllm.tasks.example import TaskExample
from tests.tiny import tiny_tokenizer, write_tiny_bundle

OPTIONS = EngineOptions(context_tokens=128, chunk_tokens=(16, 64), buckets_bytes=0)
TEXT = "the quick brown fox jumps over the lazy dog and hides in a hole under the old oak tree"


class FirstWords:
    """Half the model, half the prompt, of which the first words matter most."""

    prompt_ratios = (0.5, 1.0)

    def propose(self, prompt, slo, allowed):
        return Proposal(level=50, prompt_ratio=0.5, scores=self.scores(prompt))

    def scores(self, prompt):
        return -np.arange(len(prompt.ids), dtype=float)

    def planning_ms(self, tokens):
        return 0.0


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_bundle(
        tmp_path_factory.mktemp("service") / "tiny.jaxllm", parts=elastic_parts(Ladder(levels=(50, 70, 100)))
    )


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXLLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def service(path):
    return LLMService.open(path, options=OPTIONS, proposer=FirstWords())


def with_times(service, scale=1.0):
    """The service with a profile of its own invention: levels cost their share."""
    profile = dataclasses.replace(
        service.profile,
        tokens=(16, 128),
        ttft_ms=tuple((level / 25 * scale, level / 2.5 * scale) for level in service.profile.levels),
        tpot_ms=tuple((level / 25 * scale,) * 2 for level in service.profile.levels),
    )
    planner = type(service.planner)(profile, profile.levels, FirstWords(), margin=1.0)
    return LLMService(service.engine, profile, planner)


def test_the_profile_is_measured_once_and_what_cannot_be_met_is_logged(service, path, caplog, monkeypatch):
    assert service.profile.levels == (50, 70, 100)
    told = {SLOS[4]: service.profile.tokens}
    monkeypatch.setattr("jaxllm.serving.elastic.profiling.measure", None)
    monkeypatch.setattr("jaxllm.serving.elastic.planned_service.unmet", lambda planner, objectives: told)
    with caplog.at_level("INFO", logger="jaxllm.serving.server.service"):
        again = LLMService.open(path, options=OPTIONS)
    assert again.profile == service.profile
    assert profile_path(again.engine.model.bundle, again.engine.options).exists()
    assert "no choice meets on this device: <20,60> for prompts of any length" in caplog.text


def test_a_call_is_answered_by_the_plan(service):
    mine = with_times(service, scale=1e4)
    answer = mine.call(TEXT, slo=Slo(ttft=0.45, tpot=0.6), instruction="say it again", max_tokens=6).result()
    assert (answer.plan.level, answer.plan.source) == (50, "proposed")
    tokens = mine.tokenize(TEXT, "say it again")
    kept = tokens.ids[answer.plan.kept].tolist()
    assert len(kept) < len(tokens.ids)
    told = mine.engine.tokenizer.decode(kept)
    assert [part in told for part in ("say it again", "the quick", "oak tree")] == [True, True, False]
    direct = mine.engine.stream(kept, answer.request.config, level=50).result()
    assert (answer.tokens, answer.text, answer.cost.tokens) == (
        direct.tokens,
        direct.text,
        len(direct.tokens),
    )
    assert answer.cost.ttft_ms > answer.timings.ttft_ms
    assert answer.met
    # By the profile of a much faster device it took too long. Ratios may be text.
    late = with_times(service, scale=1e-6).call(TEXT, slo="<50,60>", max_tokens=6).result()
    assert (late.objective, late.met) == (Slo(ttft=0.5, tpot=0.6), False)
    # Pieces add up, and an answer can be stopped.
    answer, stopped = (service.call(TEXT, max_tokens=12) for _ in range(2))
    assert "".join(answer) == answer.text
    assert answer.plan.source == "whole"
    next(stopped)
    stopped.close()
    assert list(stopped) == []


def test_answers_teach_how_late_they_come(service, monkeypatch):
    """By a clock that the model alone moves, and who reads its answer."""
    now_s, runner = [0.0], service.engine.runner
    monkeypatch.setattr("time.perf_counter", lambda: now_s[0])

    def timed(run, took_s):
        def running(*asked):
            now_s[0] += took_s
            return run(*asked)

        return running

    monkeypatch.setattr(runner, "prefill", timed(runner.prefill, 0.02))
    monkeypatch.setattr(runner, "decode", timed(runner.decode, 0.03))

    def late(ratio):
        return min(MOST, max(1.0, ratio))

    # Of the last answer alone.
    monkeypatch.setattr(objectives, "_WINDOW", 1)
    found = []
    for scale in (1e-3, 1.0, 1e3):
        mine, margin = with_times(service, scale), SafetyMargin(0.5)
        mine.planner.safety_margin = margin
        answer = mine.call(TEXT, slo=Latency(ttft_ms=1e9, tpot_ms=1e9), max_tokens=6).result()
        expected = answer.plan.expected
        first, further = answer.cost.ttft_ms / expected.ttft_ms, answer.cost.tpot_ms / expected.tpot_ms
        found.append(margin.factors()[0])
        assert found[-1] == pytest.approx((late(first), late(further)))
    assert found[0] == (MOST, MOST) > found[1] > found[2] == (1.0, 1.0)
    # Who takes pieces one by one may take his time: that is no lateness of further tokens.
    mine, margin = with_times(service, 1e-3), SafetyMargin(0.5)
    mine.planner.safety_margin = margin
    for _ in mine.call(TEXT, max_tokens=6):
        now_s[0] += 60
    assert margin.factors() == [(MOST, START)]


def test_apps_have_their_own_objectives(service):
    mine = with_times(service)
    mine.bind("mail", Slo(ttft=0.5, tpot=0.6))
    mine.bind("shell", Slo(ttft=0.001, tpot=0.001), strict=True)
    assert mine.call(TEXT, app="mail").objective == Slo(ttft=0.5, tpot=0.6)
    assert mine.call(TEXT, app="mail", slo=Latency(ttft_ms=1e6, tpot_ms=1e6)).plan.source == "whole"
    with pytest.raises(ObjectiveMissed, match=r"no sub-model meets <0\.1,0\.1>"):
        mine.call(TEXT, app="shell")
    assert mine.call(TEXT, app="shell", strict=False).plan.source == "nearest"
    with pytest.raises(ConfigError, match="'game' has no objective; bind it first"):
        mine.call(TEXT, app="game")
    with pytest.raises(ConfigError, match="an app needs a name"):
        mine.bind("", Slo(ttft=1.0, tpot=1.0))


def test_prompts_and_their_instructions(service, tmp_path):
    question = TaskExample(user=TEXT, answer="yes", system="is it true?", options=("yes", "no"))
    np.testing.assert_array_equal(service.tokenize(question).ids, service.tokenize(TEXT, "is it true?").ids)
    with pytest.raises(ConfigError, match="the prompt is empty"):
        service.call("  \n")
    with pytest.raises(ContextOverflow):
        service.call(TEXT * 10)
    # Without a template an instruction is read, too; a plain bundle is served whole.
    path = write_tiny_bundle(tmp_path / "plain.jaxllm", tokenizer=tiny_tokenizer(chat=False))
    plain = LLMService.open(path, options=OPTIONS)
    tokens = plain.tokenize(TEXT, "is it true?")
    assert "is it true?" in tokens.text
    assert tokens.forced[: len("is it")].any()
    assert plain.tokenize(TEXT).text == TEXT
    answer = plain.call(TEXT, slo=Slo(ttft=0.2, tpot=0.2), max_tokens=3).result()
    assert (answer.plan.level, answer.plan.source) == (100, "nearest")


def test_levels_can_be_chosen(path):
    some = LLMService.open(path, levels=(70,), options=OPTIONS)
    assert some.engine.levels == (70, 100)
    with pytest.raises(ConfigError, match="there is no level 60"):
        LLMService.open(path, levels=(60,), options=OPTIONS)


@pytest.mark.slow
def test_apps_own_contexts_that_outlive_the_service(path, service, tmp_path):
    with pytest.raises(ConfigError, match="keeps no contexts"):
        service.new_context("mail")
    options = ContextOptions(folder=tmp_path / "contexts")

    def opened():
        return LLMService.open(path, levels=(50,), options=OPTIONS, contexts=options)

    kept = opened()
    assert kept.engine.options.kv_codec == "channel"
    context = kept.new_context("mail", level=50)
    first = context.generate(TEXT, instruction="Be short.", max_tokens=20)
    assert "".join(first) == first.text
    pinned = kept.new_context("mail", pinned=True)
    assert {each.name for each in kept.contexts_of("mail")} == {context.name, pinned.name}
    assert kept.contexts_of("calendar") == []
    tokens = context.tokens
    kept.close()

    kept = opened()
    again = kept.context("mail", context.name)
    assert again.tokens == tokens
    assert again.level == 50
    answer = again.generate("and then?", max_tokens=5).result()
    assert answer.reused_tokens == (len(tokens) - 1) // 16 * 16
    assert again.tokens[: len(tokens)] == tokens
    with pytest.raises(ContextGone):
        kept.context("calendar", context.name)
    again.delete()
    assert [each.name for each in kept.contexts_of("mail")] == [pinned.name]
    assert kept.contexts_of("mail")[0].record.pinned
    kept.close()


def test_a_service_says_which_objectives_its_device_cannot_meet(service, caplog):
    mine = with_times(service)
    # Half of the model takes half of the time, and half of the prompt half of that.
    tight, loose = Slo(ttft=0.2, tpot=0.6), Slo(ttft=0.6, tpot=0.6)
    assert mine.unmet("<20,60>", loose) == {tight: (16, 128)}
    assert SLOS[5] in mine.unmet()
    assert SLOS[0] not in mine.unmet()
    mine.bind("game", loose)
    assert caplog.text == ""
    mine.bind("mail", tight)
    assert (
        "mail asks for what no choice meets on this device: <20,60> for prompts of any length" in caplog.text
    )
    # What apps ask for is looked at, too.
    own = Slo(ttft=0.01, tpot=0.9)
    mine.bind("shell", own)
    assert own in mine.unmet()
