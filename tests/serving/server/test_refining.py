"""The refinement of a coarse profile: while nothing is asked, never beside a call."""

import time
from types import SimpleNamespace

import pytest

from jaxllm.elastic.slo import Slo
from jaxllm.errors import JaxllmError
from jaxllm.serving.elastic.objectives import SafetyMargin
from jaxllm.serving.elastic.planner import Planner
from jaxllm.serving.elastic.profile import load_profile
from jaxllm.serving.elastic.profiling import measure_coarsely, profile_path
from jaxllm.serving.server import opening
from jaxllm.serving.server.opening import ProfileRefinement
from jaxllm.serving.server.scheduler import SchedulerOptions
from jaxllm.serving.server.service import LLMService
from tests.serving.server.executors import make_executor
from tests.serving.server.test_executor import call, together, written


@pytest.fixture(scope="module")
def coarse(context_service):
    """What was measured of the room's engine."""
    context_service.without_adapter()
    return measure_coarsely(context_service.service.engine)


@pytest.fixture
def service(served, coarse):
    engine = served.service.engine
    planner = Planner(coarse, engine.levels, safety_margin=SafetyMargin())
    return LLMService.of_engine(engine, planner, coarse)


def test_it_waits_until_nothing_was_asked_for_a_while_and_drops_what_was_disturbed(service, compiles):
    clock = SimpleNamespace(now_s=0.0)
    work = ProfileRefinement(service, quiet_s=2.0, clock=lambda: clock.now_s)
    runs = work.facts()["runs"]
    assert work.facts() == {"kind": "coarse", "runs_done": 0, "runs": runs}
    # Of two levels, six of each length.
    assert (runs >= 36, runs % 12) == (True, 0)
    assert not work.step()
    clock.now_s = 3.0
    assert work.step()
    work.interrupt()
    assert not work.step()
    assert work.facts()["runs_done"] == 0
    clock.now_s = 6.0
    with compiles() as count:
        while work.step():
            assert work.facts()["runs_done"] <= runs
        assert count() == 0
    assert work.facts() == {"kind": "whole", "runs_done": 0, "runs": 0}
    assert (service.profile.coarse, len(service.profile.tokens)) == (False, runs // 12)
    # Plans are made by it, and later starts find it.
    assert service.planner.lengths_missed(Slo(ttft=1.0, tpot=1.0), answer_tokens=1) == ()
    assert load_profile(profile_path(service.engine.model.bundle, service.engine.options)) == service.profile
    assert not ProfileRefinement(service, quiet_s=0).step()


def test_an_error_ends_it_and_answers_go_on(service, monkeypatch, caplog):
    def full(profile, path):
        raise JaxllmError("the device is full")

    monkeypatch.setattr(opening, "save_profile", full)
    work = ProfileRefinement(service, quiet_s=0)
    while work.step():
        pass
    assert "not refined any further: the device is full" in caplog.text
    # What was measured is of use until the end of the process.
    assert work.facts()["kind"] == "whole"


def test_calls_go_first_in_the_engines_thread(service):
    work = ProfileRefinement(service, quiet_s=0)
    executor = make_executor(service, SchedulerOptions(), idle_work=work)
    executor.start()
    asked = call("hello the", tokens=6)
    alone = service.engine.stream("hello the", asked.config).result().tokens
    late_s, pause_s = time.monotonic() + 300, 0.05
    while work.facts()["kind"] == "coarse":
        assert written(together(executor, asked)[0])[1] == alone
        assert time.monotonic() < late_s
        time.sleep(pause_s)
        # A call disturbs the run that is being measured; on a busy machine one takes a while.
        pause_s *= 1.2
    executor.stop(0)
    assert not service.profile.coarse
