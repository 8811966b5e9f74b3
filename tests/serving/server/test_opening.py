"""Starts of a service, counted rather than timed: what is on disk is neither compiled nor measured again. The
refinement of a coarse profile: while nothing is asked, never beside a call."""

import time
from types import SimpleNamespace

import pytest

from jaxllm.bundle.levels import elastic_parts
from jaxllm.elastic.ladder import Ladder
from jaxllm.elastic.slo import Slo
from jaxllm.errors import JaxllmError
from jaxllm.serving.elastic import profiling
from jaxllm.serving.elastic.objectives import SafetyMargin
from jaxllm.serving.elastic.planner import Planner
from jaxllm.serving.elastic.profile import load_profile
from jaxllm.serving.elastic.profiling import measure_coarsely, profile_path
from jaxllm.serving.runners.scorer import Scorer
from jaxllm.serving.server import opening
from jaxllm.serving.server.opening import ProfileRefinement, open_service
from jaxllm.serving.server.scheduler import SchedulerOptions
from jaxllm.serving.server.service import LLMService
from jaxllm.serving.server.service_options import ServerOptions
from jaxllm.serving.server.start import LaterBuckets, StartProgress, later_buckets
from tests.serving.server.services import call, make_executor, together, written
from tests.tiny import write_tiny_bundle


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


def test_it_waits_until_nothing_was_asked_for_a_while_and_drops_what_was_disturbed(
    service, coarse, compiles, monkeypatch, caplog
):
    clock = SimpleNamespace(now_s=0.0)
    work = ProfileRefinement(service, clock=lambda: clock.now_s)
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
    assert ProfileRefinement(service).facts()["kind"] == "whole"

    def full(*_):
        raise JaxllmError("it is full")

    # An error ends it, and what was measured is of use until the end of the process.
    monkeypatch.setattr(opening, "save_profile", full)
    monkeypatch.setattr(opening, "_QUIET_S", 0)
    service.use_profile(coarse)
    work = ProfileRefinement(service)
    while work.step():
        pass
    assert "not refined any further: it is full" in caplog.text
    assert work.facts()["kind"] == "whole"


def test_calls_go_first_in_the_engines_thread(service, monkeypatch):
    monkeypatch.setattr(opening, "_QUIET_S", 0)
    work = ProfileRefinement(service)
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


@pytest.mark.usefixtures("own_compilations")
def test_a_second_start_compiles_and_measures_nothing(tmp_path, compiles, monkeypatch):
    # Graphs are kept, as users have it.
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JAXLLM_BUCKETS_BYTES")
    parts = elastic_parts(Ladder(levels=(50, 100)))
    model = write_tiny_bundle(tmp_path / "tiny.jaxllm", "int8", parts=parts)
    options = ServerOptions(model=str(model), context_tokens=64, batch_rows=(2,), contexts=tmp_path / "kept")
    opened = open_service(options)
    first = opened.service
    assert first.profile.coarse
    # What only some requests need is compiled later.
    later = later_buckets(first.engine, copies=True)
    later.start()
    later.wait()
    table = first.engine.runner.buckets
    table.fill([*Scorer(first.engine.runner).embedding_buckets(), *first.engine.runner.fork_buckets()])
    built = first.engine.runner.buckets.bucket_ms
    assert built
    opened.close()
    for name in ("measure", "measure_coarsely"):
        monkeypatch.setattr(profiling, name, None)
    with compiles() as count:
        again = open_service(options).service
        assert again.profile == first.profile
        # The first answer and the first embedding of each length, too.
        assert again.engine.stream("hello", level=50).result().tokens
        for tokens in (1, 20, 64):
            embedding = Scorer(again.engine.runner).embedding([3] * tokens)
            while embedding.step():
                pass
        scoring = Scorer(again.engine.runner).scoring([3] * 64)
        while scoring.step():
            pass
        later = later_buckets(again.engine, copies=True)
        later.start()
        later.wait()
        assert count() == 0
    table = again.engine.runner.buckets
    assert all(bucket in table for bucket in built)
    again.close()


def test_a_start_tells_what_it_does_and_how_long_it_takes(caplog):
    times = iter((0.0, 0.0, 10.0, 20.0, 21.0, 30.0, 40.0))
    progress = StartProgress(lambda: next(times))
    assert progress.text == "finding the model"
    with caplog.at_level("INFO"):
        for done in range(5):
            progress("compile", done, 4)
            if done == 1:
                assert progress.text == "compiling buckets (25 %), about 30 s left"
    assert progress.facts == {"stage": "compiling buckets", "done": 4, "total": 4, "left_s": 0.0}
    # Not each part, and the end of the start says itself.
    assert [each.getMessage().partition(": ")[2] for each in caplog.records] == [
        "compiling buckets (0 %)", "compiling buckets (25 %), about 30 s left",
        "compiling buckets (75 %), about 7 s left",
    ]  # fmt: skip


@pytest.mark.parametrize("error", [None, JaxllmError("it is full")])
def test_later_buckets_are_kept_in_groups_and_end_with_the_service(caplog, error):
    kept, ended = [], []

    def keep(group, progress):
        kept.append(group)
        progress("compile", 1, 1)
        if error is not None:
            raise error

    later = LaterBuckets(keep, [[1], [2]], lambda: ended.append(True))
    later.wait()
    later.start()
    later.wait()
    assert (kept, ended) == (([[1], [2]], [True]) if error is None else ([[1]], []))
    assert ("in advance: it is full" in caplog.text) == (error is not None)
    stopped = LaterBuckets(keep, [[3], [4]], lambda: ended.append(False))
    stopped._stopping.set()
    stopped.start()
    stopped.close()
    assert kept[-1] == [3]
    assert False not in ended
