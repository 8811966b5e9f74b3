"""The service: objectives of apps, plans that are carried out, answers that say what they took."""

import dataclasses

import numpy as np
import pytest

from jaxllm.bundle.levels import elastic_parts
from jaxllm.elastic.ladder import Ladder
from jaxllm.elastic.slo import SLOS, Slo
from jaxllm.errors import ConfigError, ContextOverflow, ObjectiveMissed
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


def test_the_profile_is_measured_once(service, path, monkeypatch):
    assert service.profile.levels == (50, 70, 100)
    monkeypatch.setattr("jaxllm.serving.elastic.profiling.measure", None)
    again = LLMService.open(path, options=OPTIONS)
    assert again.profile == service.profile
    assert profile_path(again.engine.model.bundle, again.engine.options).exists()


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
    assert (answer.tokens, answer.text) == (direct.tokens, direct.text)
    assert answer.cost.tokens == len(direct.tokens)
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
    # Of the last answer alone.
    monkeypatch.setattr(objectives, "_WINDOW", 1)

    def learned(scale, **options):
        """Factors after an answer by the profile of a device of another speed."""
        mine, margin = with_times(service, scale), SafetyMargin(0.5)
        mine.planner.safety_margin = margin
        answer = mine.call(TEXT, max_tokens=6, **options)
        answer.result() if options else list(answer)
        return margin.factors()[0]

    never = Latency(ttft_ms=1e9, tpot_ms=1e9)
    # The time to plan is expected at any speed.
    first, further = learned(1e-6, slo=never)
    assert (first > 1, further) == (True, MOST)
    assert learned(1e6, slo=never) == (1.0, 1.0)
    # Who takes pieces one by one may take his time: that is no lateness of further tokens.
    assert learned(1e-6)[1] == START


def test_apps_have_their_own_objectives(service, caplog):
    mine = with_times(service)
    # Half of the model takes half of the time, and half of the prompt half of that.
    mine.bind("game", Slo(ttft=0.6, tpot=0.6))
    assert caplog.text == ""
    mine.bind("game", Slo(ttft=0.2, tpot=0.6))
    assert "game asks for what no choice meets on this device: <20,60> for prompts of any" in caplog.text
    assert {Slo(ttft=0.2, tpot=0.6), SLOS[5]} <= set(mine.unmet())
    mine.bind("mail", Slo(ttft=0.5, tpot=0.6))
    mine.bind("shell", Slo(ttft=0.001, tpot=0.001), strict=True)
    assert mine.call(TEXT, app="mail").objective == Slo(ttft=0.5, tpot=0.6)
    assert mine.call(TEXT, app="mail", slo=Latency(ttft_ms=1e6, tpot_ms=1e6)).plan.source == "whole"
    with pytest.raises(ObjectiveMissed, match=r"no sub-model meets <0\.1,0\.1>"):
        mine.call(TEXT, app="shell")
    assert mine.call(TEXT, app="shell", strict=False).plan.source == "nearest"
    with pytest.raises(ConfigError, match="'chess' has no objective; bind it first"):
        mine.call(TEXT, app="chess")
    with pytest.raises(ConfigError, match="an app needs a name"):
        mine.bind("", Slo(ttft=1.0, tpot=1.0))


def test_prompts_and_their_instructions(service, path, tmp_path):
    some = LLMService.open(path, levels=(70,), options=OPTIONS)
    assert some.engine.levels == (70, 100)
    with pytest.raises(ConfigError, match="keeps no contexts"):
        some.new_context("mail")
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
